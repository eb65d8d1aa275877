"""`kda.fwd` on a pool of states, and the states it keeps on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from targets import GPU, device, implementations
from torch import Tensor

import kda
import kda.ref.recurrent
from kda import api, plan, validate
from kda.problem import Output, Problem
from kda.testing.cases import Case, PoolCase, arguments, fitted
from kda.testing.judge import Finding
from kda.testing.pool import call_of, check, judge, pool_of
from kda.testing.strategies import cases, pools

SEQUENCES = Case(lengths=(130, 0, 64, 65, 3), H=2, K=16, V=24)
BUSY = PoolCase(
    case=SEQUENCES,
    slots=17,
    reads=(3, 1, 8, 0, -1),
    writes=(4, 2, -1, 0, 5),
    fresh=(False, False, True, False, False),
    kept=((6, 7), (9, 10), (11, 12), (13, 14), (15, 16)),
    index_dtype="int8",
)

CASES = {
    "busy": BUSY,
    "checkpoints of their own": replace(BUSY, own=True, kept_dtype="bfloat16"),
    "every 128": replace(BUSY, every=128),
    "each has its slot": PoolCase(case=SEQUENCES, slots=5),
    "all are fresh": PoolCase(case=SEQUENCES, slots=6, reads=(5, 3, 1, 0, 2), fresh=(True,) * 5),
    "all are padding": PoolCase(case=replace(SEQUENCES, padding=70), slots=1, reads=(-1,) * 5, kept=((0,),) * 5),
    "nothing is written": replace(BUSY, writes=(-1,) * 5, kept=None),
    "no checkpoint": replace(BUSY, kept=((),) * 5),
    "a batch": PoolCase(
        case=Case(lengths=(70,) * 3, packed=False, H=2, K=16, V=16),
        slots=6,
        reads=(4, -1, 0),
        fresh=(False, False, True),
        kept=((1,), (2,), (3,)),
    ),
    "bf16 states": replace(BUSY, case=replace(SEQUENCES, state_dtype="bfloat16"), index_dtype="int16"),
    "bf16 states, fp32 checkpoints": replace(BUSY, case=replace(SEQUENCES, state_dtype="bfloat16"), own=True),
    "fp32": replace(BUSY, case=replace(SEQUENCES, dtype="float32", gate="softplus"), index_dtype="int32"),
    "given gates, int64 offsets": replace(BUSY, case=replace(SEQUENCES, gate="given", index_dtype="int64")),
    "no slot": PoolCase(case=SEQUENCES, slots=0, reads=(-1,) * 5),
    "no slot, checkpoints": PoolCase(case=SEQUENCES, slots=0, reads=(-1,) * 5, kept=((-1,),) * 5, own=True),
    "no token": PoolCase(case=Case(lengths=(0, 0)), slots=4, reads=(3, -1), writes=(0, 1)),
    "no sequence": PoolCase(case=Case(lengths=(), padding=5), slots=1),
    "tokens after the last sequence": replace(BUSY, case=replace(SEQUENCES, padding=70)),
    "the last sequence is padding": replace(BUSY, case=replace(SEQUENCES, lengths=(130, 0, 64, 65, 40), padding=3)),
    "grouped heads, strides": replace(BUSY, case=replace(SEQUENCES, group=2, strides="every-second")),
}


def fitted_to(case: PoolCase, impl: str) -> PoolCase:
    return replace(case, case=fitted(case.case, impl))


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(impl: str, name: str) -> None:
    """o, final states and checkpoints are right, padding is zero, and no other slot changes; see `kda.testing.pool`."""
    check(fitted_to(CASES[name], impl), impl)


@pytest.mark.parametrize("impl", implementations())
def test_drawn_patterns(impl: str) -> None:
    few = (128,) if impl == "cuda" else (1, 8, 16, 17)

    @settings(max_examples=40 if GPU else 8, deadline=None, derandomize=True, database=None)
    @given(pools(cases(("bfloat16",) if impl == "cuda" else ("bfloat16", "float32"), channels=few)))
    def attack(case: PoolCase) -> None:
        check(fitted_to(case, impl), impl)

    attack()


@pytest.mark.parametrize("impl", implementations())
def test_as_with_tensors_of_its_own(impl: str) -> None:
    """The same bits as with initial and final states: nothing but where states lie is new."""
    case = fitted_to(BUSY, impl)
    call, states = call_of(case, device(impl))
    pool = pool_of(case, states)
    states[2] = 0  # fresh
    checkpoints = {name: call.pop(name) for name in ("checkpoint_indices", "checkpoint_every")}
    result = kda.fwd(**call, **checkpoints, checkpoints=pool, state_pool=pool, impl=impl)
    assert result.final_state is None
    plain = {name: x for name, x in call.items() if name not in ("state_indices", "write_indices", "fresh")}
    expected = kda.fwd(**plain, initial_state=states, output_final_state=True, impl=impl)
    live = 130 + 64 + 65
    assert torch.equal(result.o[:, :live], expected.o[:, :live])
    for n, slot in ((0, 4), (1, 2), (3, 0)):
        assert torch.equal(pool[slot], expected.final_state[n])  # type: ignore[index]
    assert pool[8].isnan().all()  # fresh, and written nowhere


@pytest.mark.parametrize("impl", implementations())
def test_in_inference_mode_and_under_autocast(impl: str) -> None:
    """The same bits, at the first call and where the plan serves it."""
    case = fitted_to(replace(BUSY, index_dtype="int64"), impl)
    call, states = call_of(case, device(impl))
    plain = pool_of(case, states)
    o = kda.fwd(**call, state_pool=plain, checkpoints=plain, impl=impl).o
    with torch.inference_mode(), torch.autocast(device(impl), torch.bfloat16):
        for _ in range(2):
            pool = pool_of(case, states)
            assert torch.equal(kda.fwd(**call, state_pool=pool, checkpoints=pool, impl=impl).o, o)
            torch.testing.assert_close(pool, plain, rtol=0, atol=0, equal_nan=True)


# ---- layouts


@pytest.mark.parametrize("impl", implementations())
def test_slots_of_a_larger_tensor(impl: str) -> None:
    """Any stride from slot to slot, and transposed states where the implementation takes them."""
    case = fitted_to(replace(BUSY, index_dtype="int64"), impl)
    call, states = call_of(case, device(impl))
    exact = pool_of(case, states)
    o = kda.fwd(**call, state_pool=exact, checkpoints=exact, impl=impl).o
    slots, HV, V, K = exact.shape
    shapes: list[Callable[[], Tensor]] = [
        lambda: torch.full((slots, HV * V * K + 48), torch.nan, device=states.device)[:, 16:-32].unflatten(
            1, (HV, V, K)
        ),
        lambda: torch.full((HV, slots, V, K), torch.nan, device=states.device).transpose(0, 1),
    ]
    if impl != "cuda":
        shapes.append(lambda: torch.full((slots, HV, K, V), torch.nan, device=states.device).mT)
    for make in shapes:
        pool = make()
        pool.copy_(pool_of(case, states))
        spread = {
            name: torch.stack([call[name], call[name]], -1)[..., 0]
            for name in ("state_indices", "write_indices", "fresh", "checkpoint_indices")
        }
        again = kda.fwd(**{**call, **spread}, state_pool=pool, checkpoints=pool, impl=impl).o
        assert torch.equal(again, o)
        torch.testing.assert_close(pool, exact, rtol=0, atol=0, equal_nan=True)


def test_a_pool_that_the_kernel_cannot_address() -> None:
    """Inputs are copied where their rows are odd; a pool is not, so `cuda` says no."""
    import kda.cuda

    facts = api.gather(**arguments(fitted(SEQUENCES, "cuda")))[0].facts
    facts = replace(facts, device="cuda", capability=(9, 0), pool=True)
    assert kda.cuda.IMPL.reasons(facts) == []
    for name in ("state_pool", "checkpoints"):
        (reason,) = kda.cuda.IMPL.reasons(replace(facts, unaligned=(name, "q")))
        assert reason.startswith(f"{name} cannot be copied")


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_slots_of_unsigned_indices(impl: str, dtype: torch.dtype) -> None:
    """-1 is 255 in one of the dtypes: what is left out must not be taken for that slot."""
    case = fitted_to(PoolCase(case=Case(lengths=(70, 3), K=8, V=8), slots=300), impl)
    call, states = call_of(case, device(impl))
    pool = torch.full((300, *states.shape[1:]), torch.nan, device=states.device)
    pool[[254, 7]] = states
    kda.fwd(**call, state_pool=pool, state_indices=torch.tensor([254, 7], dtype=dtype, device=states.device), impl=impl)
    assert pool[[254, 7]].isfinite().all()
    assert pool[:7].isnan().all()
    assert pool[8:254].isnan().all()
    assert pool[255:].isnan().all()


@pytest.mark.parametrize("impl", implementations())
def test_a_checkpoint_that_never_comes(impl: str) -> None:
    case = fitted_to(PoolCase(case=Case(lengths=(129,), K=8, V=8), slots=2, kept=((0, 1),)), impl)
    call, states = call_of(case, device(impl))
    for every in (2**63, 2**64, 2**64 + 64):
        pool = pool_of(case, states)
        kept = torch.full_like(pool, torch.nan)
        kda.fwd(**{**call, "checkpoint_every": every}, state_pool=pool, checkpoints=kept, impl=impl)
        assert kept.isnan().all()


# ---- what is wrong


def small(kind: PoolCase = BUSY) -> tuple[dict[str, Any], Tensor]:
    kind = replace(kind, case=replace(kind.case, K=16, V=16))
    call, states = call_of(kind, "cpu")
    pool = pool_of(kind, states)
    return {**call, "state_pool": pool, "checkpoints": torch.full_like(pool, torch.nan)}, pool


STATE = torch.zeros(5, 2, 16, 16)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "initial": ({"initial_state": STATE}, ValueError, "initial_state: expected nothing beside state_pool"),
    "final": ({"final_state": STATE}, ValueError, "final_state: expected nothing beside state_pool"),
    "asked for": ({"output_final_state": True}, ValueError, "output_final_state: expected False with state_pool"),
    "no pool": ({"state_pool": None}, ValueError, "state_indices: expected state_pool beside it"),
    "rank": ({"state_pool": STATE[0]}, ValueError, r"state_pool: expected shape \[slots, HV, V, K\]"),
    "heads": ({"state_pool": torch.zeros(17, 3, 16, 16)}, ValueError, "state_pool: .*V comes before K"),
    "dtype": ({"state_pool": torch.zeros(17, 2, 16, 16).half()}, TypeError, "state_pool: expected dtype"),
    "few": ({"state_indices": None, "state_pool": STATE[:4]}, ValueError, "state_pool: expected a slot for each of N"),
    "floats": ({"write_indices": torch.zeros(5)}, TypeError, "write_indices: expected an integer dtype"),
    "count": ({"state_indices": torch.zeros(4, dtype=torch.int32)}, ValueError, r"state_indices: .*\[N\] = \[5\]"),
    "fresh": ({"fresh": torch.zeros(5)}, TypeError, "fresh: expected dtype bool"),
    "beyond": ({"state_indices": torch.tensor([0, 1, 2, 3, 17])}, ValueError, "state_indices: .*below 17, the pool's"),
    "kept beyond": (
        {"checkpoint_indices": torch.full((5, 2), 17)},
        ValueError,
        "checkpoint_indices: .*below 17, the number in checkpoints",
    ),
    "kept, rank": ({"checkpoints": STATE[0]}, ValueError, r"checkpoints: expected shape \[slots, HV, V, K\]"),
    "kept, dtype": ({"checkpoints": torch.zeros(17, 2, 16, 16).long()}, TypeError, "checkpoints: expected dtype"),
    "kept where": ({"checkpoint_indices": None}, ValueError, r"checkpoint_indices: expected \[N, M\] slots"),
    "kept when": ({"checkpoint_every": None}, ValueError, "checkpoint_every: expected tokens beside checkpoints"),
    "not kept": ({"checkpoints": None}, ValueError, "checkpoint_indices: expected checkpoints beside it"),
    "rows": ({"checkpoint_indices": torch.zeros(4, 2, dtype=torch.int64)}, ValueError, r"checkpoint_indices: .*\[N, M"),
    "flat": ({"checkpoint_indices": torch.zeros(5, dtype=torch.int64)}, ValueError, r"checkpoint_indices: .*\[N, M"),
    "every 63": ({"checkpoint_every": 63}, ValueError, "checkpoint_every: expected a positive multiple of 64"),
    "every 0": ({"checkpoint_every": 0}, ValueError, "checkpoint_every: expected a positive multiple of 64"),
    "every 64.0": ({"checkpoint_every": 64.0}, TypeError, "checkpoint_every: expected an integer, got float"),
    "device": ({"state_pool": torch.zeros(17, 2, 16, 16, device="meta")}, ValueError, "state_pool: expected device"),
    "expanded": ({"state_pool": STATE[:1].expand(17, 2, 16, 16)}, ValueError, "state_pool: .*one element per index"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changes, error, message = WRONG[name]
    call, pool = small()
    before = pool.clone()
    with pytest.raises(error, match=message):
        kda.fwd(**{**call, **changes})
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


def test_memory_and_gradients() -> None:
    call, pool = small()
    with pytest.raises(ValueError, match="checkpoints: expected memory of its own, got some of state_pool's"):
        kda.fwd(**{**call, "state_pool": pool[:-1], "checkpoints": pool[1:]})
    store = torch.zeros(pool.numel() * 2, dtype=torch.bfloat16)
    out = store[: call["v"].numel()].view(call["v"].shape)
    for name in ("state_pool", "checkpoints"):
        with pytest.raises(ValueError, match=f"{name}: expected memory of its own, got some of out's"):
            kda.fwd(**{**call, name: store[: pool.numel()].view(pool.shape)}, out=out)
    graded = dict(call, q=call["q"].clone().requires_grad_())
    with pytest.raises(ValueError, match="state_pool: expected no buffer while q requires grad"):
        kda.fwd(**graded)
    with torch.no_grad():
        kda.fwd(**graded)


def test_collisions_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    call, pool = small()
    before = pool.clone()
    monkeypatch.setenv("KDA_CHECK", "1")
    kda.fwd(**{**call, "state_pool": pool.clone(), "checkpoints": torch.empty_like(pool)})
    kda.fwd(**{**call, "state_pool": (same := pool.clone()), "checkpoints": same})
    index = lambda *slots: torch.tensor(slots)  # noqa: E731
    beyond_the_end = torch.tensor([[6, 7], [6, 7], [8, 6], [9, 6], [6, 7]])  # where sequences are shorter, or padding
    kda.fwd(**{**call, "state_pool": pool.clone(), "checkpoint_indices": beyond_the_end})
    in_the_pool = {"checkpoints": pool, "checkpoint_indices": beyond_the_end - 2}
    # A fresh sequence reads no slot, so another may write there; a given gate of padding may be anything.
    kda.fwd(**{**call, "state_pool": pool.clone(), "write_indices": index(8, 2, -1, 0, -1)})
    padded = dict(call, state_pool=pool.clone(), A_log=None, dt_bias=None, lower_bound=None, g=-call["g"].abs())
    padded["g"][:, -3:] = 1
    kda.fwd(**padded)
    padded["g"][:, -3] = torch.nan
    with pytest.raises(ValueError, match=r"g: expected log decays <= 0 .*, got 1\.0"):
        kda.fwd(**{**padded, "state_indices": index(3, 1, 8, 0, 16)})
    for changes, message in (
        ({"write_indices": index(4, 2, 4, 0, -1)}, "write_indices: .*slot 4 for sequences 0 and 2"),
        ({"write_indices": index(4, 3, -1, 0, -1)}, "state_indices: .*slot 3 for sequence 0, which sequence 1 writes"),
        ({"checkpoint_indices": beyond_the_end.clamp(max=8)}, "checkpoint_indices: .*slot 8 for sequences 2 and 3"),
        (in_the_pool, "checkpoint_indices: .*slot 4 for sequences 0 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kda.fwd(**{**call, **changes})
        torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


# ---- planted faults


def _faulty(fault: Callable[[Problem], Problem]) -> Callable[..., Output]:
    return lambda fwd, problem: fwd(fault(problem))


def _then(fault: Callable[[Problem, Output], None]) -> Callable[..., Output]:
    def run(fwd: Callable[[Problem], Output], problem: Problem) -> Output:
        result = fwd(problem)
        if problem.state_pool is not None:
            fault(problem, result)
        return result

    return run


FAULTS: dict[str, Callable[..., Output]] = {
    "what is not fresh is kept": _faulty(lambda p: replace(p, fresh=None)),
    "writes where it reads": _faulty(lambda p: replace(p, write_indices=None)),
    "one checkpoint late": _faulty(
        lambda p: p if p.checkpoint_indices is None else replace(p, checkpoint_indices=p.checkpoint_indices.roll(1, 1))
    ),
    "twice as often": _faulty(lambda p: replace(p, checkpoint_every=p.checkpoint_every // 2)),
    "answers padding": _then(lambda p, result: result.o[:, -1].fill_(1)),
    "a slot too many": _then(lambda p, result: p.state_pool[5].fill_(1)),  # type: ignore[index]
    "a checkpoint off by a bit": _then(lambda p, result: p.checkpoints[6].mul_(1 + 2**-20)),  # type: ignore[index]
    "half a percent": _faulty(lambda p: replace(p, scale=p.scale * 1.005)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good = kda.ref.recurrent.IMPL
    case = replace(BUSY, case=replace(BUSY.case, dtype="float32"), every=128 if name == "twice as often" else 64)
    check(case, "recurrent")
    monkeypatch.setattr(kda.ref.recurrent, "IMPL", replace(good, fwd=lambda problem: FAULTS[name](good.fwd, problem)))
    monkeypatch.setattr(api, "_PLANS", plan.Plans())
    with pytest.raises(Finding, match="python -m kda replay --impl recurrent 'PoolCase"):
        check(case, "recurrent")


def test_the_case_of_a_finding_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    from kda.cli import main

    assert PoolCase.parse(repr(BUSY)) == BUSY
    assert main(["replay", "--impl", "recurrent", repr(BUSY)]) == 0
    assert main(["replay", "PoolCase(case=Case(lengths=(1,), initial_state=False), slots=1)"]) == 2
    assert "expected initial_state=True" in capsys.readouterr().out
    assert main(["fuzz", "--operation", "pool", "--impl", "chunked", "--seconds", "1", "--seed", "3"]) == 0


# ---- repeated calls


def test_a_repeated_call_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tensors and contents of the same layout; whatever decides is compared, and what is wrong is still wrong."""
    validated: list[int] = []
    original = validate.forward
    monkeypatch.setattr(validate, "forward", lambda *args, **kw: validated.append(1) or original(*args, **kw))
    monkeypatch.setattr(api, "_PLANS", plan.Plans())
    for seed in (1, 2, 3):
        kind = replace(BUSY, case=replace(SEQUENCES, K=16, V=16, dtype="float32", seed=seed))
        (_, wrong), count = judge(kind, "recurrent"), len(validated)
        assert wrong == ""
        call, states = call_of(kind, "cpu")
        for _ in range(2):
            pool = pool_of(kind, states)
            kda.fwd(**call, state_pool=pool, checkpoints=pool, impl="recurrent")
        assert len(validated) == count
    call, pool = small(replace(BUSY, case=replace(SEQUENCES, dtype="float32")))
    kda.fwd(**call)
    validated.clear()
    kda.fwd(**call)
    assert validated == []
    kda.fwd(**{**call, "checkpoint_every": 128})
    assert validated == [1]
    with pytest.raises(ValueError, match="write_indices: expected slots below 17"):
        kda.fwd(**{**call, "write_indices": torch.tensor([0, 1, 2, 3, 99], dtype=torch.int8)})
    with pytest.raises(ValueError, match="checkpoints: expected memory of its own, got some of state_pool's"):
        kda.fwd(**{**call, "state_pool": pool[:16], "checkpoints": pool[1:]})
