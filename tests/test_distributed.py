"""`kda.distributed`: which rank holds what, the result against the specification of the whole batch, refusals.

Ranks are threads here, with nothing but the exchange between them, and in the last test processes over Gloo.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import CASES, Call, call_of, cases_of, own_call, parallel, pieces_of, whole
from targets import PYTORCH
from torch import Tensor

import kda
import kda.distributed
from kda import Output, transitions
from kda.distributed import Piece, Slices
from kda.ref.error import Deviation, deviation
from kda.testing.cases import TOKENS, Case
from kda.testing.judge import expected, rounding_of

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_CHECK", raising=False)


def judged(case: Case, result: Output, impl: str) -> Deviation:
    return deviation(result, expected(case, rounding_of(call_of(case), impl)))


# ---- which rank holds what


def offsets(lengths: list[int] | tuple[int, ...]) -> list[int]:
    return [0, *accumulate(lengths)]


#: Lengths of sequences, and tokens of ranks: as many or more.
LAYOUTS = st.tuples(
    st.lists(st.integers(0, 6), max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 5)
).map(lambda x: (x[0], [*x[1], max(0, sum(x[0]) - sum(x[1])) + x[2] * (x[2] > 3)]))


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(LAYOUTS)
@example(([], [0]))
@example(([0, 0], [0, 0]))
@example(([0, 3, 0, 0, 3, 0], [3, 0, 0, 3]))
@example(([9], [3, 0, 3, 3]))
def test_pieces_by_counting(layout: tuple[list[int], list[int]]) -> None:
    """Against the owners of single tokens."""
    lengths, sizes = layout
    slices = Slices(offsets(lengths), offsets(sizes))
    owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    token = [n for n, length in enumerate(lengths) for _ in range(length)]  # of which sequence
    holders = [sorted({owner[t] for t, m in enumerate(token) if m == n}) for n in range(len(lengths))]

    found: dict[int, list[int]] = {n: [] for n in range(len(lengths))}
    for rank in range(len(sizes)):
        here = slices.pieces(rank)
        assert [piece.sequence for piece in here] == sorted({piece.sequence for piece in here})
        at = 0
        for n, start, stop, begins, ends in here:
            assert start == at  # they follow one another from the rank's first token on
            at = stop
            assert [t for t in range(len(token)) if token[t] == n and owner[t] == rank] == [
                offsets(sizes)[rank] + t for t in range(start, stop)
            ]
            assert (begins, ends) == (holders[n][:1] in ([], [rank]), holders[n][-1:] in ([], [rank]))
            found[n].append(rank)
        earlier = [s for s in holders[here[0].sequence] if s < rank] if here else []
        assert slices.sources(rank) == earlier
        assert all(piece.begins for piece in here[1:])
        assert all(piece.ends for piece in here[:-1])
    for n, length in enumerate(lengths):
        start = offsets(lengths)[n]
        assert found[n] == (holders[n] if length else [owner[start] if start < len(owner) else len(sizes) - 1])
    assert slices.crossed() == any(len(on) > 1 for on in holders)
    assert slices.chained() == any(len(on) > 2 for on in holders)


def test_pieces_are_told() -> None:
    cu_seqlens = torch.tensor([0, 10, 100, 100, 130])
    assert kda.distributed.pieces(cu_seqlens, [60, 70], 0) == [
        Piece(0, 0, 10, True, True),
        Piece(1, 10, 60, True, False),
    ]
    assert kda.distributed.pieces(cu_seqlens, (60, 70), 1) == [
        Piece(1, 0, 40, False, True),
        Piece(2, 40, 40, True, True),
        Piece(3, 40, 70, True, True),
    ]


# ---- results


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("name", CASES)
def test_the_whole_batch(name: str, impl: str) -> None:
    case, sizes = CASES[name]
    d = judged(case, parallel(call_of(case), sizes, impl=impl), impl)
    assert d.accepted, d
    if case.dtype == "float64":
        assert d.rms_o < 1e-14
        assert d.rms_state < 1e-14


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(LAYOUTS, st.booleans(), st.sampled_from(("float64", "float32")))
@example(([0, 3, 0, 0, 3, 0], [3, 0, 0, 3]), True, "float32")
@example(([9], [3, 0, 3, 3]), False, "float64")
def test_any_layout(layout: tuple[list[int], list[int]], initial: bool, state_dtype: str) -> None:
    """As `kda.fwd` on the whole batch, in fp64: states may be kept in less, those that are handed on are not."""
    lengths, sizes = layout
    case = Case(
        lengths=tuple(lengths),
        padding=sum(sizes) - sum(lengths),
        group=2,
        K=3,
        V=2,
        dtype="float64",
        state_dtype=state_dtype,
        decay="none",
        initial_state=initial,
    )
    call = call_of(case, impl="recurrent")
    result, exact = parallel(call, tuple(sizes)), kda.fwd(**call)
    torch.testing.assert_close(result.o, exact.o, rtol=1e-11, atol=1e-13)
    stored = (1e-11, 1e-13) if initial is False or state_dtype == "float64" else (2e-7, 0.0)
    torch.testing.assert_close(result.final_state, exact.final_state, rtol=stored[0], atol=stored[1])


FAULTY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Phi is dropped": lambda initial, phi, state: initial + state,
    "Phi forgets all": lambda initial, phi, state: state,
    "Phi is transposed": lambda initial, phi, state: initial @ phi.mT.double() + state,
    "the local state is dropped": lambda initial, phi, state: initial @ phi.double(),
    "in bf16": lambda initial, phi, state: (initial.bfloat16() @ phi.bfloat16() + state.bfloat16()).double(),
}


@pytest.mark.parametrize("fault", [None, *FAULTY])
def test_planted_faults_are_found(fault: str | None) -> None:
    """By the same judgement, on a state that lasts."""
    case, sizes = CASES["slow channels"]
    with patch.object(kda.distributed, "applied", FAULTY[fault] if fault else transitions.applied):
        assert judged(case, parallel(call_of(case), sizes), "chunked").accepted == (fault is None)


def test_planted_faults_of_the_bookkeeping_are_found() -> None:
    case, sizes = CASES["slow channels"]
    original = Slices.sources
    for fault in (
        lambda self, rank: original(self, rank)[-1:],  # the nearest alone
        lambda self, rank: original(self, rank)[::-1],
        lambda self, rank: original(self, rank)[1:],
    ):
        with patch.object(Slices, "sources", fault), pytest.raises((AssertionError, IndexError)):
            assert judged(case, parallel(call_of(case), sizes), "chunked").accepted


# ---- laws


def equal(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("packed", [True, False])
def test_one_rank_is_the_forward_pass(impl: str, packed: bool) -> None:
    lengths = (70, 0, 5) if packed else (75,)
    call = call_of(Case(lengths=lengths, packed=packed, state_dtype="bfloat16", H=2), impl=impl)
    (result,) = ranks.on_threads(1, lambda rank: kda.distributed.fwd(**call))
    plain = kda.fwd(**call)
    equal(result.o, plain.o)
    equal(result.final_state, plain.final_state)
    assert result.final_state.dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("name", ["nothing crosses", "ragged", "ends at the edges", "bf16 on four", "heads are empty"])
def test_a_rank_where_all_begin_is_the_forward_pass(name: str, impl: str) -> None:
    """On its slice, to the bit, though others wait for its last state; so the rest of the batch does not matter."""
    case, sizes = CASES[name]
    call = call_of(case, impl=impl)
    results = ranks.on_threads(len(sizes), lambda rank: kda.distributed.fwd(**own_call(call, sizes, rank)))
    seen = 0
    for rank, result in enumerate(results):
        here = pieces_of(call, sizes, rank)
        if here and not here[0].begins:
            continue
        own = own_call(call, sizes, rank)
        del own["split_sizes"]
        plain = kda.fwd(**dict(own, cu_seqlens=torch.tensor([0, *(piece.stop for piece in here)])))
        equal(result.o, plain.o)
        equal(result.final_state, plain.final_state)
        seen += 1
    assert seen


def test_states_between_ranks_are_those_on_the_way() -> None:
    """Of a sequence that goes on elsewhere: the state after its last token here."""
    case, sizes = CASES["no initial state"]
    call = call_of(case)
    results = ranks.on_threads(4, lambda rank: kda.distributed.fwd(**own_call(call, sizes, rank)))
    for at, result in zip(accumulate(sizes[:3]), results, strict=False):
        here = {name: call[name][:, : min(at, 100)] for name in TOKENS}
        prefix = kda.fwd(**call | here | {"cu_seqlens": None, "impl": "recurrent"})
        torch.testing.assert_close(result.final_state[:1], prefix.final_state, rtol=1e-10, atol=1e-12)


def test_without_lengths_it_is_one_sequence_on_equal_parts() -> None:
    case = Case(lengths=(90,), dtype="float64", state_dtype="float64", decay="slow")
    call = call_of(case)

    def run(rank: int) -> Output:
        own = own_call(call, (30, 30, 30), rank) | {"cu_seqlens": None, "split_sizes": None}
        return kda.distributed.fwd(**own if rank == 0 else own | {"initial_state": None})  # whose it is not

    results = ranks.on_threads(3, run)
    plain = kda.fwd(**call)
    torch.testing.assert_close(torch.cat([o for o, _ in results], 1), plain.o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[-1].final_state, plain.final_state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_buffers_are_written_and_returned(state_dtype: str) -> None:
    """States in place too; only what is asked for is returned."""
    case = Case(lengths=(9, 120, 0, 31), state_dtype=state_dtype, H=2)
    sizes = (50, 40, 30, 40)
    call = call_of(case)
    fresh = ranks.on_threads(4, lambda rank: kda.distributed.fwd(**own_call(call, sizes, rank)))

    def run(rank: int) -> Output:
        own = own_call(call, sizes, rank)
        buffers = {"out": torch.full_like(own["v"], torch.nan), "final_state": own["initial_state"]}
        result = kda.distributed.fwd(**own | buffers)
        assert result.o is buffers["out"]
        assert result.final_state is buffers["final_state"]
        less = kda.distributed.fwd(**own_call(call, sizes, rank) | {"output_final_state": False})
        equal(less.o, result.o)
        assert less.final_state is None
        return result

    for a, b in zip(ranks.on_threads(4, run), fresh, strict=True):
        equal(a.o, b.o)
        equal(a.final_state, b.final_state)


def test_no_head() -> None:
    call = call_of(Case(lengths=(8,), dtype="float32"))
    call |= {name: call[name][:, :, :0] for name in TOKENS}
    call |= {"A_log": None, "dt_bias": None, "initial_state": call["initial_state"][:, :0]}
    assert parallel(call, (4, 4)).o.shape == (1, 8, 0, 16)


# ---- what is exchanged


def exchanged(case: Case, sizes: tuple[int, ...]) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    """Shape and dtype of what each rank sends."""
    call = call_of(case)
    sent: list[list[Any]] = [[] for _ in sizes]
    ranks.on_threads(
        len(sizes),
        lambda rank: kda.distributed.fwd(**own_call(call, sizes, rank)),
        lambda rank, x: sent[rank].append((tuple(x.shape), x.dtype)),
    )
    return sent


@pytest.mark.parametrize(
    ("lengths", "sizes", "rows"),
    [
        ((50, 0, 30), (50, 30), None),  # nothing crosses
        ((0, 0), (0, 0, 0), None),
        ((70, 30), (50, 50), 20),  # a state alone
        ((90, 30), (50, 0, 70), 20),  # a rank without tokens is not in the middle
        ((120,), (50, 40, 30), 32),  # with Phi
    ],
)
def test_as_little_as_needed_is_exchanged(lengths: tuple[int, ...], sizes: tuple[int, ...], rows: int | None) -> None:
    for dtype, packet in (("bfloat16", torch.float32), ("float64", torch.float64)):
        case = Case(lengths=lengths, K=12, V=20, H=2, dtype=dtype, state_dtype="bfloat16")
        assert exchanged(case, sizes) == [[] if rows is None else [((2, rows, 12), packet)]] * len(sizes)


# ---- what is refused


def on_one_of_two(call: Call, sizes: tuple[int, ...], rank: int, change: Callable[[Call], Call]) -> None:
    """A call on one rank of two while the other never comes."""

    def run(place: int) -> None:
        if place == rank:
            own = own_call(call, sizes, rank)
            kda.distributed.fwd(**own | change(own))

    def sees(place: int, x: Tensor) -> None:
        raise AssertionError(f"rank {place} sends")

    ranks.on_threads(2, run, sees)


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "no tensor": (TypeError, "q", lambda c: {"q": None}),
    "rank of q": (ValueError, "q", lambda c: {"q": c["q"][0]}),
    "batch": (ValueError, "q", lambda c: {name: torch.cat([c[name]] * 2) for name in TOKENS}),
    "a token less": (ValueError, "q", lambda c: {name: c[name][:, 1:] for name in TOKENS}),
    "keys of others": (ValueError, "k", lambda c: {"k": c["k"][:, 1:]}),
    "channels": (ValueError, "k", lambda c: {"k": c["k"][..., 1:]}),
    "states of others": (ValueError, "initial_state", lambda c: {"initial_state": c["initial_state"][:0]}),
    "K first": (ValueError, "initial_state", lambda c: {"initial_state": c["initial_state"].mT}),
    "buffer": (ValueError, "final_state", lambda c: {"final_state": c["initial_state"][:0].clone()}),
    "no buffer": (TypeError, "final_state", lambda c: {"final_state": 1}),
    "offsets elsewhere": (ValueError, "cu_seqlens", lambda c: {"cu_seqlens": c["cu_seqlens"].to("meta")}),
    "no offsets": (TypeError, "cu_seqlens", lambda c: {"cu_seqlens": [0, 3]}),
    "float offsets": (TypeError, "cu_seqlens", lambda c: {"cu_seqlens": c["cu_seqlens"].float()}),
    "falling": (ValueError, "cu_seqlens", lambda c: {"cu_seqlens": torch.tensor([0, 50, 40, 80])}),
    "late": (ValueError, "cu_seqlens", lambda c: {"cu_seqlens": torch.tensor([1, 50, 80])}),
    "too many tokens": (ValueError, "cu_seqlens", lambda c: {"cu_seqlens": torch.tensor([0, 50, 81])}),
    "ranks": (ValueError, "split_sizes", lambda c: {"split_sizes": (40, 40, 0)}),
    "negative": (ValueError, "split_sizes", lambda c: {"split_sizes": (40, -40)}),
    "no numbers": (TypeError, "split_sizes", lambda c: {"split_sizes": (40, 40.0)}),
    "one number": (TypeError, "split_sizes", lambda c: {"split_sizes": 40}),
    "tensor": (TypeError, "split_sizes", lambda c: {"split_sizes": torch.tensor([40, 40])}),
    "group": (TypeError, "group", lambda c: {"group": 3}),
    "bound": (ValueError, "lower_bound", lambda c: {"lower_bound": 1.0}),
    "name": (ValueError, "impl", lambda c: {"impl": "fast"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_is_exchanged(name: str) -> None:
    error, argument, change = REFUSED[name]
    call = call_of(Case(lengths=(30, 50), V=12, dtype="float32"))
    with pytest.raises(error) as caught:
        on_one_of_two(call, (40, 40), 1, change)
    assert caught.type is error, caught.value
    assert re.match(rf"{argument}: expected .+, got .+", str(caught.value)), caught.value


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_and_unsupported_calls_are_refused_before_anything_is_exchanged(rank: int) -> None:
    call = call_of(Case(lengths=(30, 50), dtype="float32"))
    with pytest.raises(ValueError, match=r"^k: expected no gradient"):
        on_one_of_two(call, (40, 40), rank, lambda own: {"k": own["k"].clone().requires_grad_()})
    with pytest.raises(kda.Unsupported):
        on_one_of_two(call, (40, 40), rank, lambda own: {"impl": "cuda"})


def test_without_a_group() -> None:
    call = call_of(Case(lengths=(8,)))
    with pytest.raises(ValueError, match=r"^group: expected an initialised process group, got none"):
        kda.distributed.fwd(**call)


@pytest.mark.parametrize("rank", [2, -1, True, 0.0])
def test_no_such_rank(rank: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^rank: expected .+, got .+"):
        kda.distributed.pieces(torch.tensor([0, 3]), [2, 1], rank)


@pytest.mark.parametrize("what", ["cu_seqlens", "split_sizes", "q", "v"])
def test_ranks_that_disagree_are_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With KDA_CHECK=1, all of them."""
    monkeypatch.setenv("KDA_CHECK", "1")
    call = call_of(Case(lengths=(30, 50), dtype="float32"))
    told: list[str] = []

    def run(rank: int) -> None:
        own = own_call(call, (40, 40), rank)
        if rank and what == "cu_seqlens":
            own[what] = torch.tensor([0, 20, 80])
        elif rank and what == "split_sizes":
            own |= {what: (41, 39), **{name: own[name][:, 1:] for name in TOKENS}}
        elif rank and what == "q":
            own |= {name: own[name][..., :8] for name in ("q", "k", "g", "dt_bias", "initial_state")}
        elif rank:
            own |= {name: own[name][..., :8] for name in ("v",)} | {"initial_state": own["initial_state"][:, :, :8]}
        with pytest.raises(ValueError) as caught:
            kda.distributed.fwd(**own)
        told.append(str(caught.value))

    ranks.on_threads(2, run)
    assert len(set(told)) == 1
    assert re.match(rf"{what}: expected the same on every rank, got .+ on rank 0 and .+ on 1", told[0])
    assert judged(Case(lengths=(30, 50), dtype="float32"), parallel(call, (40, 40)), "chunked").accepted


