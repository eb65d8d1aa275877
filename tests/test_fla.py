"""The backend for flash-linear-attention, in the real package: the one that is installed, and one of the 0.5 series."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Where `make` puts fla-core 0.5.2, beside the environment's own 0.6.
OLDER = Path(sys.prefix) / "fla-0.5"


def answer(*before: Path) -> dict:
    """What the program prints, with some folders before all others on its path."""
    path = os.pathsep.join(map(str, (*before, HERE.parent)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # fla decides at its import
    command = [sys.executable, "-W", "ignore", HERE / "fla_program.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(
            (), marks=pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
        ),
        pytest.param((OLDER,), marks=pytest.mark.skipif(not OLDER.is_dir(), reason=f"no fla-core 0.5 in {OLDER}")),
    ],
    ids=["installed", "0.5"],
)
def test_a_caller_of_fla(before: tuple[Path, ...]) -> None:
    """Every layout and gate by our code, as fla's own recurrence has it; what we cannot do is declined, with why."""
    said = answer(*before)
    assert said["ran"] == 7
    assert said["differences"]
    limit = 1e-5 if said["device"] == "cpu" else 1e-3
    assert {name: x for name, x in said["differences"].items() if not x < limit} == {}
    assert {name: x for name, x in said["own kernels"].items() if not x < 1e-2} == {}
    assert bool(said["own kernels"]) == (said["device"] == "cuda")
    assert [reason for reason, declined in said["declined"].items() if not declined] == []
