"""`python -m kda`: exit statuses, what is printed, and that a planted fault is found and can be repeated."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

import kda
import kda.cli.replay
import kda.ref.recurrent
from kda import dispatch
from kda.cli import main
from kda.problem import Output, Problem
from kda.testing.cases import FAMILIES, NAMED, Case
from kda.testing.strategies import cases

SMALL = Case(lengths=(3, 0, 2), K=4, V=2)
PERFECT = SimpleNamespace(
    accepted=True, sigma=0.0, sigma_o=0.0, sigma_state=0.0, rms_o=0.0, rms_state=0.0, where_o=(), where_state=()
)


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """A terminal so wide that no table wraps; nothing remembered about planted implementations."""
    monkeypatch.setenv("COLUMNS", "400")
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def kda_cli(capsys) -> Callable[..., tuple[int, str]]:
    """Run a command in this process; its exit status and all it printed."""

    def run(*argv: str) -> tuple[int, str]:
        try:
            status = main(argv)
        except SystemExit as stop:  # argparse
            status = stop.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def plant(monkeypatch, fault: Callable[[Output, Problem], Output]) -> None:
    """Let `recurrent` return what `fault` makes of its result. The oracle does not go through IMPL."""
    good = kda.ref.recurrent.IMPL
    monkeypatch.setattr(kda.ref.recurrent, "IMPL", replace(good, fwd=lambda problem: fault(good.fwd(problem), problem)))


def scaled(result: Output, problem: Problem) -> Output:
    """One percent off."""
    return Output(result.o * 1.01, result.final_state)


def crash(result: Output, problem: Problem) -> Output:
    """No result at all; the text would be markup for rich."""
    raise RuntimeError("planted [/red]")


def reproducer(text: str) -> list[str]:
    """Arguments of `python -m kda` in the command that a finding prints."""
    (line,) = [line for line in text.splitlines() if line.startswith("repeat with: ")]
    words = shlex.split(line.removeprefix("repeat with: "))
    assert words[:3] == ["python", "-m", "kda"]
    return words[3:]


def table(text: str) -> list[list[str]]:
    """Cells of the rows of the table that was printed."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


@pytest.mark.parametrize("argv", [("info",), ()], ids=["info", "no command"])
def test_info(kda_cli, argv):
    status, text = kda_cli(*argv)
    assert status == 0
    assert kda.__version__ in text
    rows = table(text)
    assert [row[0] for row in rows] == list(dispatch.TABLE)
    for row, (_, here, summary) in zip(kda.implementations(), rows, strict=True):
        assert row.summary == summary
        assert row.reason is None or row.reason in here


def test_info_names_the_chosen_one_and_the_reasons(kda_cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kda.cuda, "IMPL", replace(kda.cuda.IMPL, unavailable=lambda: "no compiler here."))
    here = {name: status for name, status, _ in table(kda_cli("info")[1])}
    assert [name for name, status in here.items() if status == "chosen by auto"] == ["chunked"]
    assert [name for name, status in here.items() if "no compiler here." in status] == ["cuda"]
    assert "NVIDIA Hopper" in here["cuda"]


