"""`kda.transition`: its index order, its laws, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from targets import PYTORCH, device, implementations, kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kda
from kda import Output, Transition
from kda.ref.error import Deviation, deviation
from kda.testing.cases import TOKENS, Case, arguments, fitted, in_fp64
from kda.testing.judge import expected, judge_call, rounding_of

Call = dict[str, Any]

REGIMES = {
    "bounded": Case(lengths=(70, 0, 5), H=2, group=2, K=12, V=20, decay="slow"),
    "close keys": Case(lengths=(90, 3), keys="close", beta="strong", decay="slow"),
    "one key, nothing decays": Case(lengths=(90,), keys="repeated", beta="full", decay="none", dtype="float32"),
    "softplus": Case(lengths=(70, 5), gate="softplus", decay="mixed"),
    "resets": Case(lengths=(70, 5), gate="given", decay="resets"),
    "fp32": Case(lengths=(70, 5), dtype="float32", decay="slow", allow_neg_eigval=True),
    "batch": Case(lengths=(70, 70), packed=False, dtype="float32", decay="slow"),
    "weights and units given": Case(lengths=(70,), use_qk_l2norm=False, use_beta_sigmoid=False, decay="slow"),
}

#: Arguments of `kda.fwd` that a transition has not.
LEFT_OUT = ("q", "initial_state", "output_final_state")

SMALL = Case(lengths=(40, 0, 5), H=2, group=2, K=6, V=3, dtype="float64", state_dtype="float64", decay="slow")


def call_of(case: Case, impl: str) -> tuple[Call, Tensor]:
    """The arguments of `kda.transition` on a case, and the states that the case begins from."""
    call = arguments(fitted(case, impl), device(impl))
    states = call["initial_state"]
    return {name: x for name, x in call.items() if name not in LEFT_OUT} | {"impl": impl}, states


def cut(call: Call, at: int) -> tuple[Call, Call]:
    """The calls on the tokens of one packed sequence before and after a place."""
    both = []
    for part in (slice(None, at), slice(at, None)):
        tokens = {name: call[name][:, part] for name in TOKENS if name in call}
        both.append({**call, **tokens, "cu_seqlens": None})
    return both[0], both[1]


def judge(case: Case, impl: str, states: Tensor) -> Deviation:
    """How far final states are from those of the case, by its oracle and the implementation's tolerance."""
    case = fitted(case, impl)
    exact = expected(case, rounding_of(arguments(case), impl))
    return deviation(Output(exact.o, states.cpu()), exact)


# ---- what it is


