"""`python -m kda bench`: what it compares, times and writes, at sizes that a CPU does in seconds."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from targets import GPU

import kda
import kda.ref.recurrent
from kda import dispatch
from kda.bench import SUITES, accuracy, decode, forward, measure, peers, report, segments, serving
from kda.bench.session import Session
from kda.cli import bench, main
from kda.problem import Output
from kda.testing.cases import Case, arguments

ROOT = Path(__file__).parents[1]
SMALL = Case(lengths=(65, 3), H=1, K=16, V=16, dtype="float32")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, one small shape and family, a wide terminal."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(forward, "ON_A_CPU", [SMALL])
    monkeypatch.setattr(decode, "SHAPES", {"cpu": [(2, 1)]})
    families = {"usual": replace(SMALL, lengths=(70,)), "ragged": SMALL}
    monkeypatch.setattr(accuracy, "FAMILIES", families)
    monkeypatch.setenv("COLUMNS", "250")
    dispatch.forget()


def session(peer: str = "") -> Session:
    return Session(Console(), "cpu", ["chunked", "recurrent"], [peer] if peer else [])


def test_everything_is_measured_written_and_shown_again(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes' results from one file: the same tables, and figures of what there is."""
    pytest.importorskip("matplotlib")
    saved, first, again = tmp_path / "x.json", tmp_path / "first.md", tmp_path / "again.md"
    assert main(["bench", "--json", str(saved), "--markdown", str(first), "--note", "A note."]) == 0
    printed = capsys.readouterr().out
    assert "No GPU here" in printed
    results = json.loads(saved.read_text())
    assert [*results] == ["accuracy", "worst", "rms by position", "sigma by position", "headline", "decode", "serving"]
    assert {row["implementation"] for row in results["headline"]["rows"]} == {"chunked", "recurrent"}
    assert len(results["serving"]["rows"]) == 6
    for table in results.values():
        assert table["rows"]
        assert table["run"]["note"] == "A note."
        for row in table["rows"]:
            low, median, high = row.get("ms", (1, 1, 1))
            assert 0 < low <= median <= high
    assert all(0 < row["error"] < 1e-6 for row in results["headline"]["rows"])
    assert main(["bench", "--from", str(saved), "--markdown", str(again), "--plot", str(tmp_path / "plots")]) == 0
    assert again.read_text() == first.read_text()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"ratio.png", "error-position.png"}
    for row in results["worst"]["rows"]:
        assert main(["replay", *shlex.split(row["command"])[4:]]) == 0


def test_the_suites_that_are_named_are_those_that_there_are() -> None:
    assert tuple(bench.MEASURE) == SUITES
    assert set(forward.SUITES) == set(forward.TITLES)
    assert set(bench.ON_A_CPU) < set(SUITES)


@pytest.mark.parametrize("suite", ["host", "length"])
def test_what_needs_a_gpu_says_so(small: None, suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", suite]) == 2
    assert f"without a GPU, got {suite}" in " ".join(capsys.readouterr().out.split())


WRONG = [
    (("--heads", "999"), "--heads: expected some of 1, got 999"),
    (("--impl", "cuda"), "--impl: expected one that runs here, got cuda: "),
    (("--json", "/nowhere/x.json"), "--json: expected a file in a directory that exists, got /nowhere/x.json"),
    (("--markdown", "{full}"), "--markdown: expected a new file, or one with the lines"),
    (("--plot", "{full}"), "--plot: expected a directory, got the file"),
    (("--from", "{saved}", "--suite", "decode"), "--from: expected no other choice beside it"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_what_cannot_be_is_said_before_anything_is_measured(
    small: None,
    argv: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "MEASURE", {})
    full = tmp_path / "notes.md"
    full.write_text("my notes")
    paths = {"full": str(full), "saved": str(ROOT / "BENCHMARKS.json")}
    assert main(["bench", *(word.format(**paths) for word in argv)]) == 2
    assert message in " ".join(capsys.readouterr().out.split())
    assert full.read_text() == "my notes"


def test_nothing_to_measure_is_no_success(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "decode", "--impl", "chunked"]) == 2
    assert "decode: nothing that chunked can run here" in capsys.readouterr().out


def test_numbers_are_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "--from", str(ROOT / "BENCHMARKS.json")]) == 0
    printed = capsys.readouterr().out
    for row in report.load([str(ROOT / "BENCHMARKS.json")])["headline"]["rows"]:
        assert f" {row['ms'][1]:.3f} " in printed
        assert f" {row['error']:.1e} " in printed


