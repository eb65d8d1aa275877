"""The kernels compile, and fit, for architectures that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Widths of K: most of them for the tuned architecture, the usual ones elsewhere (ten seconds or so each).
TARGETS = {90: [32, 128, 256], 80: [64, 128], 89: [256], 100: [128]}
#: Kernels of bf16, anchored chunks among them, and of fp32: from 128 on segments too.
KERNELS = {32: 7, 64: 7, 128: 11, 256: 11}


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_and_fit(capability: int) -> None:
    program = Path(__file__).parent / "compile_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(program.parent.parent)
    widths = TARGETS[capability]
    command = [sys.executable, "-W", "ignore", str(program), str(capability), *map(str, widths)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("registers") == sum(KERNELS[width] for width in widths)
