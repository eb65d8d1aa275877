"""`python -m kda fuzz`, one process: what is drawn, what is found, how it is repeated; the ledger, the counts."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import implementations
from test_cli import PERFECT, SMALL, crash, plant, reproducer, scaled

import kda
from kda import dispatch
from kda.cli import counts, journal, main
from kda.problem import Output, Problem
from kda.testing import judge, ledger, operations, strategies
from kda.testing.cases import Case, StepCase
from kda.testing.ledger import LEDGER, Entry
from kda.testing.strategies import cases

Fuzz = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> object:
    """Nothing is remembered about planted implementations."""
    monkeypatch.setenv("COLUMNS", "400")
    dispatch.forget()
    yield
    dispatch.forget()


def worker(folder: Path, *argv: str) -> tuple[int, str]:
    """The process that fuzzes, in this one, with its journal in `folder`: its exit status and all it printed."""
    with redirect_stdout(io.StringIO()) as out:
        status = main(["fuzz", "--worker", str(folder), *argv])
    return status, out.getvalue()


@pytest.fixture
def fuzz(tmp_path: Path) -> Fuzz:
    return partial(worker, tmp_path / "worker")


def replay(*argv: str) -> int:
    with redirect_stdout(io.StringIO()):
        return main(["replay", *argv])


def set_ledger(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(ledger, "LEDGER", entries)


# ---- campaigns


def test_without_a_finding(fuzz: Fuzz, tmp_path: Path) -> None:
    status, text = fuzz("--seconds", "1", "--impl", "recurrent", "--seed", "5")
    assert status == 0
    assert "seed 5" in text
    (line,) = [line for line in text.splitlines() if line.startswith("fwd recurrent: ") and "no finding" in line]
    (worst,) = [line for line in text.splitlines() if line.startswith("worst ")]
    assert repr(Case.parse(worst.split(": ", 1)[1])) in worst
    (row,) = journal.rows(tmp_path / "worker")
    assert (row.operation, row.impl, row.seed, row.findings) == ("fwd", "recurrent", 5, 0)
    assert row.cases == int(line.split()[2]) > 0
    assert 0.9 < row.seconds < 20
    assert row.worst_case in worst


@pytest.mark.parametrize("operation", operations.OPERATIONS)
def test_every_operation(fuzz: Fuzz, tmp_path: Path, operation: str) -> None:
    choice = ["--impl", "recurrent"] if operations.OPERATIONS[operation].implementations else []
    status, text = fuzz("--operation", operation, "--seconds", "0.4", "--no-ledger", *choice)
    assert status == 0, text
    (row,) = journal.rows(tmp_path / "worker")
    assert (row.operation, row.impl) == (operation, "recurrent" if choice else "")
    assert row.cases > 0
    assert replay(row.worst_case, *choice) == 0


def test_all_operations_share_the_seconds(fuzz: Fuzz, tmp_path: Path) -> None:
    status, text = fuzz("--operation", "all", "--impl", "recurrent", "--seconds", "0.4", "--no-ledger")
    assert status == 0, text
    assert [row.operation for row in journal.rows(tmp_path / "worker")] == ["fwd", "step", "pool", "refusal"]


@pytest.mark.parametrize("fault", [scaled, crash])
def test_a_planted_fault_is_found(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    plant(monkeypatch, fault)
    status, text = fuzz("--seconds", "20", "--impl", "recurrent", "--seed", "0", "--no-ledger")
    assert status == 1
    command, *options, text_of_case = reproducer(text)
    assert (command, options) == ("replay", ["--impl", "recurrent"])
    case = Case.parse(text_of_case)
    assert sum(case.lengths) <= 2, "shrunk"
    assert case.K == case.V == 1
    if fault is scaled:
        assert "standard deviations" in text
        assert replay(*options, text_of_case) == 1
        monkeypatch.undo()
        assert replay(*options, text_of_case) == 0
    else:
        assert "recurrent raised RuntimeError: planted [/red]" in text


def test_two_faults(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash and a wrong number in one run: still one finding with its reproducer."""

    def fault(result: Output, problem: Problem) -> Output:
        return crash(result, problem) if problem.facts.varlen else scaled(result, problem)

    plant(monkeypatch, fault)
    status, text = fuzz("--seconds", "20", "--impl", "recurrent", "--seed", "0", "--no-ledger")
    assert status == 1
    assert Case.parse(reproducer(text)[-1])