def test_what_is_measured_is_kept_whatever_comes(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(session: Session) -> None:
        session.wrong.append("a sentence")
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.MEASURE, "decode", interrupted)
    saved = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        main(["bench", "--suite", "headline", "decode", "--json", str(saved)])
    assert [*json.loads(saved.read_text())] == ["headline"]
    printed = capsys.readouterr().out
    assert "Forward: the shapes that are quoted" in printed
    assert "a sentence" in printed


@pytest.mark.parametrize("order", [("chunked", "recurrent"), ("recurrent", "chunked")])
def test_what_is_wrong_is_not_timed(
    small: None,
    order: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Five percent off: reported, left out, and the status says so; the right one is timed, whichever is first."""
    good = kda.ref.recurrent.IMPL
    wrong = lambda problem: Output(good.fwd(problem).o * 1.05, good.fwd(problem).final_state)  # noqa: E731
    monkeypatch.setattr(kda.ref.recurrent, "IMPL", replace(good, fwd=wrong))
    saved = tmp_path / "x.json"
    names = [word for name in order for word in ("--impl", name)]
    assert main(["bench", "--suite", "headline", *names, "--json", str(saved)]) == 1
    assert [row["implementation"] for row in json.loads(saved.read_text())["headline"]["rows"]] == ["chunked"]
    assert "recurrent at 65, 3, H = 1: error 5.0e-02" in capsys.readouterr().out
    assert main(["bench", "--suite", "accuracy", "decode", "headline", *names, "--json", str(saved)]) == 1
    results = json.loads(saved.read_text())
    assert [row["implementation"] for row in results["headline"]["rows"]] == ["chunked"]
    assert "decode" not in results, "nor elsewhere"
    assert "recurrent on usual:" in capsys.readouterr().out


def test_a_wrong_state_is_not_timed(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = kda.ref.recurrent.IMPL
    wrong = lambda problem: Output(good.fwd(problem).o, good.fwd(problem).final_state * 2)  # noqa: E731
    monkeypatch.setattr(kda.ref.recurrent, "IMPL", replace(good, fwd=wrong))
    saved = tmp_path / "x.json"
    assert main(["bench", "--suite", "headline", "--json", str(saved)]) == 1
    assert [row["implementation"] for row in json.loads(saved.read_text())["headline"]["rows"]] == ["chunked"]


def test_calls_are_timed_in_turn_and_a_ratio_survives_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock slows down by a tenth per call; b takes twice as long as a."""
    order: list[str] = []
    now = [0.0]

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            now[0] += seconds * 1.1 ** len(order)

        return run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    found = measure.on_cpu({"a": call("a", 0.001), "b": call("b", 0.002)}, 6)
    assert "".join(order) == "ab" + "baab" * 3
    assert found["a"].ratio == (1, 1, 1)
    assert found["b"].ratio[1] == pytest.approx(2, rel=0.05)
    assert found["b"].ms[2] / found["b"].ms[0] > 1.5, "the drift is there"


def test_a_call_that_takes_seconds_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def slow() -> None:
        ran.append(1)
        now[0] += 3.0

    assert measure.on_cpu({"slow": slow}, 5)["slow"].ms == (3e3, 3e3, 3e3)
    assert len(ran) == 1


def test_floors() -> None:
    """Those of one sequence of 8192 tokens with 96 heads, by hand: 1282 bytes a token and head, two states of 64 KB."""
    case = forward.SUITES["headline"][0]
    assert (case.lengths, case.H) == ((8192,), 96)
    assert measure.bytes_of(case) == 8192 * 96 * 1282 + 96 * 2 * 65536
    assert measure.bytes_of(case) / 4.24e12 == pytest.approx(0.241e-3, rel=0.01)
    assert measure.operations_of(case) == 8192 * 96 * (98304 + 1024 * 32 + 6 * 32**2)
    row = {"byte_floor_ms": 1.0, "product_floor_ms": 2.0}
    assert forward.floor_ms(row) == 2.0


def test_an_error_is_that_of_the_heads_and_tokens_that_are_compared() -> None:
    """A fault in the first tokens of the last head counts; the whole is compared between implementations."""
    case = Case(lengths=(40, 30), H=3, K=8, V=8, dtype="float32")
    call = arguments(case)
    o = kda.fwd(**call, impl="chunked").o
    states = kda.fwd(**call, impl="chunked").final_state
    errors_of = forward.exact_part(case, call, "cpu")
    assert max(errors_of(Output(o, states))) < 1e-6
    faulty = o.clone()
    faulty[0, 3, 2] *= 2
    assert errors_of(Output(faulty, states))[0] > 1e-2
    assert errors_of(Output(o, states * 1.1))[1] > 5e-2


def strict(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
    """FlashKDA's `fwd` in what it demands: every parameter, 64-bit offsets."""
    assert A_log.dtype == dt_bias.dtype == torch.float32
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    assert isinstance(scale, float)
    kda.fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens)


@pytest.mark.parametrize("parameters", [True, False])
def test_flash_kda_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch, parameters: bool) -> None:
    """By a stand-in that demands what FlashKDA does, and computes what this library does."""
    monkeypatch.setitem(sys.modules, "flash_kda", SimpleNamespace(fwd=strict))
    case = Case(lengths=(40, 0, 5), H=2, K=8, V=8, dtype="float32", A_log=parameters, dt_bias=parameters)
    calls = forward.callables(session("flash_kda"), case, arguments(case))
    assert [*calls] == ["chunked", "recurrent", "flash_kda"]
    torch.testing.assert_close(calls["flash_kda"]().o, calls["recurrent"]().o)
    torch.testing.assert_close(calls["flash_kda"]().final_state, calls["recurrent"]().final_state)


