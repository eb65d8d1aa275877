"""Gradients of the PyTorch implementations, and their refusal elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from targets import PYTORCH, device, kernels

import kda
from kda.testing.cases import Case, arguments, fitted, in_fp64

CASES = {
    "bounded": Case(lengths=(5, 0, 3), padding=2, H=1, group=2, K=3, V=2, dtype="float64"),
    "softplus": Case(lengths=(6,), K=2, V=3, gate="softplus", dtype="float64", allow_neg_eigval=True),
    "given": Case(lengths=(4, 4), packed=False, K=2, V=2, gate="given", dtype="float64", use_qk_l2norm=False),
    "past a chunk": Case(lengths=(66,), K=1, V=1, dtype="float64", use_beta_sigmoid=False, decay="slow"),
}


def leaves(case: Case) -> tuple[dict[str, Any], list[str]]:
    """The call in fp64 and the names of all its float inputs, each a leaf that requires grad."""
    call = in_fp64(arguments(case))
    names = [n for n, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for name in names:
        call[name] = torch.nan_to_num(call[name]).requires_grad_()
    return call, names


@pytest.mark.parametrize("impl", PYTORCH)
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(impl: str, name: str) -> None:
    call, names = leaves(CASES[name])

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = kda.fwd(**{**call, **dict(zip(names, inputs, strict=True))}, impl=impl)
        return result.o, result.final_state  # type: ignore[return-value]

    assert torch.autograd.gradcheck(function, [call[n] for n in names], fast_mode=name == "past a chunk")


@pytest.mark.parametrize("case", [Case(lengths=(130, 0, 40), H=2, group=2, dtype="float64", decay="slow"),
                                  Case(lengths=(70,), gate="given", decay="resets", dtype="float64")])  # fmt: skip
def test_both_implementations_have_one_gradient(case: Case) -> None:
    """-inf gates included: no NaN in any gradient."""
    gradients = []
    for impl in PYTORCH:
        call, names = leaves(case)
        result = kda.fwd(**call, impl=impl)
        assert result.final_state is not None
        loss = result.o.sin().sum() + result.final_state.cos().sum()
        gradients.append(dict(zip(names, torch.autograd.grad(loss, [call[n] for n in names]), strict=True)))
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("impl", PYTORCH)
def test_padding_gets_no_gradient(impl: str) -> None:
    call = in_fp64(arguments(Case(lengths=(10, 20), padding=5)))  # padding rows hold NaN
    inputs = {n: call[n].requires_grad_() for n in ("q", "k", "v", "g", "beta")}
    o = kda.fwd(**call, impl=impl).o
    o.sum().backward()
    for x in inputs.values():
        assert not x.grad[:, 30:].any()  # type: ignore[index]
        assert x.grad[:, :30].isfinite().all()  # type: ignore[index]


@pytest.mark.parametrize("impl", kernels())
def test_kernels_refuse_rather_than_detach(impl: str) -> None:
    call = arguments(fitted(Case(lengths=(5,)), impl), device(impl))
    call["A_log"].requires_grad_()
    with pytest.raises(kda.Unsupported, match="A_log requires grad"):
        kda.fwd(**call, impl=impl)
    with torch.no_grad():
        kda.fwd(**call, impl=impl)


def test_auto_differentiates_on_a_cpu() -> None:
    call, _ = leaves(CASES["bounded"])
    assert kda.explain(**call).chosen == "chunked"
    assert kda.fwd(**call).o.grad_fn is not None
