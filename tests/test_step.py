"""`kda.step`: decode on a pool of states, against the specification, and what no tolerance sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from targets import GPU, KERNELS, device, kernels, parameter
from torch import Tensor

import kda
import kda.ref.recurrent
from kda import api, dispatch, plan, validate
from kda.problem import Output, StepProblem
from kda.ref.error import deviation
from kda.testing.cases import TOKENS, Case, StepCase, arguments, fitted_step
from kda.testing.judge import Finding, expected
from kda.testing.pool import check
from kda.testing.strategies import cases, steps

IMPLS = ("recurrent", *KERNELS)
Step = Callable[[StepProblem], Tensor]
#: Rows and tokens of a call, and what a case says about all else.
MODEL = Case(lengths=(2,) * 5, packed=False, H=2, group=2, K=24, V=40)

CASES = {
    "one token": replace(MODEL, lengths=(1,) * 3),
    "several tokens": replace(MODEL, lengths=(4,) * 2),
    "a model's size": Case(lengths=(1,) * 2, packed=False, H=2, K=128, V=128, A_log=False, dt_bias=False),
    "odd sizes": replace(MODEL, K=33, V=70),
    "wide": Case(lengths=(1,), packed=False, K=256, V=256),
    "softplus": replace(MODEL, gate="softplus", decay="mixed"),
    "resets": replace(MODEL, gate="given", decay="resets", dtype="float32"),
    "fp16": replace(MODEL, dtype="float16", decay="slow"),
    "bf16 states": replace(MODEL, state_dtype="bfloat16", decay="slow"),
    "weights": replace(MODEL, use_qk_l2norm=False, use_beta_sigmoid=False),
    "negative eigenvalues": replace(MODEL, allow_neg_eigval=True, beta="strong", keys="close"),
    "strides": replace(MODEL, strides="every-second"),
    "rows of a projection": replace(MODEL, strides="packed", K=16),
    "large values": replace(MODEL, exponent=40),
}


def impls() -> list:
    return [parameter(name) for name in IMPLS]


def call_of(case: Case, impl: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of `step` but for the pool, and the states [N, HV, V, K]."""
    call = arguments(fitted_step(case, impl), device(impl))
    call.pop("output_final_state")
    states = call.pop("initial_state")
    return {**call, "impl": impl}, states


def assert_equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def pool_of(states: Tensor, slots: int, at: list[int]) -> Tensor:
    """A pool full of NaN, but for the states in their slots."""
    pool = states.new_full((slots, *states.shape[1:]), torch.nan)
    pool[at] = states
    return pool


# ---- the specification


@pytest.mark.parametrize("name", CASES)
def test_the_recurrence_is_that_of_fwd(name: str) -> None:
    """`recurrent` steps as it runs through a sequence, to the bit."""
    call, states = call_of(CASES[name], "recurrent")
    pool = states.clone()
    o = kda.step(**call, state=pool)
    whole = kda.fwd(**call, initial_state=states, output_final_state=True)
    assert_equal(o, whole.o)
    assert_equal(pool, whole.final_state)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", impls())
@pytest.mark.parametrize("name", CASES)
def test_against_the_specification(impl: str, name: str) -> None:
    """Within the rounding that the implementation declares for a step, in slots of a pool full of NaN."""
    case = fitted_step(CASES[name], impl)
    call, states = call_of(case, impl)
    at = list(range(1, 2 * len(case.lengths), 2))[::-1]
    pool = pool_of(states, 2 * len(case.lengths) + 1, at)
    o = kda.step(**call, state=pool, state_indices=torch.tensor(at, device=pool.device))
    gathered, _ = api.gather(**arguments(case))
    rounding = dispatch.implementation(impl).rounding(replace(gathered.facts, operation="step"))
    d = deviation(Output(o.cpu(), pool[at].cpu()), expected(case, rounding))
    assert d.accepted, d
    assert pool[::2].isnan().all()


# ---- the pool


ROWS = cases(("bfloat16", "float32"), channels=(1, 8, 16, 17))


@pytest.mark.parametrize("impl", impls())
def test_drawn_patterns(impl: str) -> None:
    """Rows as the oracle has them; slots that nothing names keep every bit, NaN included; see `kda.testing.pool`."""

    @settings(max_examples=60 if GPU else 20, deadline=None, derandomize=True, database=None)
    @given(steps(ROWS))
    def attack(case: StepCase) -> None:
        check(replace(case, case=fitted_step(case.case, impl)), impl)

    attack()