def test_fla_is_timed_by_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dispatcher hands such calls to FlashKDA where that is installed, and to us where we are registered."""
    kernels = pytest.importorskip("fla.ops.kda")
    for name in ("FLA_FLASH_KDA", "FLA_KDA_KERNELS"):
        monkeypatch.setenv(name, "1")
    seen: dict[str, str] = {}
    monkeypatch.setattr(kernels, "chunk_kda", lambda **call: seen.update(os.environ) or (call["v"], None))
    peers.PEERS["fla"][2](arguments(SMALL))()
    assert (seen["FLA_FLASH_KDA"], seen["FLA_KDA_KERNELS"]) == ("0", "0")


@pytest.mark.parametrize("when", ["made", "run"])
def test_a_peer_that_fails_is_left_out_with_its_reason(
    small: None, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every suite, and whether it fails when it is imported or when it runs."""

    def broken(*call: Any) -> Callable[[], Output]:
        def run() -> Output:
            raise RuntimeError("no kernel image [/red]")

        return run() if when == "made" else run

    monkeypatch.setitem(peers.PEERS, "broken", ("torch", "torch", broken))
    monkeypatch.setitem(decode.STEPS, "broken", broken)
    monkeypatch.setattr(measure, "captured", lambda call: call)
    for rows in (forward.rows(session("broken"), "headline"), accuracy.rows(session("broken"))):
        assert {row["implementation"] for row in rows.popitem()[1]} == {"chunked", "recurrent"}
    assert {row["implementation"] for row in decode.rows(session("broken"))["decode"]} == {"recurrent"}
    assert capsys.readouterr().out.count("broken raised RuntimeError at ") == 4