# ---- processes


def processes(count: int, folder: Path) -> list[dict[str, Any]]:
    """What so many processes, one for each rank, leave."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "rank_program.py"), str(count), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_over_gloo(count: int, tmp_path: Path) -> None:
    results = processes(count, tmp_path)
    for name, (case, sizes) in cases_of(count).items():
        for impl in PYTORCH:
            given = [result[f"{name}, {impl}"] for result in results]
            d = judged(case, whole(call_of(case), sizes, given), impl)
            assert d.accepted, (name, impl, d)
            threads = parallel(call_of(case), sizes, impl=impl)
            equal(whole(call_of(case), sizes, given).o, threads.o)  # so what threads show is true of processes
    case, sizes = CASES["one sequence on two"]
    part = [result["part"] for result in (results[0], results[-1])]
    assert judged(case, whole(call_of(case), sizes, part), "chunked").accepted
    for result in results[1:-1]:
        assert result["not in the part"].startswith("TypeError: group: expected a torch.distributed.ProcessGroup that")
    assert {result["told"] for result in results} == {results[0]["told"]}
    assert results[0]["told"].startswith("ValueError: split_sizes: expected the same on every rank")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none and then Gloo on the CPU")
def test_against_one_device() -> None:
    """Two ranks as torchrun starts them: over NCCL where there are GPUs for them."""
    program = HERE / "nccl_program.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["rank"] for row in rows} == {0, 1}
    for row in rows:
        assert row["repeats"], row
        assert row.get("bits", True), row
        assert max(row["o"], row.get("state", 0.0)) < 1e-2, row
    assert max(row.get("o_if_forgotten", 0.0) for row in rows) > 0.1  # so the agreement means something
