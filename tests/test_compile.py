"""The kernels compile, and fit, for architectures that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Widths of K: all of them for the tuned architecture, the usual ones elsewhere (a few seconds each).
TARGETS = {90: [], 80: [64, 128], 89: [256], 100: [128]}


@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_compile_and_fit(capability: int) -> None:
    program = Path(__file__).parent / "compile_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(program.parent.parent)
    widths = [str(width) for width in TARGETS[capability]]
    command = [sys.executable, "-W", "ignore", str(program), str(capability), *widths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    kernels = [11 if int(width) >= 128 else 7 for width in widths or (16, 32, 64, 128, 256)]  # of bf16 and of fp32
    assert done.stdout.count("registers") == sum(kernels)