def test_a_fault_that_comes_and_goes(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a race looks like: the same case passes when it is repeated. It is a finding all the same."""
    calls: list[int] = []

    def fault(result: Output, problem: Problem) -> Output:
        calls.append(result.o.numel())
        return Output(result.o * (2 if len(calls) == 3 else 1), result.final_state)

    monkeypatch.setattr(strategies, "_sequences", lambda impl, device: cases(("float32",), max_tokens=4))
    plant(monkeypatch, lambda result, problem: fault(result, problem) if result.o.numel() else result)
    status, text = fuzz("--seconds", "20", "--impl", "recurrent", "--seed", "0", "--no-ledger")
    assert status == 1
    assert "fails now and then" in text
    assert sum(Case.parse(reproducer(text)[-1]).lengths) > 0


def test_a_lost_device_ends_the_run_unshrunk(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its journal keeps the case and the error, by which the process that watches knows what to run again."""
    ran: list[object] = []

    def lose(result: Output, problem: Problem) -> Output:
        ran.append(problem)
        raise torch.AcceleratorError("CUDA error: planted")

    plant(monkeypatch, lose)
    status, text = fuzz("--seconds", "20", "--impl", "recurrent", "--no-ledger")
    assert (status, len(ran)) == (1, 1)
    record = journal.last(tmp_path / "worker")
    assert record is not None
    assert record.error == "recurrent failed on the device: CUDA error: planted"
    assert record.case == reproducer(text)[-1]
    assert record.counts.findings == 0 == record.counts.cases
    assert [row.findings for row in journal.rows(tmp_path / "worker")] == [1]


def test_what_cannot_run_here(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda.cuda, "IMPL", replace(kda.cuda.IMPL, unavailable=lambda: "no compiler here."))
    status, text = fuzz("--impl", "cuda", "--seconds", "1")
    assert status == 2
    assert "cuda" in text
    assert "no compiler here." in text
    status, text = fuzz("--operation", "convert", "--impl", "triton")
    assert status == 2
    assert "convert has no choice of implementations; leave --impl out" in text


def drawn(seed: int | None, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Case]:
    """The cases that a run draws from a seed, without running them."""
    judged: list[Case] = []
    monkeypatch.setattr(judge, "check", lambda case, impl: judged.append(case) or PERFECT)
    argv = ["fuzz", "--worker", str(folder), "--no-ledger", "--seconds", "0.5", "--impl", "recurrent"]
    with redirect_stdout(io.StringIO()):
        assert main(argv if seed is None else [*argv, "--seed", str(seed)]) == 0
    return judged


def test_a_seed_is_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, again, other, free = (drawn(seed, monkeypatch, tmp_path) for seed in (3, 3, 4, None))
    n = min(map(len, (first, again, other, free)))
    assert n >= 20
    assert first[:n] == again[:n]
    assert len({tuple(map(repr, x[:n])) for x in (first, other, free)}) == 3
    assert len(set(first)) > n / 4


# ---- ledger


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("entry", [e for e in LEDGER if "" not in e.implementations], ids=lambda e: repr(e.case))
def test_entries_stand(impl: str, entry: Entry) -> None:
    if impl not in entry.implementations:
        pytest.skip("not of this implementation")
    if why := ledger.why_not(entry, impl):
        pytest.skip(why)
    assert ledger.stands(entry, impl) == ""


@pytest.mark.parametrize("entry", [e for e in LEDGER if "" in e.implementations], ids=lambda e: repr(e.case))
def test_entries_without_a_choice_stand(entry: Entry) -> None:
    assert ledger.stands(entry, "") == ""


def test_entries_are_well_formed() -> None:
    for entry in LEDGER:
        assert operations.parse(repr(entry.case)) == entry.case
        assert entry.reason
        assert entry.since
        assert {*entry.implementations} <= {*dispatch.TABLE, ""}
    with pytest.raises(ValueError, match="status: expected 'open' or 'fixed'"):
        Entry(SMALL, "", "", status="closed")


OPEN = Entry(SMALL, "planted", "today", ("recurrent",), "open", lambda case: isinstance(case, Case))


def test_an_open_entry_is_tolerated_and_its_cases_are_known(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_ledger(monkeypatch, OPEN)
    plant(monkeypatch, scaled)
    status, text = fuzz("--seconds", "0.5", "--impl", "recurrent")
    assert status == 0
    (row,) = journal.rows(tmp_path / "worker")
    assert row.known > 0 == row.findings
    assert f"no finding, {row.known} known failures" in text
    assert "ledger: 1 replayed" in text


def test_an_open_entry_of_one_case_covers_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ledger(monkeypatch, replace(OPEN, matches=None))
    assert ledger.known(SMALL, "recurrent") is not None
    assert ledger.known(SMALL, "chunked") is None
    assert ledger.known(replace(SMALL, seed=1), "recurrent") is None
    set_ledger(monkeypatch, replace(OPEN, status="fixed"))
    assert ledger.known(SMALL, "recurrent") is None


def test_an_open_entry_that_passes_is_a_finding(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_ledger(monkeypatch, OPEN)
    status, text = fuzz("--seconds", "0.5", "--impl", "recurrent")
    assert status == 1
    assert "open since today, but passes on recurrent: move it to fixed in kda/testing/ledger.py" in text
    assert [row.findings for row in journal.rows(tmp_path / "worker")] == [1]


@pytest.mark.parametrize("fault", [scaled, crash])
def test_a_fixed_entry_that_fails_is_a_finding(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    set_ledger(monkeypatch, replace(OPEN, status="fixed", since="0123abc"))
    plant(monkeypatch, fault)
    status, text = fuzz("--seconds", "0.5", "--impl", "recurrent")
    assert status == 1
    assert "fixed by 0123abc, fails again (planted)" in text
    assert reproducer(text) == ["replay", "--impl", "recurrent", repr(SMALL)]


def test_entries_that_cannot_run_are_counted(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda.cuda, "IMPL", replace(kda.cuda.IMPL, unavailable=lambda: "no compiler here."))
    monkeypatch.setattr(operations, "targets", lambda impl, operation: ["recurrent"])
    of_both = replace(OPEN, status="fixed", implementations=("cuda", "recurrent"))
    set_ledger(
        monkeypatch, of_both, of_both, replace(of_both, case=StepCase(replace(SMALL, lengths=(1,), packed=False), 1))
    )
    status, text = fuzz("--seconds", "0.1")
    assert status == 0
    assert "ledger: 2 replayed" in text
    (line,) = [line for line in text.splitlines() if line.startswith("ledger: 2 skipped on cuda: ")]
    assert "no compiler here." in line


# ---- counts


def test_the_summary_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = counts.Counts("fwd", "triton", 1, seconds=90, cases=1200, worst=1.5, worst_case="Case(K=1)")
    counts.append(tmp_path / "a", [row, replace(row, operation="convert", impl="", worst=0.0, worst_case="")])
    counts.append(tmp_path / "b", [replace(row, seed=2, seconds=60, worst=2.5, worst_case="Case(K=2)", known=3)])
    assert counts.read(tmp_path / "a")[0] == row
    assert main(["fuzz", "--summary", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if re.match(r" +(fwd|convert) ", line)]
    assert rows == [
        ["fwd", "triton", "2", "2.5", "2,400", "2.50", "3", "0"],
        ["convert", "-", "1", "1.5", "1,200", "0.00", "0", "0"],
    ]
    assert "worst of fwd on triton, 2.50 sigma: Case(K=2)" in text
    counts.append(tmp_path / "b", [replace(row, findings=1)])
    assert main(["fuzz", "--summary", str(tmp_path / "b")]) == 1


@pytest.mark.parametrize("line", ["", "nope", "3", "{}", '{"operation": "fwd", "impl": "", "seed": 1, "extra": 2}',
                                  '{"operation": "fwd", "impl": "", "seed": 1, "cases": "many"}'])  # fmt: skip
def test_no_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    (tmp_path / "bad").write_text(line + "\n")
    assert main(["fuzz", "--summary", str(tmp_path / "bad")]) == 2
    assert "bad, line 1: expected the counts of a campaign" in capsys.readouterr().out
    assert main(["fuzz", "--summary", str(tmp_path / "absent")]) == 2