WRONG = [
    (("nope",), "invalid choice: 'nope'"),
    (("fuzz", "--impl", "nope"), "invalid choice: 'nope'"),
    (("replay", "--impl", "nope", "Case()"), "invalid choice: 'nope'"),
    (("replay",), "required: case"),
    (("fuzz", "--seconds", "soon"), "invalid float value: 'soon'"),
    (("fuzz", "--seed", "x"), "invalid int value: 'x'"),
    (("info", "--nope"), "unrecognized arguments: --nope"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_a_wrong_call_exits_with_2(kda_cli, argv, message):
    status, text = kda_cli(*argv)
    assert status == 2
    assert message in text


def test_version(kda_cli):
    assert kda_cli("--version") == (0, f"kda {kda.__version__}\n")


def test_without_rich(kda_cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    status, text = kda_cli("info")
    assert status == 2
    assert "pip install rich" in text


def test_in_a_process_of_its_own():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(kda.__file__).parents[1])}
    command = [sys.executable, "-m", "kda", "replay", repr(SMALL), "--impl", "recurrent"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert repr(SMALL) in done.stdout
    assert done.stderr == ""


# replay


def test_replay_of_a_good_case(kda_cli):
    status, text = kda_cli("replay", repr(SMALL))
    assert status == 0
    assert repr(SMALL) in text
    judged = {row[0] for row in table(text)}
    assert {"chunked", "recurrent"} <= judged
    for name in set(dispatch.TABLE) - judged:
        assert f"{name} cannot run it: " in text


def test_replay_on_one_implementation(kda_cli):
    assert [row[0] for row in table(kda_cli("replay", "--impl", "chunked", repr(SMALL))[1])] == ["chunked"]


def test_replay_on_an_implementation_that_cannot(kda_cli, monkeypatch):
    monkeypatch.setattr(kda.cuda, "IMPL", replace(kda.cuda.IMPL, unavailable=lambda: "no compiler here."))
    status, text = kda_cli("replay", "--impl", "cuda", repr(SMALL))
    assert status == 2
    assert "no compiler here." in text
    assert "K is 4" in text


GARBAGE = [
    "",
    "Case",
    "Case(",
    "case()",
    "kda.Case()",
    "Case()()",
    "Case(3)",
    "Case(**{'K': 1})",
    "Case(unknown=1)",
    "Case(K=1 + 1)",
    "Case(lengths=range(3))",
    "Case(lengths={[]: 1})",
    "[/red]",
    "[red]Case()",
    "(" * 300,
    # The grammar of a case, but no case: wrong types, unknown names, sizes that no call has.
    "Case(lengths=3)",
    "Case(lengths=[3])",
    "Case(lengths='abc')",
    "Case(lengths=(-3,))",
    "Case(lengths=(3, 4), packed=False)",
    "Case(K='x')",
    "Case(K=0)",
    "Case(K=-1)",
    "Case(H=2.0)",
    "Case(dtype='foo')",
    "Case(dtype='int8')",
    "Case(index_dtype='foo')",
    "Case(gate='foo')",
    "Case(decay='foo')",
    "Case(keys='foo')",
    "Case(beta='foo')",
    "Case(strides='foo')",
    "Case(lower_bound=1.0)",
]


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: text[:40] or "nothing")
def test_replay_of_garbage(kda_cli, text):
    status, printed = kda_cli("replay", "--impl", "recurrent", text)
    assert status == 2
    assert re.search(r"\w+: \w+", printed)


@pytest.mark.parametrize("text", ["[/red]", "[red]Case()", "Case(lengths=[bold])"])
def test_garbage_is_shown_as_it_came(kda_cli, text):
    assert repr(text) in kda_cli("replay", text)[1]


CODE = [
    "__import__('os').system('{}')",
    "Case(lengths=__import__('os').system('{}'))",
    "Case(lengths=(__import__('os').system('{}'),))",
    "Case(lengths=__import__('os'))",
    "Case(dtype=open('{}', 'w'))",
    "Case(K=(lambda: 1)())",
    "Case(K=[x for x in (1,)][0])",
    "__import__('os').system('{}') or Case()",
    "(Case := print)('{}')",
]


@pytest.mark.parametrize("text", CODE)
def test_replay_executes_nothing(kda_cli, monkeypatch, text):
    ran: list[object] = []
    monkeypatch.setattr(os, "system", ran.append)
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: ran.append(args))
    status, printed = kda_cli("replay", text.format("planted"))
    monkeypatch.undo()
    assert ran == []
    assert status == 2
    assert "expected the text of a Case(...)" in printed


@given(cases())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_replay_judges_the_case_that_was_printed(case):
    assert Case.parse(repr(case)) == case
    judged: list[Case] = []
    with (
        redirect_stdout(io.StringIO()) as out,
        patch.object(kda.cli.replay, "judge", lambda case, name: judged.append(case) or PERFECT),
        patch.object(kda.cli.replay, "reasons", lambda case, name: ()),
    ):
        assert main(["replay", "--impl", "recurrent", repr(case)]) == 0
    assert judged == [case]
    assert repr(case) in out.getvalue().splitlines()


@pytest.mark.parametrize("case", [*NAMED.values(), *FAMILIES.values()], ids=[*NAMED, *FAMILIES])
def test_named_cases_round_trip(case):
    assert Case.parse(f"  {case!r}\n") == case


def test_replay_of_a_fault(kda_cli, monkeypatch):
    plant(monkeypatch, scaled)
    assert kda_cli("replay", "--impl", "recurrent", repr(SMALL))[0] == 1
    assert kda_cli("replay", repr(SMALL))[0] == 1  # though others are right
    assert kda_cli("replay", "--impl", "chunked", repr(SMALL))[0] == 0


def test_replay_of_a_crash(kda_cli, monkeypatch):
    """fuzz reports an exception as a finding, with a replay command: that command reports it too."""
    plant(monkeypatch, crash)
    status, text = kda_cli("replay", "--impl", "recurrent", repr(SMALL))
    assert status == 1
    assert "RuntimeError: planted [/red]" in text
