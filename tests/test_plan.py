"""Repeated calls take a short cut past validation and dispatch: it must decide nothing differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kda
from kda import api, dispatch, plan, validate
from kda.plan import MOST, Plans
from kda.problem import ABSENT
from kda.testing.cases import Case, arguments

CASE = Case(lengths=(20, 0, 5), H=2, group=2, V=8, dtype="float32")


@pytest.fixture(autouse=True, params=["guards", "kinds"])
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plans yet; tensors compared by torch's guards, and without them."""
    monkeypatch.setattr(api, "_PLANS", Plans())
    if request.param == "guards":
        assert type(plan.alike_of(ABSENT)) is type(abs)  # no function of Python
    else:
        monkeypatch.setattr(plan, "alike_of", plan._alike_by_kind)


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call that is validated in full."""
    calls: list[int] = []
    original = validate.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(validate, "forward", counted)
    return calls


def buffers(call: dict[str, Any]) -> dict[str, Tensor]:
    return {"out": torch.empty_like(call["v"]), "final_state": torch.empty_like(call["initial_state"])}


def assert_same(a: kda.Output, b: kda.Output) -> None:
    assert torch.equal(a.o, b.o)
    assert torch.equal(a.final_state, b.final_state)  # type: ignore[arg-type]


@pytest.mark.parametrize("flat", [False, True])
def test_other_tensors_of_the_same_layout(validated: list[int], flat: bool) -> None:
    """The second call is not validated again, and gives what a call on its own gives: values, offsets and buffers."""
    for seed, lengths in ((1, (20, 0, 5)), (2, (3, 22, 0)), (3, (25, 0, 0))):
        call = arguments(replace(CASE, seed=seed, lengths=lengths))
        if flat:
            call["dt_bias"], call["A_log"] = call["dt_bias"].flatten(), call["A_log"][None, None, :, None]
        given = buffers(call)
        result = kda.fwd(**call, **given)
        assert result.o is given["out"]
        assert result.final_state is given["final_state"]
        api._PLANS, kept = Plans(), api._PLANS
        assert_same(result, kda.fwd(**call, **buffers(call)))
        api._PLANS = kept
    assert len(validated) == 1 + 3


CHANGES: dict[str, Any] = {
    "shape": lambda c: {n: c[n][:, :20] for n in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": c["cu_seqlens"] - 5},
    "dtype of g": lambda c: {"g": c["g"].double()},
    "strides": lambda c: {"q": c["q"].transpose(1, 2).contiguous().transpose(1, 2)},
    "flag": lambda c: {"use_qk_l2norm": False},
    "scale": lambda c: {"scale": 0.3},
    "lower_bound": lambda c: {"lower_bound": -1.0},
    "gate": lambda c: {"lower_bound": None},
    "impl": lambda c: {"impl": "recurrent"},
    "state": lambda c: {"initial_state": None},
    "state in bf16": lambda c: {"initial_state": c["initial_state"].bfloat16()},
    "no state out": lambda c: {"output_final_state": False},
    "negated": lambda c: {"v": torch.complex(c["v"], -c["v"]).conj().imag},
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_decides_is_compared(validated: list[int], name: str) -> None:
    call = arguments(CASE)
    kda.fwd(**call)
    if name == "shape":
        call["cu_seqlens"] = torch.tensor([5, 25, 25, 25])
    changed = call | CHANGES[name](call)
    result = kda.fwd(**changed)
    assert len(validated) == 2
    api._PLANS = Plans()
    fresh = kda.fwd(**changed)
    assert torch.equal(result.o, fresh.o)
    assert (result.final_state is None) == (fresh.final_state is None)


def test_what_is_wrong_is_still_wrong() -> None:
    call = arguments(CASE)
    given = buffers(call)
    for _ in range(2):
        kda.fwd(**call, **given)
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        kda.fwd(**call, **given, use_qk_l2norm=1)  # equal to True, and no flag
    with pytest.raises(ValueError, match="out: expected memory of its own, got some of v's"):
        kda.fwd(**call, out=call["v"], final_state=given["final_state"])
    store = torch.empty(max(given["out"].numel(), given["final_state"].numel()))
    shared = {name: store[: x.numel()].view_as(x) for name, x in given.items()}
    with pytest.raises(ValueError, match="final_state: expected memory of its own, got some of out's"):
        kda.fwd(**call, **shared)
    with pytest.raises(ValueError, match="cu_seqlens: expected to end at most"):
        kda.fwd(**dict(call, cu_seqlens=call["cu_seqlens"] + torch.tensor([0, 9, 9, 9], dtype=torch.int32)), **given)
    with pytest.raises(ValueError, match="requires grad"):
        kda.fwd(**dict(call, q=call["q"].clone().requires_grad_()), **given)


def test_a_state_updated_in_place(validated: list[int]) -> None:
    call = arguments(CASE)
    expected = kda.fwd(**call)
    for _ in range(3):
        state = call["initial_state"].clone()
        result = kda.fwd(**dict(call, initial_state=state, final_state=state))
        assert result.final_state is state
        assert_same(result, expected)
    assert len(validated) == 2


def test_addresses_off_a_vector_are_looked_at(validated: list[int]) -> None:
    """Alignment is a fact, and an address is no part of the signature."""
    call = arguments(CASE)
    kda.fwd(**call)
    store = torch.empty(call["v"].numel() + 1)
    shifted = store[1:].view_as(call["v"]).copy_(call["v"])
    kda.fwd(**dict(call, v=shifted))
    assert len(validated) == 2
    assert kda.explain(**dict(call, v=shifted)) is not None


def test_a_gradient_asked_for_later_is_seen(validated: list[int]) -> None:
    """Without grad mode a parameter is a tensor like any other; with it the call may have to go elsewhere."""
    call = arguments(CASE)
    call["q"].requires_grad_()
    with torch.no_grad():
        kda.fwd(**call)
        assert not kda.fwd(**call).o.requires_grad
    assert len(validated) == 1
    assert kda.fwd(**call).o.requires_grad
    assert kda.fwd(**call).o.requires_grad
    assert len(validated) == 3
    with torch.no_grad():
        kda.fwd(**call)
    assert len(validated) == 3


def test_inference_mode_has_its_own_plans(validated: list[int]) -> None:
    call = arguments(CASE)
    kda.fwd(**call)
    with torch.inference_mode():
        made = kda.fwd(**call)
        assert made.o.is_inference()
        kda.fwd(**dict(call, v=call["v"] + 1))
    assert len(validated) == 3
    assert not kda.fwd(**call).o.is_inference()
    assert len(validated) == 3


def test_what_is_not_there_is_told_from_what_is(validated: list[int]) -> None:
    """The stand-in for a tensor that is not given is no tensor that may be given."""
    call = arguments(CASE)
    kda.fwd(**dict(call, initial_state=None))
    for name in ("initial_state", "out", "A_log"):
        for x in (ABSENT[0].as_subclass(Tensor), torch.empty(0)):
            with pytest.raises((TypeError, ValueError), match=name):
                kda.fwd(**dict(call, **{name: x}))
    assert not any(x.data_ptr() for x in ABSENT)


def test_tensors_that_come_twice(validated: list[int]) -> None:
    call = arguments(CASE)
    call["k"] = call["q"]
    expected = kda.fwd(**call)
    for _ in range(3):
        assert_same(kda.fwd(**call), expected)
    assert len(validated) == 1


def test_nested_tensors_are_refused_as_ever() -> None:
    """torch's guards end the process on one."""
    call = arguments(CASE)
    nested = torch.nested.nested_tensor([torch.zeros(2, 3)])
    for _ in range(2):
        kda.fwd(**call)
        for name in ("q", "k", "beta", "A_log", "initial_state", "cu_seqlens"):
            with pytest.raises(TypeError, match=f"{name}: expected a dense tensor, got a nested tensor"):
                kda.fwd(**dict(call, **{name: nested}))


def test_a_first_call_that_fails_is_not_remembered(validated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments(CASE)
    run = api._run
    monkeypatch.setattr(api, "_run", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        kda.fwd(**call)
    monkeypatch.setattr(api, "_run", run)
    for _ in range(3):
        kda.fwd(**call)
    assert len(validated) == 2


def test_a_build_is_seen(validated: list[int]) -> None:
    call = arguments(CASE)
    kda.fwd(**call)
    dispatch.forget()
    kda.fwd(**call)
    assert len(validated) == 2


def test_the_memory_of_calls_is_bounded() -> None:
    call = arguments(Case(lengths=(1,), K=1, V=1, dtype="float32"))
    for n in range(MOST + 5):
        kda.fwd(**call, scale=1.0 + n)
    assert 0 < len(api._PLANS) <= MOST
