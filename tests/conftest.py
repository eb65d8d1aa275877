"""Where the tests run: kernels on a GPU if there is one, interpreted on the CPU if not.

A test that runs a kernel takes its implementation from `kernels()` or `implementations()`; on a GPU these carry the
marker `gpu`, so that `pytest -m gpu` is the GPU suite and everything else needs none.
"""

from __future__ import annotations

import os
from pathlib import Path

import machines
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported

# The kernels that the tests compile are kept with the checkout: compiled once, however many processes and runs.
os.environ.setdefault("KDA_CACHE", str(Path(__file__).parents[1] / "build" / "cache"))

# The oracle's matrices are tiny: a second thread only waits, and waits very long where the cores are shared.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: parallel workers that end together end sooner."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def library() -> Path:
    """The Hopper kernels, compiled for this checkout. The build's own lock makes the workers share one compilation."""
    from kda.cuda import build
    from kda.problem import Missing

    try:
        return build.build()
    except build.UnsafeCache:
        raise
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> machines.Machine:
    """A machine whose nvcc does as it is told."""
    return machines.fake(tmp_path, monkeypatch)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any tool; the one directory of its PATH."""
    return machines.bare(tmp_path, monkeypatch)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a run that compiled the Hopper kernels: what they take, which CI keeps in its log."""
    from kda.cuda import build, resources
    from kda.problem import Missing

    reports = [report for listed in terminalreporter.stats.values() for report in listed]
    if not any("test_library.py" in getattr(report, "nodeid", "") for report in reports):
        return
    terminalreporter.section("Hopper kernels")
    try:
        path = build.built()
    except Missing as error:
        terminalreporter.line(str(error))
        return
    if path is None:
        terminalreporter.line(str(build.unavailable()))
        return
    terminalreporter.line(str(path))
    for row in resources.read(path.parent / build.RESOURCES):
        terminalreporter.line(str(row))
