"""The chain cut into segments: the plan, a pure function, and results on both sides of every cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import test_laws
import torch
from targets import device, kernels

import kda
from kda import dispatch
from kda.numerics import CHUNK
from kda.problem import Facts
from kda.testing import pool
from kda.testing.cases import NAMED, Case, PoolCase
from kda.testing.judge import check, facts_of
from kda.triton import forward, split
from kda.triton.split import Split, estimate, places

#: Processors of an H200.
PROCESSORS = 132


def cut(monkeypatch: pytest.MonkeyPatch, segment: int) -> list[Split]:
    """Every call that is not batch-invariant is cut at multiples of `segment` tokens; what was cut, as it happens."""
    made: list[Split] = []

    def plan(facts: Facts, processors: int) -> Split | None:
        if facts.batch_invariant or facts.N * facts.HV * facts.T == 0:
            return None
        made.append(Split(segment, places(facts, segment)))
        return made[-1]

    dispatch.forget()  # and with it the launches of calls that were not cut
    monkeypatch.setattr(split, "plan", plan)
    return made


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    dispatch.forget()


# ---- the plan


MODEL = replace(facts_of(Case(K=128, V=128)), capability=(9, 0), device="cuda")


def facts(T: int, HV: int, N: int = 1, varlen: bool = True, **changes: object) -> Facts:
    B = 1 if varlen else N
    return replace(MODEL, B=B, T=T, H=HV, HV=HV, N=N, varlen=varlen, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        facts(8192, 96),
        facts(8192, 64),
        facts(8192, 96, 6),
        facts(64, 1),
        facts(200, 8),
        facts(8192, 32, 8),
        facts(0, 8),
    ],
    ids=lambda call: f"{call.T}x{call.HV}, {call.N}",
)
def test_many_chains_and_short_ones_are_not_cut(call: Facts) -> None:
    assert split.plan(call, PROCESSORS) is None


@pytest.mark.parametrize("T, HV", [(8192, 8), (32768, 8), (131072, 8), (131072, 4), (131072, 1), (1 << 20, 16)])
@pytest.mark.parametrize("varlen", [True, False])
def test_few_long_chains_are_cut(T: int, HV: int, varlen: bool) -> None:
    plan = split.plan(facts(T, HV, varlen=varlen), PROCESSORS)
    assert plan is not None
    assert plan.segment % CHUNK == 0
    assert 0 < plan.segment <= T // 2


def test_batch_invariance_and_no_processors_mean_no_cut() -> None:
    assert split.plan(facts(131072, 8, batch_invariant=True), PROCESSORS) is None
    assert split.plan(facts(131072, 8), 0) is None
    assert split.plan(facts(131072, 0), PROCESSORS) is None


def test_every_plan_promises_a_gain_and_bounded_memory() -> None:
    """Whatever the shape: less than without by the model, for equal lengths, and no more states than are allowed."""
    for T, HV, N, varlen in product((100, 1000, 4096, 70000, 1 << 21), (1, 3, 16, 40, 100), (1, 2, 9), (True, False)):
        call = facts(T, HV, N, varlen)
        plan = split.plan(call, PROCESSORS)
        if plan is None:
            continue
        tokens = T // N if varlen else T
        segments = -(-tokens // plan.segment)
        assert plan.places * HV <= split.MOST
        assert plan.places >= N * segments
        assert estimate(tokens, N * HV, 2, 2, segments, PROCESSORS) <= split.WORTH * estimate(
            tokens, N * HV, 2, 2, 1, PROCESSORS
        )


def test_places_hold_the_segments_of_any_lengths() -> None:
    """Sequence n owns the places from start // segment + n on: enough for it, none of the next one's."""
    for lengths in ((0, 64, 65, 0, 127, 128, 129, 1), (500, 0), (0, 0, 500), (1,) * 9):
        start, free = 0, 0
        call = facts(sum(lengths), 1, len(lengths))
        for n, length in enumerate(lengths):
            first = start // 64 + n
            assert first >= free
            free, start = first + max(1, -(-length // 64)), start + length
        assert free <= places(call, 64)


# ---- results


CASES = {
    "ragged": Case(lengths=(0, 200, 64, 0, 65, 129, 1, 0), padding=40),
    "batch": Case(lengths=(150, 150), packed=False, H=2),
    "slow channels": replace(NAMED["slow channels"], lengths=(330,)),
    "close keys": NAMED["close keys"],
    "one key repeated": NAMED["one key repeated"],
    "alternating keys": NAMED["alternating keys"],
    "long memory": NAMED["long memory, weak beta"],
    "negative eigenvalues": NAMED["negative eigenvalues"],
    "hard resets": NAMED["hard resets"],
    "softplus, grouped heads": Case(lengths=(140, 70), gate="softplus", H=2, group=2),
    "K above V": Case(lengths=(150,), K=33, V=17),
    "V above K, fp32": Case(lengths=(200,), K=12, V=40, dtype="float32", decay="slow"),
    "more channels than 128": Case(lengths=(140,), K=130, V=200),
    "bf16 state": Case(lengths=(200, 0, 3), state_dtype="bfloat16"),
    "no initial state": Case(lengths=(200, 0, 3), initial_state=False),
    "fp16": Case(lengths=(200,), dtype="float16", decay="slow"),
}


@pytest.mark.parametrize("impl", kernels(but="cuda"))
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(impl: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one chunk: as many merges as there can be."""
    made = cut(monkeypatch, CHUNK)
    assert check(CASES[name], impl).typical <= 1
    assert made


@pytest.mark.parametrize("impl", kernels(but="cuda"))
def test_segments_of_two_chunks(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cut(monkeypatch, 2 * CHUNK)
    check(Case(lengths=(400, 0, 127, 128, 129), decay="slow"), impl)
    assert made


@pytest.mark.parametrize("impl", kernels(but="cuda"))
def test_on_a_pool(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, padding, fresh sequences, and checkpoints on both sides of a cut.

    A checkpoint is the final state of a call on its prefix, and has its bits where that is cut the same.
    """
    made = cut(monkeypatch, 2 * CHUNK)
    case = PoolCase(
        case=Case(lengths=(200, 0, 64, 150, 3), H=2, K=16, V=24),
        slots=20,
        reads=(3, 1, 8, -1, 0),
        writes=(4, 2, -1, 0, 5),
        fresh=(False, False, True, False, False),
        kept=((6, 7, 8), (9, 10, -1), (11, 12, -1), (13, 14, -1), (15, 16, -1)),
    )
    pool.check(case, impl)
    pool.check(replace(case, case=replace(case.case, padding=70), kept=None), impl)
    assert made


#: Laws that hold at any plan, and those between calls that are cut alike; the tests' own lengths pass several cuts.
LAWS = (
    lambda impl: test_laws.test_prefix_causality(impl, test_laws.REGIMES["close keys"]),
    lambda impl: test_laws.test_nan_stays_in_its_sequence(impl, torch.nan),
    lambda impl: test_laws.test_batch_is_varlen(impl),
    lambda impl: test_laws.test_heads_do_not_see_each_other(impl),
    lambda impl: test_laws.test_padding_is_zero_and_reaches_nothing(impl),
    lambda impl: test_laws.test_empty_sequences_keep_their_state(impl, "bfloat16"),
    lambda impl: test_laws.test_linear_in_value_and_state(impl, 10),
    lambda impl: test_laws.test_states_given_or_not_give_the_same_output(impl),
    lambda impl: test_laws.test_buffers_are_written_and_returned(impl),
)


@pytest.mark.parametrize("impl", kernels(but="cuda"))
@pytest.mark.parametrize("law", range(len(LAWS)))
def test_law(impl: str, law: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, CHUNK)
    LAWS[law](impl)


@pytest.mark.parametrize("impl", kernels(but="cuda"))
def test_a_segment_is_the_call_on_it(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first cut the bits are those of a call that is not cut."""
    args = test_laws.call(Case(lengths=(200,), decay="slow", H=2), impl)
    whole = kda.fwd(**args, batch_invariant=True)
    cut(monkeypatch, CHUNK)
    pieces = kda.fwd(**args)
    assert torch.equal(pieces.o[:, :CHUNK], whole.o[:, :CHUNK])
    assert not torch.equal(pieces.o, whole.o)
    torch.testing.assert_close(pieces.o, whole.o, rtol=0.05, atol=0.02)
    assert device(impl) == pieces.o.device.type


@pytest.mark.parametrize("impl", kernels(but="cuda"))
def test_states_are_updated_in_place_although_ends_may_come_first(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a last segment may write the final state before that of the first has begun its second walk."""
    made = cut(monkeypatch, CHUNK)
    args = test_laws.call(Case(lengths=(200, 30, 0, 130), decay="slow", H=2), impl)
    expected = kda.fwd(**args)
    states, launched = args["initial_state"].clone(), []
    original = forward.launch

    def early(kernel: object, *rest: object, **options: object) -> object:
        constants = rest[3]
        if constants.get("LOCAL") is False:  # type: ignore[attr-defined]
            launched.append(kernel)
            states[[0, 3]] = torch.nan  # the two that are cut
        return original(kernel, *rest, **options)

    monkeypatch.setattr(forward, "launch", early)
    dispatch.forget()
    result = kda.fwd(**{**args, "initial_state": states, "final_state": states})
    assert made
    assert len(launched) == 1
    assert torch.equal(result.o, expected.o)
    assert torch.equal(states, expected.final_state)  # type: ignore[arg-type]
