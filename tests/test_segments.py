"""Sequences of the Hopper kernel that are cut into segments: where (kda/segments.h), and that nobody can tell."""

from __future__ import annotations

import ctypes
import heapq
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import HOPPER, parameter

import kda
import kda.cuda.fwd
from kda import api, environment, plan
from kda.cuda import build
from kda.cuda.library import abi, open_library
from kda.cuda.params import FwdParams
from kda.testing.cases import TOKENS, Case, PoolCase, arguments, within_hopper
from kda.testing.judge import check, judge
from kda.testing.pool import check as check_pool
from kda.testing.strategies import cases, pools

SETTINGS = settings(max_examples=40 if HOPPER else 100, deadline=None, derandomize=True, database=None)
gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
on_gpu = pytest.mark.parametrize("impl", [parameter("cuda")])

# ---- where sequences are cut, without a GPU

FUNCTIONS = """
#include "kda/segments.h"
using namespace kda;
static Batch batch(const int* chunks, int N, Cut cut) {
  Batch b;
  for (int n = 0; n < N; ++n) b.add(cut, chunks[n]);
  return b;
}
extern "C" {
int is_cut_(int first, int middle, int chunks) { return is_cut({first, middle}, chunks); }
int middles(int first, int middle, int chunks) { return middles_of({first, middle}, chunks); }
int end(int first, int middle, int chunks) { return end_of({first, middle}, chunks); }
int slots(const int* chunks, int N, int first, int middle) { return batch(chunks, N, {first, middle}).slots(); }
void candidate_(int i, int longest, int* out) { *reinterpret_cast<Cut*>(out) = candidate(i, longest); }
void best(int N, int chunks, int HV, int CTAs, int slots, int* out) {
  *reinterpret_cast<Cut*>(out) = cut_of_equals(N, chunks, HV, CTAs, slots);
}
void deal(const int* chunks, int N, int first, int middle, int HV, int CTAs, int64_t* out) {
  const Deal d = deal_of(batch(chunks, N, {first, middle}), {first, middle}, HV, CTAs);
  out[0] = d.late, out[1] = d.with, out[2] = d.without, out[3] = d.time;
}
int64_t predicted(const int* chunks, int N, int first, int middle, int HV, int CTAs) {
  const Cut cut{first, middle};
  const Batch b = batch(chunks, N, cut);
  return duration(b, cut, deal_of(b, cut, HV, CTAs), HV, CTAs);
}
int may(int longest, int chunks, int N, int HV, int CTAs) {
  return may_gain(longest, chunks, HV, CTAs, whole_turn(N * HV, CTAs));
}
int constant(int i) {
  const int all[] = {CHUNK_TIME,    STATE_CHUNK_TIME, TASK_TIME,  CHAIN_TIME,
                     EXCHANGE_TIME, ROWS_OF_CHAIN,    CANDIDATES, FIRST_TIME, PAIR_CHUNK_TIME};
  return all[i];
}
}
"""


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of segments.h, as the host compiles them."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("segments")
    source, library = folder / "segments.cc", folder / "segments.so"
    source.write_text(FUNCTIONS)
    include = build.SOURCE / "include"
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True, timeout=60)
    compiled = ctypes.CDLL(str(library))
    compiled.predicted.restype = ctypes.c_int64
    return compiled


def ints(values: Any) -> Any:
    return (ctypes.c_int * len(values))(*values)


def pair(function: Callable[..., None], *args: int) -> tuple[int, int]:
    out = (ctypes.c_int * 2)()
    function(*args, out)
    return out[0], out[1]


def dealt(segments: ctypes.CDLL, chunks: list[int], cut: tuple[int, int], HV: int, CTAs: int) -> tuple[int, ...]:
    out = (ctypes.c_int64 * 4)()
    segments.deal(ints(chunks), len(chunks), *cut, HV, CTAs, out)
    return tuple(out)


some_cut = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda x: (2 * x[0], 2 * x[1]))
some_chunks = st.lists(st.integers(0, 300), min_size=1, max_size=12)