BUSY = StepCase(
    case=replace(MODEL, lengths=(2,) * 4),
    slots=14,
    reads=(3, 1, -1, 0),
    writes=(4, -1, 2, 5),
    tokens=((6, 7), (8, 9), (10, 11), (-1, 12)),
    fresh=(False, True, False, False),
    index_dtype="int8",
)


def test_the_case_of_a_finding_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    from kda.cli import main

    assert StepCase.parse(repr(BUSY)) == BUSY
    assert main(["replay", "--impl", "recurrent", repr(BUSY)]) == 0
    assert main(["replay", "--impl", "chunked", repr(BUSY)]) == 2
    assert main(["replay", "StepCase(case=Case(lengths=(1,)), slots=1)"]) == 2
    assert "expected packed=False" in capsys.readouterr().out
    assert main(["fuzz", "--operation", "step", "--impl", "recurrent", "--seconds", "1", "--seed", "3"]) == 0
    assert main(["fuzz", "--operation", "step", "--impl", "chunked", "--seconds", "1"]) == 2


def _keeps_what_is_not_fresh(step: Step, problem: StepProblem) -> Tensor:
    return step(replace(problem, fresh=None))


def _writes_what_it_reads(step: Step, problem: StepProblem) -> Tensor:
    return step(replace(problem, write_indices=None))


def _writes_padding(step: Step, problem: StepProblem) -> Tensor:
    o = step(problem)
    problem.state[2] = 0
    return o


def _one_token_late(step: Step, problem: StepProblem) -> Tensor:
    tokens = problem.token_indices
    return step(replace(problem, token_indices=None if tokens is None else tokens.roll(1, 1)))


def _answers_padding(step: Step, problem: StepProblem) -> Tensor:
    o = step(problem)
    o[2] = 1
    return o


def _half_a_percent(step: Step, problem: StepProblem) -> Tensor:
    return step(replace(problem, scale=problem.scale * 1.005))


@pytest.mark.parametrize(
    "fault",
    [
        _keeps_what_is_not_fresh,
        _writes_what_it_reads,
        _writes_padding,
        _one_token_late,
        _answers_padding,
        _half_a_percent,
    ],
)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Tensor]) -> None:
    good = kda.ref.recurrent.IMPL
    check(BUSY, "recurrent")
    monkeypatch.setattr(kda.ref.recurrent, "IMPL", replace(good, step=lambda problem: fault(good.step, problem)))
    case = replace(BUSY, case=replace(BUSY.case, dtype="float32"))
    with pytest.raises(Finding, match="python -m kda replay --impl recurrent 'StepCase"):
        check(case, "recurrent")


@pytest.mark.parametrize("impl", impls())
def test_a_row_is_alone(impl: str) -> None:
    """The same bits whatever else is in the batch, and the same as token by token."""
    call, states = call_of(replace(MODEL, lengths=(3,) * 5), impl)
    whole = states.clone()
    o = kda.step(**call, state=whole)
    for n in range(5):
        pool = states[n : n + 1].clone()
        alone = kda.step(**{**call, **{name: call[name][n : n + 1] for name in TOKENS}}, state=pool)
        assert_equal(alone[0], o[n])
        assert_equal(pool[0], whole[n])
    pool = states.clone()
    for t in range(3):
        one = kda.step(**{**call, **{name: call[name][:, t : t + 1] for name in TOKENS}}, state=pool)
        assert_equal(one[:, 0], o[:, t])
    assert_equal(pool, whole)


@pytest.mark.parametrize("impl", impls())
def test_a_speculative_decoder(impl: str) -> None:
    """Any prefix of what was drafted can be committed, and the committed state stays as it was until then."""
    call, states = call_of(replace(MODEL, lengths=(3,) * 2), impl)
    pool = pool_of(states, 8, [0, 1])
    drafted = torch.tensor([[2, 3, 4], [5, 6, 7]], device=pool.device)
    committed, nothing = torch.tensor([0, 1], device=pool.device), torch.tensor([-1, -1], device=pool.device)
    o = kda.step(**call, state=pool, state_indices=committed, write_indices=nothing, token_indices=drafted)
    assert_equal(pool[:2], states)
    for accepted in (1, 2, 3):
        again = states.clone()
        prefix = kda.step(**{**call, **{name: call[name][:, :accepted] for name in TOKENS}}, state=again)
        assert_equal(o[:, :accepted], prefix)
        assert_equal(pool[drafted[:, accepted - 1]], again)