def test_the_index_order() -> None:
    """Against the product of matrices, written down once more: phi is the transpose of Phi, V comes before K."""
    noise = torch.Generator().manual_seed(0)
    k, v, g = (torch.randn(1, 7, 1, n, generator=noise, dtype=torch.float64) for n in (4, 3, 4))
    beta, g = torch.rand(1, 7, 1, generator=noise, dtype=torch.float64), -g.abs()
    Phi, S = torch.eye(4, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    for t in range(7):
        kt, b = k[0, t, 0], beta[0, t, 0]
        A = (torch.eye(4, dtype=torch.float64) - b * torch.outer(kt, kt)) @ torch.diag(g[0, t, 0].exp())
        Phi, S = A @ Phi, A @ S + b * torch.outer(kt, v[0, t, 0])
    found = kda.transition(k, v, g, beta, use_qk_l2norm=False, use_beta_sigmoid=False)
    torch.testing.assert_close(found.phi[0, 0], Phi.T, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.state[0, 0], S.T, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(Phi, Phi.T, rtol=1e-2)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("case", REGIMES.values(), ids=REGIMES)
def test_applying_it_is_the_forward_pass(impl: str, case: Case) -> None:
    call, states = call_of(case, impl)
    found = kda.transition(**call)
    assert found.phi.dtype == found.state.dtype == torch.float32
    d = judge(case, impl, found.apply(states))
    assert d.accepted, d
    d = judge(replace(case, initial_state=False), impl, found.state)
    assert d.accepted, d


@pytest.mark.parametrize("impl", implementations())
def test_phi_is_as_accurate_as_a_state(impl: str) -> None:
    """Entry by entry, within the tolerance of a call from the identity without values."""
    call, _ = call_of(REGIMES["close keys"], impl)
    phi = kda.transition(**call).phi
    N, HV, K, _ = phi.shape
    identity = torch.eye(K, device=phi.device).repeat(N, HV, 1, 1)
    meant = dict(call, q=call["k"], v=torch.zeros(*call["v"].shape[:3], K).to(call["v"]), initial_state=identity)
    meant["output_final_state"] = True
    assert judge_call({name: x for name, x in meant.items() if name != "impl"}, impl).accepted
    torch.testing.assert_close(phi, kda.fwd(**meant).final_state, rtol=0, atol=0)


@pytest.mark.parametrize("impl", implementations())
def test_composing_is_the_whole(impl: str) -> None:
    case = replace(REGIMES["close keys"], lengths=(90,))
    call, states = call_of(case, impl)
    for at in (1, 40, 64):
        first, second = (kda.transition(**part) for part in cut(call, at))
        d = judge(case, impl, first.then(second).apply(states))
        assert d.accepted, (at, d)
    wrong = judge(case, impl, second.then(first).apply(states))
    assert not wrong.accepted


@pytest.mark.parametrize("impl", PYTORCH)
def test_composing_is_exact_and_associative(impl: str) -> None:
    call, _ = call_of(replace(SMALL, lengths=(45,), decay="none"), impl)
    whole = kda.transition(**call)
    first, rest = cut(call, 13)
    a, b, c = (kda.transition(**part) for part in (first, *cut(rest, 20)))
    for composed in (a.then(b).then(c), a.then(b.then(c))):
        assert composed.phi.dtype == torch.float64
        for x, y in zip(composed, whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)
    assert not torch.allclose(a.then(c).then(b).phi, whole.phi, rtol=1e-3)


@pytest.mark.parametrize("impl", implementations())
def test_an_empty_sequence_changes_nothing(impl: str) -> None:
    call, states = call_of(Case(lengths=(0, 3, 0)), impl)
    found = kda.transition(**call)
    empty = [0, 2]
    assert torch.equal(found.phi[empty], torch.eye(found.phi.shape[-1], device=found.phi.device).expand(2, 1, -1, -1))
    assert not found.state[empty].any()
    assert torch.equal(found.apply(states)[empty], states[empty])
    assert not torch.equal(found.apply(states)[1], states[1])


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_token_at_all(lengths: tuple[int, ...]) -> None:
    call, states = call_of(replace(SMALL, lengths=lengths), "chunked")
    found = kda.transition(**call)
    assert found.phi.shape == (len(lengths), 4, 6, 6)
    assert torch.equal(found.then(found).apply(states), states)


# ---- precision


class Products(TorchDispatchMode):
    """Notes the dtypes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def test_no_setting_reaches_the_products() -> None:
    """Autocast, and the least precision for fp32, which allows TF32 too."""
    noise = torch.Generator().manual_seed(0)
    a, b = (Transition(*torch.randn(2, 2, 3, 8, 8, generator=noise)) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.backends.cuda.matmul.allow_tf32
        with Products() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
            composed, applied = a.then(b), b.apply(a.state)
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen.dtypes == {torch.float64}
    assert composed.phi.dtype == applied.dtype == torch.float32
    assert torch.equal(composed.phi, (a.phi.double() @ b.phi.double()).float())
    assert torch.equal(applied, composed.state)


@pytest.mark.parametrize("impl", PYTORCH)
def test_gradients(impl: str) -> None:
    call = in_fp64(call_of(replace(SMALL, lengths=(3, 0, 2), H=1, K=3, V=2), impl)[0])
    names = [name for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()]
    states = torch.randn(3, 2, 2, 3, dtype=torch.float64)

    def function(*inputs: Tensor) -> Tensor:
        found = kda.transition(**{**call, **dict(zip(names, inputs[:-1], strict=True))})
        return found.then(found).apply(inputs[-1])

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (*(call[n] for n in names), states)])


@pytest.mark.parametrize("impl", kernels())
def test_kernels_refuse_rather_than_detach(impl: str) -> None:
    call, _ = call_of(Case(lengths=(5,)), impl)
    call["k"].requires_grad_()
    with pytest.raises(kda.Unsupported, match="k requires grad"):
        kda.transition(**call)


def test_inputs_stay_and_it_can_be_traced() -> None:
    call, states = call_of(Case(lengths=(20, 3)), "chunked")
    before = {name: x.clone() for name, x in call.items() if isinstance(x, Tensor)}
    plain = kda.transition(**call).apply(states)
    assert all(torch.equal(call[name], x) for name, x in before.items())
    torch._dynamo.reset()
    traced = torch.compile(lambda **c: kda.transition(**c).apply(states), fullgraph=True, backend="eager")(**call)
    assert torch.equal(traced, plain)


# ---- what it refuses

REFUSED: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "no tensor": (TypeError, "k", lambda c: {"k": None}),
    "rank": (ValueError, "k", lambda c: {"k": c["k"][0]}),
    "integers": (TypeError, "k", lambda c: {"k": c["k"].long()}),
    "no channel": (ValueError, "k", lambda c: {"k": c["k"][..., :0]}),
    "batch": (ValueError, "k", lambda c: {"k": torch.cat([c["k"]] * 2)}),
    "other dtype": (TypeError, "v", lambda c: {"v": c["v"].float()}),
    "tokens": (ValueError, "v", lambda c: {"v": c["v"][:, 1:]}),
    "gate": (ValueError, "g", lambda c: {"g": c["g"][..., 1:]}),
    "beta": (ValueError, "beta", lambda c: {"beta": c["beta"][..., 1:]}),
    "bound": (ValueError, "lower_bound", lambda c: {"lower_bound": 1.0}),
    "offsets": (ValueError, "cu_seqlens", lambda c: {"cu_seqlens": torch.tensor([0, 5, 3])}),
    "flag": (TypeError, "use_qk_l2norm", lambda c: {"use_qk_l2norm": 1}),
    "implementation": (ValueError, "impl", lambda c: {"impl": "fast"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input(name: str) -> None:
    error, argument, change = REFUSED[name]
    call, _ = call_of(SMALL, "chunked")
    with pytest.raises(error) as caught:
        kda.transition(**call | change(call))
    assert caught.type is error
    assert re.match(rf"{argument}: expected .+, got .+", str(caught.value)), caught.value


def test_bad_states_and_successors() -> None:
    call, states = call_of(SMALL, "chunked")
    found = kda.transition(**call)
    for state, error in (
        (states.mT, ValueError),
        (states[:1], ValueError),
        (states.long(), TypeError),
        (states.to("meta"), ValueError),
        (None, TypeError),
    ):
        with pytest.raises(error, match=r"^initial_state: expected .+, got .+"):
            found.apply(state)  # type: ignore[arg-type]
    one = Transition(*(x[:1] for x in found))
    with pytest.raises(ValueError, match=r"^later.phi: expected shape .+, got .+"):
        found.then(one)
    with pytest.raises(TypeError, match=r"^later.phi: expected dtype float64 \(the earlier one's\), got float32"):
        found.then(Transition(*(x.float() for x in found)))
    with pytest.raises(ValueError, match=r"^later.state: expected device .+, got meta"):
        found.then(Transition(found.phi, found.state.to("meta")))
    with pytest.raises(TypeError, match=r"^later: expected a Transition, got Tensor"):
        found.then(states)  # type: ignore[arg-type]
