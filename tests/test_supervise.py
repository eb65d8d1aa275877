"""The process that watches those that fuzz: deaths, hangs, Ctrl-C, several at once. Each test starts real processes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import machines
import pytest
from test_cli import reproducer

import kda
from kda.cli import counts, journal, main, supervise
from kda.cli.counts import Counts
from kda.cli.fuzz import INTERRUPTED, Options
from kda.testing.cases import Case
from kda.testing.operations import OPERATIONS

ROOT = str(Path(kda.__file__).parents[1])

#: Run by every Python that starts with its folder on PYTHONPATH: `recurrent` does something else with tokens.
PLANT = """
import os, signal, sys, time
from dataclasses import replace
import torch
import kda.ref.recurrent as module

def fault(problem):
    {fault}

good = module.IMPL
module.IMPL = replace(good, fwd=lambda problem: fault(problem) if problem.facts.T else good.fwd(problem))
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", ROOT)


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str) -> None:
    """In the processes that this one starts."""
    (folder / "sitecustomize.py").write_text(PLANT.format(fault=fault))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def fuzz(*argv: str) -> int:
    return main(["fuzz", "--impl", "recurrent", "--no-ledger", "--seed", "1", *argv])


def test_a_death_is_reported_and_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert fuzz("--seconds", "20", "--json", str(tmp_path / "counts")) == 1
    text = capsys.readouterr().out
    assert "recurrent: the process died by SIGSEGV while this case ran" in text
    assert "Segmentation fault" in text, "where it was"
    assert "sitecustomize.py" in text
    command, *options, case = reproducer(text)
    assert (command, options) == ("replay", ["--impl", "recurrent"])
    assert sum(Case.parse(case).lengths) + Case.parse(case).padding > 0
    assert "it failed again: the process died by SIGSEGV" in text
    (row,) = counts.read(tmp_path / "counts")
    assert (row.operation, row.impl, row.seed, row.findings) == ("fwd", "recurrent", 1, 1)


def test_a_hang_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, tmp_path, "time.sleep(1000)")
    replayed: list[journal.Record] = []
    monkeypatch.setattr(supervise, "replay", lambda console, record, seconds: replayed.append(record))
    assert fuzz("--seconds", "60", "--case-seconds", "0.5") == 1
    text = capsys.readouterr().out
    assert "recurrent: hung for more than 0.5 s while this case ran" in text
    assert re.search(r'sitecustomize.py", line \d+ in fault', text), "where it was"
    assert [record.case for record in replayed] == [reproducer(text)[-1]]