@pytest.mark.parametrize("impl", impls())
def test_layouts(impl: str) -> None:
    """A pool in the rows of a larger tensor, transposed states, strided indices, and a buffer."""
    call, states = call_of(MODEL, impl)
    exact = states.clone()
    expected_o = kda.step(**call, state=exact)
    N, HV, V, K = states.shape
    makers = [
        lambda: torch.full((N, HV * V * K + 48), torch.nan, device=states.device)[:, 16:-32].unflatten(1, (HV, V, K)),
        lambda: torch.full((HV, N, V, K), torch.nan, device=states.device).transpose(0, 1),
        lambda: torch.full((N, HV, K, V), torch.nan, device=states.device).mT,
    ]
    for make in makers[: 2 if impl == "cuda" else 3]:
        pool = make()
        pool.copy_(states)
        wide = (N, 2, HV, 2, V) if impl == "cuda" else (N, 2, HV, V, 2)
        out = torch.full(wide, torch.nan, dtype=torch.bfloat16, device=states.device)
        out = out[..., 0, :] if impl == "cuda" else out[..., 0]
        indices = torch.arange(2 * N, device=states.device)[::2] // 2
        assert kda.step(**call, state=pool, state_indices=indices, out=out) is out
        tolerance = 0 if pool.stride(3) == 1 else 1e-6  # where K has a stride, sums over K are in another order
        torch.testing.assert_close(out, expected_o, rtol=0, atol=tolerance)
        torch.testing.assert_close(pool, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("impl", impls())
@pytest.mark.parametrize("lengths", [(0,) * 3, ()])
def test_nothing_to_do(impl: str, lengths: tuple[int, ...]) -> None:
    call, states = call_of(replace(MODEL, lengths=lengths), impl)
    pool = states.clone()
    o = kda.step(**call, state=pool)
    assert o.shape == call["v"].shape
    assert_equal(pool, states)


@pytest.mark.parametrize("impl", impls())
def test_no_token_moves_states(impl: str) -> None:
    """With nothing to add, a state goes where it is to be written all the same, bit for bit."""
    call, states = call_of(replace(MODEL, lengths=(0,) * 3), impl)
    pool = pool_of(states, 6, [0, 1, 2])
    index = lambda *slots: torch.tensor(slots, device=pool.device)  # noqa: E731
    fresh = torch.tensor([False, True, False], device=pool.device)
    kda.step(**call, state=pool, state_indices=index(0, 1, -1), write_indices=index(4, 3, 5), fresh=fresh)
    assert_equal(pool[[4, 0, 1, 2]], states[[0, 0, 1, 2]])
    assert not pool[3].any()
    assert pool[5].isnan().all()


@pytest.mark.parametrize("impl", impls())
def test_slots_of_unsigned_indices(impl: str) -> None:
    """-1 is 255 there: what is left out must not be taken for that slot."""
    call, states = call_of(replace(MODEL, lengths=(2,) * 2), impl)
    pool = pool_of(states, 300, [254, 7])
    kda.step(**call, state=pool, state_indices=torch.tensor([254, 7], dtype=torch.uint8, device=pool.device))
    others = [slot for slot in range(300) if slot not in (254, 7)]
    assert pool[others].isnan().all()
    assert pool[[254, 7]].isfinite().all()


@pytest.mark.parametrize("impl", impls())
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_what_overflows_on_the_way_is_no_nan(impl: str, gate: str) -> None:
    """Keys and queries whose square is infinite count as 0; gates of infinity have limits, however slow the channel."""
    call, states = call_of(replace(MODEL, gate=gate), impl)
    call["q"], call["k"] = torch.full_like(call["q"], 3e18), torch.full_like(call["k"], -3e18)
    call["A_log"] = torch.full_like(call["A_log"], -100.0)
    call["g"] = torch.full_like(call["g"], torch.inf)
    call["g"][..., ::2] = -torch.inf
    assert not kda.step(**call, state=states).isnan().any()
    assert not states.isnan().any()


@pytest.mark.parametrize("impl", impls())
def test_odd_indices_are_validated_once(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices that begin anywhere, as slices of a buffer of a server's own do, take the plan too."""
    validated: list[int] = []
    original = validate.step
    monkeypatch.setattr(validate, "step", lambda *args, **flags: validated.append(1) or original(*args, **flags))
    monkeypatch.setattr(api, "_STEP_PLANS", plan.Plans())
    call, states = call_of(MODEL, impl)
    store = torch.arange(-1, 5, dtype=torch.int32, device=states.device)
    results = []
    for indices in (store[1:], store[1:], store[1:], store[1:].clone()):
        pool = states.clone()
        results.append((kda.step(**call, state=pool, state_indices=indices), pool))
    assert validated == [1]
    for o, pool in results[1:]:
        assert_equal(o, results[0][0])
        assert_equal(pool, results[0][1])


@pytest.mark.parametrize("impl", impls())
def test_new_results_are_contiguous(impl: str) -> None:
    """Whatever v's strides are, and where the plan serves the call too."""
    call, states = call_of(replace(MODEL, strides="heads-first"), impl)
    assert not call["v"].is_contiguous()
    expected = kda.step(**{**call, **{name: call[name].contiguous() for name in TOKENS}}, state=states.clone())
    for _ in range(3):
        o = kda.step(**call, state=states.clone())
        assert o.is_contiguous()
        assert_equal(o, expected)


@pytest.mark.parametrize("impl", impls())
def test_in_inference_mode_and_under_autocast(impl: str) -> None:
    call, states = call_of(MODEL, impl)
    plain = states.clone()
    o = kda.step(**call, state=plain)
    with torch.inference_mode(), torch.autocast(states.device.type, torch.bfloat16):
        for _ in range(2):
            pool = states.clone()
            assert_equal(kda.step(**call, state=pool), o)
            assert_equal(pool, plain)


@pytest.mark.parametrize("impl", impls())
def test_padding_alone_needs_no_pool(impl: str) -> None:
    call, states = call_of(MODEL, impl)
    nothing = torch.full((5,), -1, device=states.device)
    o = kda.step(**call, state=states[:0].clone(), state_indices=nothing)
    assert o.shape == call["v"].shape
    assert not o.any()


# ---- what is wrong


def small() -> tuple[dict[str, Any], Tensor]:
    call, states = call_of(replace(MODEL, K=16, V=16), "recurrent")
    return call, states


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"state": torch.zeros(5, 4, 16)}, ValueError, r"state: expected shape \[slots, HV, V, K\]"),
    "K first": ({"state": torch.zeros(5, 4, 16, 17)}, ValueError, "state: .*V comes before K"),
    "dtype": ({"state": torch.zeros(5, 4, 16, 16, dtype=torch.float16)}, TypeError, "state: expected dtype"),
    "no tensor": ({"state": [1]}, TypeError, "state: expected a torch.Tensor, got list"),
    "few slots": (
        {"state": torch.zeros(4, 4, 16, 16)},
        ValueError,
        "state: expected a slot for each of N = 5 sequences",
    ),
    "float indices": ({"state_indices": torch.zeros(5)}, TypeError, "state_indices: expected an integer dtype"),
    "few indices": (
        {"write_indices": torch.zeros(4, dtype=torch.int32)},
        ValueError,
        r"write_indices: .*\[N\] = \[5\]",
    ),
    "tokens": (
        {"token_indices": torch.zeros(5, dtype=torch.int64)},
        ValueError,
        r"token_indices: .*\[N, T\] = \[5, 2\]",
    ),
    "fresh": ({"fresh": torch.zeros(5)}, TypeError, "fresh: expected dtype bool"),
    "beyond the pool": ({"state_indices": torch.tensor([0, 1, 2, 3, 5])}, ValueError, "state_indices: .*below 5"),
    "device": ({"state": torch.zeros(5, 4, 16, 16, device="meta")}, ValueError, "state: expected device cpu"),
    "flag": ({"use_qk_l2norm": 1}, TypeError, "use_qk_l2norm: expected True or False"),
    "bound": ({"lower_bound": 1.0}, ValueError, "lower_bound: expected a finite number <= 0"),
    "expanded": (
        {"state": torch.zeros(1, 4, 16, 16).expand(5, 4, 16, 16)},
        ValueError,
        "state: .*one element per index",
    ),
    "name": ({"impl": "fast"}, ValueError, "impl: expected one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changes, error, message = WRONG[name]
    call, states = small()
    pool = states.clone()
    with pytest.raises(error, match=message):
        kda.step(**{**call, "state": pool, **changes})
    assert_equal(pool, states)


def test_a_buffer_on_the_pool_and_gradients() -> None:
    call, states = small()
    store = torch.zeros(max(states.numel() * 2, call["v"].numel()), dtype=torch.bfloat16)
    out = store[: call["v"].numel()].view(call["v"].shape)
    with pytest.raises(ValueError, match=r"(state|out): expected memory of its own"):
        kda.step(**call, state=store[: states.numel()].view(states.shape), out=out)
    graded = dict(call, q=call["q"].clone().requires_grad_())
    with pytest.raises(ValueError, match="q: expected no gradient"):
        kda.step(**graded, state=states)
    with torch.no_grad():
        kda.step(**graded, state=states)
    with torch.inference_mode():
        kda.step(**call, state=states.clone())


def test_collisions_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    call, states = small()
    index = lambda *slots: torch.tensor(slots)  # noqa: E731
    monkeypatch.setenv("KDA_CHECK", "1")
    kda.step(**call, state=states.clone(), state_indices=index(4, 3, 2, 1, 0))
    kda.step(**call, state=states.clone(), state_indices=index(0, 0, 0, 0, 0), write_indices=index(1, 2, 3, -1, -1))
    fresh = torch.tensor([False, True, False, False, False])  # reads no slot, so another may write there
    kda.step(**call, state=states.clone(), write_indices=index(1, -1, -1, -1, -1), fresh=fresh)
    for indices, message in (
        ({"state_indices": index(0, 1, 2, 3, 3)}, "slot 3 for sequences 3 and 4"),
        ({"write_indices": index(0, 1, 2, 0, 4)}, "slot 0 for sequences 0 and 3"),
        ({"write_indices": index(1, -1, -1, -1, -1)}, "slot 1 for sequence 1, which sequence 0 writes"),
        ({"token_indices": torch.arange(10).reshape(5, 2) // 2}, "slot 0 for sequences 0 and 0"),
    ):
        pool = states.clone()
        with pytest.raises(ValueError, match=message):
            kda.step(**call, state=pool, **indices)
        assert_equal(pool, states)


# ---- repeated calls


def test_a_repeated_step_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors and contents of the same layout, and whatever decides is compared; what is wrong is still wrong."""
    validated: list[int] = []
    original = validate.step
    monkeypatch.setattr(validate, "step", lambda *args, **flags: validated.append(1) or original(*args, **flags))
    monkeypatch.setattr(api, "_STEP_PLANS", plan.Plans())
    call, states = small()
    index = torch.arange(5)
    for seed in (1, 2, 3):
        other, begin = call_of(replace(MODEL, K=16, V=16, seed=seed), "recurrent")
        other["dt_bias"], other["A_log"] = other["dt_bias"].flatten(), other["A_log"][None, None, :, None]
        mine, fresh = begin.clone(), begin.clone()
        o = kda.step(**other, state=mine, state_indices=index)
        kept, api._STEP_PLANS = api._STEP_PLANS, plan.Plans()
        assert_equal(o, kda.step(**other, state=fresh, state_indices=index))
        assert_equal(mine, fresh)
        api._STEP_PLANS = kept
    assert len(validated) == 1 + 3

    kda.step(**call, state=states.clone())
    seen = len(validated)
    for changes in (
        {"use_qk_l2norm": False},
        {"scale": 0.3},
        {"lower_bound": -1.0},
        {"state": states.bfloat16()},
        {"state_indices": index.int()},
        {"fresh": torch.ones(5, dtype=torch.bool)},
        {"q": call["q"].transpose(1, 2).contiguous().transpose(1, 2)},
        {"impl": "auto"},
        {"out": torch.empty_like(call["v"])},
    ):
        kda.step(**{**call, "state": states.clone(), **changes})
        seen += 1
        assert len(validated) == seen, changes
    for changes, message in (
        ({"use_qk_l2norm": 1}, "use_qk_l2norm"),
        ({"q": call["q"].clone().requires_grad_()}, "requires grad"),
        ({"state_indices": index.int() + 1}, "state_indices: .*below 5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            kda.step(**{**call, "state": states.clone(), **changes})
    store = torch.zeros(states.numel() + call["v"].numel() * 2)
    out = store[: states.numel()].view(torch.bfloat16)[: call["v"].numel()].view(call["v"].shape)
    with pytest.raises(ValueError, match="expected memory of its own"):
        kda.step(**call, state=store[: states.numel()].view(states.shape), out=out)


# ---- who runs it


def test_who_runs_it() -> None:
    call, states = small()
    facts = kda.api.gather(**{k: v for k, v in call.items() if k != "impl"})[0].facts
    there = replace(facts, operation="step", K=128, V=128)
    assert dispatch.explain_facts(there).chosen == "recurrent"
    on_hopper = dispatch.explain_facts(replace(there, device="cuda", capability=(9, 0)))
    missing = dispatch.implementation("cuda").unavailable()
    assert on_hopper.chosen == ("triton" if missing else "cuda")
    assert on_hopper.reasons["cuda"] == ((missing,) if missing else ())
    odd = replace(there, device="cuda", capability=(9, 0), K=64, unaligned=("g", "state"))
    assert [reason.split(":")[0].split(";")[0] for reason in dispatch.explain_facts(odd).reasons["cuda"]][:2] == [
        "K is 64",
        "g, state",
    ]
    with pytest.raises(kda.Unsupported, match="chunked: there is no step here"):
        kda.step(**dict(call, impl="chunked"), state=states)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("impl", kernels())
def test_graph_replay_sees_changed_indices(impl: str) -> None:
    call, states = call_of(replace(MODEL, lengths=(1,) * 5), impl)
    pool = pool_of(states, 11, [0, 2, 4, 6, 8])
    start = pool.clone()
    reads = torch.tensor([0, 2, 4, 6, 8], device="cuda", dtype=torch.int32)
    writes, fresh = reads.clone(), torch.zeros(5, dtype=torch.bool, device="cuda")
    out = torch.empty_like(call["v"])
    indices = {"state_indices": reads, "write_indices": writes, "fresh": fresh}
    kda.step(**call, state=pool, out=out, **indices)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda.step(**call, state=pool, out=out, **indices)
    for r, w, f in (((8, 6, -1, 2, 0), (1, 3, 5, -1, 9), (0, 0, 1, 0, 1)), ((-1,) * 5, (0, 1, 2, 3, 4), (1,) * 5)):
        pool.copy_(start)
        reads.copy_(torch.tensor(r))
        writes.copy_(torch.tensor(w))
        fresh.copy_(torch.tensor(f, dtype=torch.bool))
        out.fill_(torch.nan)
        graph.replay()
        other = start.clone()
        assert_equal(out, kda.step(**call, state=other, **indices))
        assert_equal(pool, other)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("impl", kernels())
@pytest.mark.xdist_group("memory")
def test_slots_beyond_32_bits(impl: str) -> None:
    slots = 2**31 // (128 * 128) + 3
    call, states = call_of(Case(lengths=(1,) * 3, packed=False, K=128, V=128, state_dtype="bfloat16"), impl)
    pool = torch.full((slots, 1, 128, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    at = torch.tensor([slots - 1, 0, slots - 2], device="cuda")
    pool[at] = states
    few = states.clone()
    assert_equal(kda.step(**call, state=pool, state_indices=at), kda.step(**call, state=few))
    assert_equal(pool[at], few)
    assert pool[1 : slots - 2].isnan().all()


@pytest.mark.parametrize("impl", impls())
def test_one_graph_for_all_batches(impl: str) -> None:
    """Under torch.compile it is one operator that writes the pool, with no recompilation for another number of rows."""
    made: list[int] = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        made.append(len(module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda **call: kda.step(**call), fullgraph=True, backend=backend, dynamic=True)
    for N in (5, 7, 3):
        call, states = call_of(replace(MODEL, lengths=(2,) * N), impl)
        traced, plain, out = states.clone(), states.clone(), torch.empty_like(call["v"])
        indices = torch.arange(N, device=states.device).flip(0)
        compiled(**call, state=traced, state_indices=indices, out=out)
        assert_equal(out, kda.step(**call, state=plain, state_indices=indices))
        assert_equal(traced, plain)
    assert len(made) == 1


def test_a_gradient_is_refused_in_a_graph_too() -> None:
    call, states = small()
    call["q"].requires_grad_()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="q: expected no gradient"):
        torch.compile(lambda **c: kda.step(**c), backend="eager")(**call, state=states)


@pytest.mark.parametrize("impl", impls())
def test_the_operator_keeps_torchs_rules(impl: str) -> None:
    call, states = call_of(MODEL, impl)
    gate = (call["A_log"], call["dt_bias"], call["lower_bound"])
    indices = torch.arange(5, device=states.device)
    torch.library.opcheck(
        torch.ops.kda.step,
        (*(call[n] for n in TOKENS), states, None, *gate, indices, None, None, None, True, True, False, impl),
    )