def test_a_captured_call_keeps_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has addresses alone: when nobody held the tensors, replays wrote into memory that was given back."""
    replayed: list[int] = []
    graph = type("Graph", (), {"replay": lambda self: replayed.append(1)})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.zeros(3)
    alive = weakref.ref(x)
    captured = measure.captured(partial(x.add_, 1))
    del x
    gc.collect()
    assert alive() is not None
    assert alive().tolist() == [2.0] * 3, "once before the capture, once in it"
    captured()
    assert replayed == [1]


def test_the_readme_says_what_was_measured() -> None:
    """Its two tables, against the results in the repository."""
    results = report.load([str(ROOT / "BENCHMARKS.json")])
    text = (ROOT / "README.md").read_text()
    headline = {(row["shape"], row["H"], row["implementation"]): row for row in results["headline"]["rows"]}
    steps = {
        (f"decode, {row['N']} sequences", row["H"], row["implementation"]): row for row in results["decode"]["rows"]
    }
    table = text.split("## How fast")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        2:
    ]
    assert len(rows) >= 5
    for shape, heads, *times, floor in rows:
        for name, told in zip(("cuda", "triton", "fla"), times, strict=True):
            row = (headline | steps)[shape, int(heads), name]
            assert told == f"{row['ms'][1]:.2f}", (shape, name)
        assert floor == f"{row['byte_floor_ms']:.2f}", shape
    known = {(row["family"], row["implementation"]): row for row in results["accuracy"]["rows"]}
    names = {"strongly correlated keys": "strong correlation"}
    table = text.split("## How accurate")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        2:
    ]
    assert len(rows) >= 4
    for family, *errors in rows:
        for name, told in zip(("cuda", "triton", "fla"), errors, strict=True):
            row = known[names.get(family, family), name]
            assert told == f"{100 * row['rms_o']:.2f} / {100 * row['rms_state']:.2f}", (family, name)


def test_the_place_for_the_tables_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "B.md"
    target.write_text(f"before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nafter\n")
    results = report.load([str(ROOT / "BENCHMARKS.json")])
    report.write(results, str(target))
    text = target.read_text()
    assert text.startswith(f"before\n\n{report.BEGIN}\n\n### ")
    assert text.endswith(f"{report.END}\n\nafter\n")
    assert "\nold\n" not in text
    report.write(results, str(target))
    assert target.read_text() == text


def test_the_tables_in_the_repository_are_those_of_its_results(tmp_path: Path) -> None:
    """BENCHMARKS.md says what BENCHMARKS.json holds, which is what was measured."""
    written = tmp_path / "BENCHMARKS.md"
    written.write_text((ROOT / "BENCHMARKS.md").read_text())
    report.write(report.load([str(ROOT / "BENCHMARKS.json")]), str(written))
    assert written.read_text() == (ROOT / "BENCHMARKS.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}x",
        '{"host": {"run": {}, "rows": []}}',
        '{"unknown": {"run": {}, "rows": []}}',
        '{"host": {"rows": [{}]}}',
    ],
)
def test_files_that_hold_no_results(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["bench", "--from", str(path)]) == 2
    assert "expected results of" in " ".join(capsys.readouterr().out.split())


def test_a_later_file_counts(tmp_path: Path) -> None:
    results = report.load([str(ROOT / "BENCHMARKS.json")])
    changed = {"host": {**results["host"], "rows": []}}
    report.save(changed, str(tmp_path / "x.json"))
    merged = report.load([str(ROOT / "BENCHMARKS.json"), str(tmp_path / "x.json")])
    assert merged["host"]["rows"] == []
    assert merged.keys() == results.keys()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="times on a GPU are by events and graphs")
def test_the_suites_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small: every kind of suite, floors and memory included. The second shape's captures drop what nobody holds."""
    shapes = [Case(lengths=(300,), H=2, K=128, V=128), Case(lengths=(65, 0, 30), H=2, K=128, V=128)]
    monkeypatch.setattr(forward, "SUITES", {"headline": shapes})
    monkeypatch.setattr(segments, "HEADS", (2,))
    monkeypatch.setattr(segments, "_shapes", lambda: [(4096,), (300, 0, 20)])
    monkeypatch.setattr(serving, "SHORT", shapes[1])
    monkeypatch.setattr(decode, "SHAPES", {"cuda": [(1, 2), (64, 32), (128, 32)]})
    saved = tmp_path / "x.json"
    suites = ["headline", "segments", "decode", "serving", "host"]
    assert main(["bench", "--suite", *suites, "--no-peers", "--json", str(saved)]) == 0
    results = json.loads(saved.read_text())
    assert [*results] == suites
    for row in results["segments"]["rows"]:
        assert row["of"]["2"]["ms"] > 0
        assert 0 < row["of"]["2"]["ratio"] < 2
    for row in results["headline"]["rows"]:
        assert row["peak_bytes"] > 0
        assert 0 < forward.floor_ms(row) < row["ms"][1]