def test_several_processes_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts"
    options = ["--processes", "2", "--seconds", "0.5", "--json", str(file)]
    assert main(["fuzz", "--operation", "convert", "--seed", "7", *options]) == 0
    printed = capsys.readouterr().out
    rows = counts.read(file)
    assert [row.seed for row in rows] == [7, 7 + supervise.APART]
    assert all(row.cases > 0 and row.seconds > 0.4 and row.versions and row.date for row in rows)
    assert all(json.loads(line)["device"] for line in file.read_text().splitlines())
    (line,) = [line for line in printed.splitlines() if line.strip().startswith("convert ")]
    assert line.split()[2:5:2] == ["2", f"{sum(row.cases for row in rows):,}"]
    assert main(["fuzz", "--summary", str(file)]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """Both processes end, without a traceback, and what was counted is kept."""
    command = [sys.executable, "-m", "kda", "fuzz", "--operation", "convert", "--seconds", "100"]
    process = subprocess.Popen(
        [*command, "--json", str(tmp_path / "counts")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        until = time.monotonic() + 60
        while not any(row.cases for folder in tmp_path.glob("kda-fuzz-*/0") for row in journal.rows(folder)):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        text, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED
    assert "interrupted" in text
    assert "Traceback" not in text
    assert [row.findings for row in counts.read(tmp_path / "counts")] == [0]
    assert not list(tmp_path.glob("kda-fuzz-*")), "nothing is left"


def test_wrong_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz("--processes", "0") == 2
    assert fuzz("--case-seconds", "nan") == 2
    assert "expected processes and seconds above 0" in capsys.readouterr().out


def test_what_cannot_run_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--operation", "gradient", "--impl", "triton"]) == 2
    assert "gradient has no choice of implementations; leave --impl out" in capsys.readouterr().out


def test_an_exception_of_the_fuzzer_itself_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, tmp_path, "raise SystemError('planted') from None")
    (tmp_path / "sitecustomize.py").write_text("import kda.cli.journal as j\nj.Journal.write = 3\n")
    assert fuzz("--seconds", "20") == 1
    text = capsys.readouterr().out
    assert "the process ended with an exception, before the first case of seed 1" in text
    assert "TypeError: 'int' object is not callable" in text


# ---- the replay of a crash

SANITIZER = """#!/bin/sh
here=$(dirname "$0")
for word; do echo "$word" >> "$here/words"; done
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING" > "$here/caching"
seq 200
echo "========= Invalid __global__ read of size 4 bytes"
exit "$(cat "$here/status")"
"""

CASE = "Case(lengths=(3,), K=4)"
ON_GPU = journal.Record(Counts("fwd", "triton", 1, device="NVIDIA H200"), CASE, 1)
MEMCHECK = ["--tool", "memcheck", "--error-exitcode", "99"]


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a compute-sanitizer that runs nothing and notes how it was called; nothing else is on the PATH."""
    folder = tmp_path / "toolkit" / "bin"
    machines.script(folder / "compute-sanitizer", SANITIZER)
    (folder / "status").write_text("0")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(("status", "told"), [(99, "it failed again: compute-sanitizer reports errors"),
                                              (0, "it did not fail again"), (1, "it failed again"),
                                              (2, "it could not be run again")])  # fmt: skip
def test_memcheck_is_asked(sanitizer: Path, console: supervise.Console, status: int, told: str) -> None:
    (sanitizer / "status").write_text(str(status))
    supervise.replay(console, ON_GPU, 1)
    replay = [sys.executable, "-m", "kda", "replay", CASE, "--impl", "triton"]
    assert (sanitizer / "words").read_text().splitlines() == [*MEMCHECK, *replay]
    assert (sanitizer / "caching").read_text() == "1\n"
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[-1] == told
    assert lines[-2] == "========= Invalid __global__ read of size 4 bytes"
    assert "... 151 lines ..." in lines
    assert len(lines) == 2 * supervise.LINES + 3


def test_where_the_sanitizer_is(sanitizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(sanitizer / "compute-sanitizer")
    assert supervise.find_sanitizer() == path
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert supervise.find_sanitizer() is None
    monkeypatch.setenv("CUDA_HOME", str(sanitizer.parent))
    assert supervise.find_sanitizer() == path


@pytest.mark.parametrize("row", [Counts("fwd", "triton", 1, device="cpu"), Counts("convert", "", 1, device="NVIDIA")])
def test_memcheck_is_for_kernels(
    sanitizer: Path, console: supervise.Console, row: Counts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Interpreted ones, and what has none, run again without it."""
    here = machines.script(tmp_path / "python", "#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(sys, "executable", str(here))
    supervise.replay(console, journal.Record(row, CASE, 1), 1)
    assert not (sanitizer / "words").exists()
    assert console.file.getvalue().splitlines()[-1] == "it failed again"  # type: ignore[attr-defined]


def test_a_replay_that_hangs(console: supervise.Console, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys, "executable", str(machines.script(tmp_path / "python", "#!/bin/sh\necho so far\nsleep 1000\n"))
    )
    monkeypatch.setattr(supervise, "REPLAY_SECONDS", 0.2)
    supervise.replay(console, journal.Record(Counts("fwd", "recurrent", 1, device="cpu"), CASE, 1), 0.1)
    assert console.file.getvalue().splitlines()[-2:] == ["so far", "it hangs again"]  # type: ignore[attr-defined]


@pytest.fixture
def console() -> supervise.Console:
    """One that keeps what is printed."""
    return supervise.Console(file=io.StringIO(), width=400)


# ---- the journal


def test_the_journal_keeps_what_was_written_last(tmp_path: Path) -> None:
    assert journal.last(tmp_path / "absent") is None
    book, row = journal.Journal(tmp_path), Counts("fwd", "triton", 3)
    assert journal.last(tmp_path) is None
    book.write(row, "a long text " * 30)
    row.add(1.5, "Case()")
    book.write(row, "short")
    record = journal.last(tmp_path)
    assert record == journal.Record(row, "short", 2)
    assert journal.rows(tmp_path) == [row], "that at work"
    book.keep(row)
    assert journal.rows(tmp_path) == [row]
    assert journal.last(tmp_path) == journal.Record(row, "", 3)
    book.write(Counts("step", "triton", 3), "other", "lost")
    book.keep(Counts("step", "triton", 3, findings=1))
    assert [kept.operation for kept in journal.rows(tmp_path)] == ["fwd", "step"]
    record = journal.last(tmp_path)
    assert record is not None
    assert (record.case, record.error) == ("other", "lost")
    book.close()


def test_options() -> None:
    assert Options(1, None, "all").operations == [*OPERATIONS]
    assert ("convert", "") in Options(1, None, "all").targets()
    assert {operation for operation, _ in Options(1, "recurrent", "all").targets()} == {
        "fwd",
        "step",
        "pool",
        "refusal",
    }