@SETTINGS
@given(some_cut, st.integers(0, 1000))
def test_the_parts_of_a_sequence_are_all_of_it(segments: ctypes.CDLL, cut: tuple[int, int], chunks: int) -> None:
    first, middle = cut
    is_cut, middles, end = (f(*cut, chunks) for f in (segments.is_cut_, segments.middles, segments.end))
    assert is_cut == (chunks > max(cut))
    assert (first + middles * middle if is_cut else 0) + end == chunks
    if is_cut:
        assert 0 < end <= middle
    else:
        assert middles == 0
    assert segments.slots(ints([chunks]), 1, *cut) == middles + is_cut


@SETTINGS
@given(some_cut, some_chunks, st.integers(1, 40), st.integers(1, 140))
def test_the_first_round_is_dealt_as_well_as_can_be(
    segments: ctypes.CDLL, cut: tuple[int, int], chunks: list[int], HV: int, CTAs: int
) -> None:
    """All states have a place, and no earlier end has: ends are looked at one by one, which the formula does not."""
    chunk, state_chunk, task, *_ = (segments.constant(i) for i in range(7))
    late, with_first, without, time = dealt(segments, chunks, cut, HV, CTAs)
    firsts = HV * sum(segments.is_cut_(*cut, c) for c in chunks)
    states = 2 * HV * sum(segments.middles(*cut, c) for c in chunks)
    first, state = cut[0] * chunk + task + segments.constant(7), cut[1] * state_chunk + task
    base, start = firsts // CTAs * first, first if firsts % CTAs else 0
    assert late == firsts % CTAs
    assert late * with_first + (CTAs - late) * without >= states

    def room(end: int) -> int:
        return late * ((end - start) // state) + (CTAs - late) * (end // state)

    ends = sorted({start} | {k * state + s for k in range(states + 1) for s in (0, start) if k * state + s >= start})
    earliest = next(end for end in ends if room(end) >= states)
    assert time == base + earliest
    assert max(start + with_first * state if late else 0, without * state if CTAs > late else 0) <= max(earliest, start)


@SETTINGS
@given(some_cut, some_chunks, st.integers(1, 40), st.integers(1, 140))
def test_the_predicted_time_is_that_of_a_simulation(
    segments: ctypes.CDLL, cut: tuple[int, int], chunks: list[int], HV: int, CTAs: int
) -> None:
    """Middles in turns, then last parts, the longest first, to who has the least: never much less than predicted."""
    chunk, _, task, chain, exchange, rows, _ = (segments.constant(i) for i in range(7))
    middles = HV * sum(segments.middles(*cut, c) for c in chunks)
    load = [cut[1] * (middles // CTAs + (i < middles % CTAs)) for i in range(CTAs)]
    heapq.heapify(load)
    for end in sorted((segments.end(*cut, c) for c in chunks for _ in range(HV)), reverse=True):
        heapq.heapreplace(load, load[0] + end)
    last = max(load)
    time = segments.predicted(ints(chunks), len(chunks), *cut, HV, CTAs)
    rest = -(-(middles + HV * len(chunks)) // CTAs) * task
    if not any(segments.is_cut_(*cut, c) for c in chunks):
        if 2 * HV * len(chunks) <= CTAs:  # two CTAs each
            chunk = segments.constant(8)
    else:
        steps = max(*(segments.middles(*cut, c) for c in chunks), -(-middles * (128 // rows) // CTAs), 0)
        rest += dealt(segments, chunks, cut, HV, CTAs)[3] + steps * chain + exchange
    assert (time - rest) % chunk == 0
    assert (time - rest) // chunk <= last <= 2 * (time - rest) // chunk
    if len(chunks) == 1 and CTAs - middles % CTAs >= HV:
        assert (time - rest) // chunk == last


@SETTINGS
@given(st.integers(1, 8), st.integers(0, 5000), st.integers(1, 140), st.integers(1, 140), st.integers(1, 600))
def test_a_cut_is_never_predicted_to_lose(
    segments: ctypes.CDLL, N: int, chunks: int, HV: int, CTAs: int, slots: int
) -> None:
    cut = pair(segments.best, N, chunks, HV, CTAs, slots)
    if cut == (0, 0):
        return
    lengths = ints([chunks] * N)
    assert segments.predicted(lengths, N, *cut, HV, CTAs) < segments.predicted(lengths, N, 0, 0, HV, CTAs)
    assert segments.is_cut_(*cut, chunks)
    assert segments.slots(lengths, N, *cut) <= slots
    assert cut[0] % 2 == cut[1] % 2 == 0  # 64 tokens
    assert segments.may(chunks, N * chunks, N, HV, CTAs)  # the quick look does not rule it out


@SETTINGS
@given(st.integers(4, 1 << 26))
def test_what_is_looked_at(segments: ctypes.CDLL, longest: int) -> None:
    """From 3 segments on, in order, all of even lengths and without an overflow."""
    found = [pair(segments.candidate_, i, longest) for i in range(segments.constant(6))]
    assert found[0] == (0, 0)
    for i, cut in enumerate(found[1:]):
        assert min(cut) >= 2
        assert cut[0] % 2 == cut[1] % 2 == 0
        ratio = (12, 21, 38, 40)[i % 4] / 24
        assert abs(cut[0] - ratio * cut[1]) <= 2
        asked = (*range(3, 18), 21, 25, 33, 49, 65)[i // 4]
        if longest > 100 * asked:
            assert 2 + segments.middles(*cut, longest) in (asked - 1, asked), (asked, cut)


@pytest.mark.parametrize(
    ("T", "HV", "cut"),
    [
        *((131072, HV, True) for HV in (1, 4, 8, 16, 32)),
        *((8192, HV, True) for HV in (1, 4, 8, 16, 32)),
        (131072, 64, False),  # two CTAs for each of them are as quick
        (8192, 96, False),  # there are chains enough
        (1024, 8, True),
        (256, 8, False),  # too short
        (64, 1, False),
    ],
)
def test_calls_that_are_cut(segments: ctypes.CDLL, T: int, HV: int, cut: bool) -> None:
    found = pair(segments.best, 1, T // 32, HV, 132, 4 * 132 // HV)
    assert (found != (0, 0)) == cut


#: Packed batches and heads that could be cut, were their sequences of other lengths: in pairs; a CTA each; dealt.
UNCUT = [((128,) * 16, 2), ((256,) * 10, 8), ((300, 200, 100, 50, 1) * 4, 12)]


@pytest.fixture(scope="module")
def planned(library: Path) -> Callable[..., tuple[int, ...]]:
    compiled = open_library(library, abi())

    def ask(multiprocessors: int = 132, **fields: Any) -> tuple[int, ...]:
        p = FwdParams(**{"B": 1, "N": 1, "H": 8, "HV": 8, "T": 131072} | fields)
        size = compiled.kda_fwd_plan(ctypes.byref(p), multiprocessors)
        return p.first_segment, p.segment, p.segment_slots, size

    return ask


def test_what_the_library_plans(planned: Callable[..., tuple[int, ...]]) -> None:
    first, segment, slots, size = planned()
    assert first > 0
    assert segment > 0
    assert size == slots * 8 * 128 * (128 * 4 + 2 * 136 * 2)
    assert planned(batch_invariant=1) == (0, 0, 0, 0)
    assert planned(N=257, B=257) == (0, 0, 0, 0)
    assert planned(T=0) == planned(HV=0) == planned(N=0) == (0, 0, 0, 0)
    assert planned(HV=96) == (0, 0, 0, 0)
    # Packed sequences: where, the kernel finds, unless they are of one length; the memory is bounded.
    offsets = {"cu_seqlens": 16}
    for T, N in ((1024, 1), (8192, 1), (131072, 1), (131072, 4), (4 * 8192 - 3, 4)):
        assert planned(**offsets, T=T, N=N)[:2] == planned(T=-(-T // N), N=N, B=N)[:2] != (0, 0)
    assert planned(**offsets, N=80)[:2] == (0, 0)
    assert planned(**offsets, N=80)[2] > 0
    assert planned(**offsets, HV=96) == planned(**offsets, T=256) == (0, 0, 0, 0)
    for lengths, HV in UNCUT:  # the kernel is asked, and leaves them whole
        assert planned(**offsets, T=sum(lengths), N=len(lengths), HV=HV)[2] > 0
    assert planned(**offsets, T=1024, N=2) == (0, 0, 0, 0)  # where so little can be gained, it is not asked
    for T in (1024, 8192, 1 << 20, (1 << 31) - (1 << 16)):
        for HV in (1, 8, 32, 60):
            assert planned(**offsets, T=T, HV=HV)[3] <= 4 * 132 * 128 * 136 * 8
            assert planned(T=T, HV=HV)[3] <= 4 * 132 * 128 * 136 * 8
    # As asked for, while it fits.
    assert planned(first_segment=4, segment=2, T=320)[:3] == (4, 2, 3)
    assert planned(first_segment=4, segment=2, T=128) == (0, 0, 0, 0)
    assert planned(**offsets, first_segment=4, segment=2, T=320, N=3)[:3] == (4, 2, 10)


def test_segments_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_SEGMENTS", raising=False)
    assert environment.segments() is None
    monkeypatch.setenv("KDA_SEGMENTS", "128,64")
    assert environment.segments() == (128, 64)
    for wrong in ("64", "0,64", "64,-64", "64,100", "a,b", "64,64,64"):
        monkeypatch.setenv("KDA_SEGMENTS", wrong)
        with pytest.raises(ValueError, match="KDA_SEGMENTS"):
            environment.segments()


# ---- on a GPU, in segments far shorter than what pays

#: Packed batches and heads that are cut because one sequence is long, which only the device knows: the whole ones were
#: in pairs; a CTA each; and dealt.
UNEQUAL = [((9000,) + (100,) * 30, 2), ((9000,) + (100,) * 15, 8), ((9000,) + (100,) * 30, 8)]

CUTS = [(64, 64), (128, 64), (192, 128)]
RAGGED = Case(lengths=(300, 0, 700, 64, 129, 1), H=2, decay="slow", padding=33)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Have sequences cut so from now on."""

    def use(segments: tuple[int, int] | None) -> None:
        monkeypatch.setattr(kda.cuda.fwd, "SEGMENTS", segments)
        monkeypatch.setattr(api, "_PLANS", plan.Plans())

    return use


Use = Callable[[tuple[int, int] | None], None]


@gpu
@on_gpu
@pytest.mark.parametrize("segments_of", CUTS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        RAGGED,
        Case(lengths=(700,), H=2, decay="slow"),
        Case(lengths=(520,) * 3, H=2, packed=False, decay="slow"),
        Case(lengths=(1, 513, 64), H=1, group=4, decay="slow", state_dtype="bfloat16"),
        Case(lengths=(330, 65, 400), H=3, initial_state=False, decay="mixed", keys="close", beta="strong"),
        Case(lengths=(600,), keys="repeated", decay="none", use_beta_sigmoid=False),
        Case(lengths=(500,), decay="strong", exponent=40, norm=1e4),
    ],
    ids=repr,
)
def test_as_the_specification(impl: str, cut: Use, case: Case, segments_of: tuple[int, int]) -> None:
    cut(segments_of)
    check(within_hopper(case), impl)


@gpu
@on_gpu
def test_long_memories_are_carried_in_full(impl: str, cut: Use) -> None:
    """Slow channels over 31 segments: as accurate as without. With a chain in bf16 they are not."""
    case = within_hopper(Case(lengths=(2048,), H=2, decay="slow"))
    cut(None)
    whole = judge(replace(case, lengths=(2048,)), impl)
    cut((128, 64))
    parts = judge(case, impl)
    assert parts.accepted, parts
    assert parts.rms_o < 1.1 * whole.rms_o
    assert parts.rms_state < 1.25 * whole.rms_state


@gpu
@on_gpu
@pytest.mark.parametrize("segments_of", [None, *CUTS], ids=str)
def test_batch_invariant_is_not_cut(impl: str, cut: Use, segments_of: tuple[int, int] | None) -> None:
    call = arguments(within_hopper(RAGGED), "cuda")
    cut(None)
    whole = kda.fwd(**call, impl=impl, batch_invariant=True)
    cut(segments_of)
    again = kda.fwd(**call, impl=impl, batch_invariant=True)
    assert torch.equal(whole.o, again.o)
    assert torch.equal(whole.final_state, again.final_state)  # type: ignore[arg-type]
    if segments_of is not None:
        assert not torch.equal(whole.o, kda.fwd(**call, impl=impl).o)  # so the tests here do cut


@gpu
@on_gpu
@pytest.mark.parametrize(("lengths", "HV"), UNCUT, ids=str)
def test_what_is_asked_but_not_cut(impl: str, cut: Use, lengths: tuple[int, ...], HV: int) -> None:
    cut(None)
    call = arguments(within_hopper(Case(lengths=lengths, H=HV, decay="slow")), "cuda")
    found, whole = kda.fwd(**call, impl=impl), kda.fwd(**call, impl=impl, batch_invariant=True)
    assert torch.equal(found.o, whole.o)
    assert torch.equal(found.final_state, whole.final_state)  # type: ignore[arg-type]


@gpu
@on_gpu
@pytest.mark.parametrize(("N", "length", "HV"), [(1, 1024, 8), (1, 5000, 8), (3, 4096, 4), (2, 4090, 8)], ids=str)
def test_packed_sequences_of_one_length_are_cut_as_others_of_it(
    impl: str, cut: Use, N: int, length: int, HV: int
) -> None:
    """The cut of equal lengths goes along with the call; another is looked for where they are not equal."""
    cut(None)
    call = arguments(within_hopper(Case(lengths=(length,) * N, H=HV, packed=False, decay="slow")), "cuda")
    rows = kda.fwd(**call, impl=impl)
    for name in TOKENS:
        call[name] = call[name].flatten(0, 1).unsqueeze(0)
    call["cu_seqlens"] = torch.arange(N + 1, device="cuda") * length
    packed = kda.fwd(**call, impl=impl)
    whole = kda.fwd(**call, impl=impl, batch_invariant=True)
    assert torch.equal(packed.o.view_as(rows.o), rows.o)
    assert torch.equal(packed.final_state, rows.final_state)  # type: ignore[arg-type]
    assert not torch.equal(packed.o, whole.o)


@gpu
@on_gpu
def test_repetition_of_cut_sequences_is_bitwise(impl: str, cut: Use) -> None:
    cut((128, 64))
    call = arguments(within_hopper(replace(RAGGED, H=4, group=2)), "cuda")
    first = kda.fwd(**call, impl=impl)
    for _ in range(300):
        again = kda.fwd(**call, impl=impl)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.final_state, first.final_state)  # type: ignore[arg-type]


@gpu
@on_gpu
def test_two_streams_that_wait_for_all_multiprocessors(impl: str, cut: Use) -> None:
    """Each launch waits for all of its CTAs: two at a time must not wait for each other."""
    cut((64, 64))
    call = arguments(within_hopper(RAGGED), "cuda")
    expected = kda.fwd(**call, impl=impl).o
    streams = [torch.cuda.Stream() for _ in range(3)]
    found: list[torch.Tensor] = []
    torch.cuda.synchronize()
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(kda.fwd(**call, impl=impl).o)
    torch.cuda.synchronize()
    assert all(torch.equal(o[:, :-33], expected[:, :-33]) for o in found)


@gpu
@on_gpu
@pytest.mark.parametrize("segments_of", [None, (128, 64)], ids=str)
def test_graph_replays_of_other_lengths(impl: str, cut: Use, segments_of: tuple[int, int] | None) -> None:
    """Where sequences are cut is found on the device: captured once, replayed with other cu_seqlens."""
    cut(segments_of)
    T, H = 4096, 4
    kind = within_hopper(Case(lengths=(T, 0, 0, 0), H=H, decay="slow"))
    static = arguments(kind, "cuda")
    out, final = torch.empty_like(static["v"]), torch.empty_like(static["initial_state"])
    kda.fwd(**static, out=out, final_state=final, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda.fwd(**static, out=out, final_state=final, impl=impl)
    for lengths in (
        (T, 0, 0, 0),
        (0, 3000, 0, 96),
        (1000, 1000, 1000, 1000),
        (1, 2, 3, 4),
        (0, 0, 0, 0),
        (64, 0, 2048, 7),
    ):
        other = arguments(replace(kind, lengths=lengths, padding=T - sum(lengths), seed=sum(lengths)), "cuda")
        for name in (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens"):
            static[name].copy_(other[name])
        out.fill_(torch.nan), final.fill_(torch.nan)
        graph.replay()
        expected = kda.fwd(**other, impl=impl)
        assert torch.equal(out, expected.o)
        assert torch.equal(final, expected.final_state)  # type: ignore[arg-type]
        whole = kda.fwd(**other, impl=impl, batch_invariant=True)
        assert (out - whole.o).float().square().mean() <= 1e-4 * whole.o.float().square().mean()


@gpu
@on_gpu
@pytest.mark.parametrize("bounds", [[0, 500, 1000], [0, 382, 0, 382, 0, 382], [-5, 100, 382], [0, 2**31 - 1, 0]])
def test_bad_offsets_of_cut_sequences(impl: str, cut: Use, bounds: list[int]) -> None:
    """Sequences that lie on one another have more segments than the workspace: wrong numbers, nothing out of bounds."""
    cut((64, 64))
    N = len(bounds) - 1
    call = arguments(within_hopper(Case(lengths=(382,) + (0,) * (N - 1), H=2)), "cuda")
    guard = torch.full((1, 382 + 256, *call["v"].shape[2:]), 7.0, device="cuda", dtype=call["v"].dtype)
    kda.fwd(**dict(call, cu_seqlens=torch.tensor(bounds, device="cuda")), out=guard[:, 128:-128], impl=impl)
    torch.cuda.synchronize()
    assert (guard[:, :128] == 7).all()
    assert (guard[:, -128:] == 7).all()


@gpu
@on_gpu
def test_no_token_changes_one_before_it(impl: str, cut: Use) -> None:
    """Bitwise, in later segments too; and NaN stays within 64 tokens before it, and out of other sequences."""
    cut((128, 64))
    call = arguments(within_hopper(Case(lengths=(500, 200), H=2, decay="slow")), "cuda")
    before = kda.fwd(**call, impl=impl).o
    for at in (70, 300, 450):
        changed = dict(call)
        for name in TOKENS:
            changed[name] = call[name].clone()
            changed[name][:, at:500] = call[name][:, at:500].flip(1)
        after = kda.fwd(**changed, impl=impl).o
        assert torch.equal(after[:, :at], before[:, :at])
        assert not torch.equal(after[:, at:500], before[:, at:500])
        assert torch.equal(after[:, 500:], before[:, 500:])
        for name in ("k", "v", "g"):
            poisoned = call[name].clone()
            poisoned[:, at] = torch.nan
            after = kda.fwd(**dict(call, **{name: poisoned}), impl=impl).o
            assert torch.equal(after[:, : at - 64], before[:, : at - 64])
            assert torch.equal(after[:, 500:], before[:, 500:])
            assert after[:, at:500].isnan().any()


POOL = PoolCase(
    case=within_hopper(Case(lengths=(330, 0, 257, 130, 64), H=2, decay="slow")),
    slots=32,
    reads=(3, 1, 8, 0, -1),
    writes=(4, 2, -1, 0, 5),
    fresh=(False, False, True, False, False),
    kept=tuple(tuple(range(9 + 4 * n, 13 + 4 * n)) for n in range(4)) + ((25, -1, 26, 27),),
)


#: Checkpoints go to the slots that their sequences began from, where other segments end while these are read.
INTO_OWN = PoolCase(
    case=within_hopper(Case(lengths=(330, 700, 257), H=4, decay="slow")),
    slots=6,
    reads=(0, 1, 2),
    writes=(3, 4, 5),
    kept=((-1, 0), (-1, 1), (-1, 2)),
)


@gpu
@on_gpu
@pytest.mark.parametrize("segments_of", CUTS, ids=str)
@pytest.mark.parametrize(
    "case",
    [POOL, replace(POOL, own=True, kept_dtype="bfloat16", every=128), INTO_OWN],
    ids=["pool", "own", "into own"],
)
def test_pools_and_checkpoints_of_cut_sequences(
    impl: str, cut: Use, case: PoolCase, segments_of: tuple[int, int]
) -> None:
    cut(segments_of)
    check_pool(case, impl)


@gpu
@on_gpu
@pytest.mark.parametrize(("lengths", "HV"), [*UNEQUAL, ((8192,), 8)])
def test_slots_of_what_is_cut_by_itself(impl: str, cut: Use, lengths: tuple[int, ...], HV: int) -> None:
    """To the bit as with states of its own."""
    cut(None)
    call = arguments(within_hopper(Case(lengths=lengths, H=HV, decay="slow")), "cuda")
    expected = kda.fwd(**call, impl=impl)
    states, N = call.pop("initial_state"), len(lengths)
    pool = torch.full((N + 3, *states.shape[1:]), torch.nan, device="cuda")
    indices = torch.randperm(N + 3, device="cuda")[:N]
    pool[indices] = states
    del call["output_final_state"]
    result = kda.fwd(**call, state_pool=pool, state_indices=indices, impl=impl)
    assert torch.equal(result.o, expected.o)
    assert torch.equal(pool[indices], expected.final_state)  # type: ignore[arg-type]


@pytest.mark.long
@gpu
@on_gpu
@pytest.mark.parametrize("segments_of", [(64, 64), (128, 64)], ids=str)
def test_anything(impl: str, cut: Use, segments_of: tuple[int, int]) -> None:
    cut(segments_of)

    @SETTINGS
    @given(cases(("bfloat16",), max_tokens=600, channels=(128,)).map(within_hopper))
    def plain(case: Case) -> None:
        check(case, impl)

    @SETTINGS
    @given(pools(cases(("bfloat16",), max_tokens=600, channels=(128,)).map(within_hopper)))
    def pooled(case: PoolCase) -> None:
        check_pool(case, impl)

    plain()
    pooled()


@gpu
@on_gpu
@pytest.mark.parametrize(("lengths", "H"), [((8192,), 8), ((5000, 64, 64, 2000, 1), 4), *UNEQUAL])
def test_as_cut_by_itself(impl: str, cut: Use, lengths: tuple[int, ...], H: int) -> None:
    """With the cut that is found best, which is one: close to the call that is not cut, sequence by sequence."""
    cut(None)
    call = arguments(within_hopper(Case(lengths=lengths, H=H, decay="slow")), "cuda")
    parts, whole = kda.fwd(**call, impl=impl), kda.fwd(**call, impl=impl, batch_invariant=True)
    assert not torch.equal(parts.o, whole.o)
    bounds = call["cu_seqlens"].tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        for a, b in (
            (parts.o[:, start:stop], whole.o[:, start:stop]),
            (parts.final_state[n], whole.final_state[n]),  # type: ignore[index]
        ):
            error, size = (a.float() - b.float()).square().mean(), b.float().square().mean()
            assert error <= 1e-4 * size, (n, error, size)
