"""The three gates: their values, their limits, their relative accuracy, and both sides of every exponent budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from targets import device, implementations, kernels

import kda
from kda.gate import log_decay
from kda.numerics import exponent_margin
from kda.problem import GateKind, gate_kind
from kda.testing.cases import Case, arguments, fitted
from kda.testing.judge import check, facts_of, judge_call, rounding_of
from kda.triton.config import ANCHORED_MARGIN, TOKENS, anchor

NONE = {"A_log": None, "dt_bias": None}


def test_the_arguments_choose_the_gate() -> None:
    some = torch.zeros(1)
    assert gate_kind(-5.0, None) is GateKind.BOUNDED
    assert gate_kind(-5.0, some) is GateKind.BOUNDED
    assert gate_kind(0.0, some) is GateKind.BOUNDED
    assert gate_kind(None, some) is GateKind.SOFTPLUS
    assert gate_kind(None, None) is GateKind.GIVEN


def decay_after(impl: str, g: list[float], dtype: str = "float32", **gate: Any) -> torch.Tensor:
    """exp of the summed log decay of each token's raw gate as the implementation has it: [tokens], fp64.

    One sequence per raw gate, all of 32 tokens, state 1, beta 0: what is left of the state is the decay to the 32nd.
    """
    tokens, N = 32, len(g)
    case = fitted(Case(lengths=(tokens,) * N, K=16, V=16, dtype=dtype, beta="zero"), impl)
    kwargs: dict[str, Any] = arguments(case, device(impl))
    raw = torch.tensor(g, dtype=torch.bfloat16 if impl == "cuda" else torch.float32).repeat_interleave(tokens)
    kwargs["g"] = raw[None, :, None, None].expand(1, -1, 1, case.K).to(device(impl))
    kwargs["initial_state"] = torch.ones(N, 1, case.V, case.K, device=device(impl))
    kwargs.update({"A_log": None, "dt_bias": None, "lower_bound": None, **gate})
    for name in ("A_log", "dt_bias"):
        if kwargs[name] is not None:
            kwargs[name] = torch.full((1,) if name == "A_log" else (1, case.K), kwargs[name], device=device(impl))
    state = kda.fwd(**kwargs, impl=impl).final_state
    assert state is not None
    return state[:, 0, 0, 0].double().cpu()


@pytest.mark.parametrize("impl", implementations())
def test_bounded_is_a_sigmoid_not_a_clamp(impl: str) -> None:
    """a = 0, A_log = 0, lower_bound = -0.05 gives -0.025 per token, with A_log or without."""
    for A_log in (0.0, None):
        decay = decay_after(impl, [0.0], lower_bound=-0.05, A_log=A_log)
        torch.testing.assert_close(decay.log(), torch.tensor([32 * -0.025]).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "gate", [{"lower_bound": -5.0}, {"lower_bound": -5.0, "A_log": 0.3, "dt_bias": 0.2}, {"A_log": 0.0}, {"A_log": 0.3}]
)
def test_relative_accuracy_over_logits(impl: str, dtype: str, gate: dict[str, float]) -> None:
    """The decay's relative error decides how long a channel remembers: logits -16 to 16."""
    if impl == "cuda" and "lower_bound" not in gate:
        pytest.skip("cuda takes the bounded gate")
    logits = [x / 2 for x in range(-32, 33)]
    g = torch.tensor(logits, dtype=torch.float64)[:, None, None]
    A_log, dt_bias = gate.get("A_log"), gate.get("dt_bias")
    exact = log_decay(
        g,
        gate_kind(gate.get("lower_bound"), A_log),
        gate.get("lower_bound"),
        None if A_log is None else torch.tensor([A_log], dtype=torch.float32).double(),
        None if dt_bias is None else torch.tensor([[dt_bias]], dtype=torch.float32).double(),
    ).flatten()
    expected = (32 * exact).exp()
    decay = decay_after(impl, logits, dtype, **gate)
    alive = expected > 1e-30
    # Relative to the exponent, and to what fp32 resolves next to 1.
    error = (decay.log() - 32 * exact)[alive].abs()
    assert (error <= 2e-6 * (32 * exact[alive]).abs() + 4e-7 * 32).all(), error.max()


LIMITS = [
    ({"lower_bound": -5.0, "A_log": 100.0}, [1e4, 1.0, -1.0, -1e4], [-160.0, -160.0, 0.0, 0.0]),
    ({"lower_bound": -5.0, "A_log": -100.0}, [1e4, -1e4], [-80.0, -80.0]),
    ({"lower_bound": -5.0, "A_log": 100.0}, [0.0], [-80.0]),
    ({"lower_bound": 0.0}, [1e4, 0.0, -1e4], [0.0, 0.0, 0.0]),
    ({"A_log": 100.0}, [1e4, 0.0, -1e4], [-torch.inf, -torch.inf, 0.0]),
    ({"A_log": -100.0}, [1e4, 0.0, -1e4], [0.0, 0.0, 0.0]),
    ({"A_log": 0.0}, [1e4, -1e4], [-torch.inf, 0.0]),
    ({}, [-torch.inf, -1e6, -1e3, 0.0], [-torch.inf, -torch.inf, -torch.inf, 0.0]),
]


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize(("gate", "raw", "total"), LIMITS)
def test_saturation_is_the_limit(impl: str, gate: dict[str, float], raw: list[float], total: list[float]) -> None:
    if impl == "cuda" and "lower_bound" not in gate:
        pytest.skip("cuda takes the bounded gate")
    decay = decay_after(impl, raw, **gate)
    expected = torch.tensor(total, dtype=torch.float64).exp()
    torch.testing.assert_close(decay, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("impl", implementations())
def test_saturated_beta(impl: str) -> None:
    """Logits of +-inf are weights of 1 and 0: bit for bit, unless an implementation has its own format for sigmoids."""
    args = arguments(fitted(Case(lengths=(70,), dtype="float32"), impl), device(impl))
    for value, weight in ((torch.inf, 1.0), (-torch.inf, 0.0), (1e4, 1.0)):
        logits = dict(args, beta=torch.full_like(args["beta"], value))
        weights = dict(args, beta=torch.full_like(args["beta"], weight), use_beta_sigmoid=False)
        if rounding_of(logits, impl) == rounding_of(weights, impl):
            torch.testing.assert_close(kda.fwd(**logits, impl=impl).o, kda.fwd(**weights, impl=impl).o, rtol=0, atol=0)
        else:
            d = judge_call(logits, impl, meant=weights)
            assert d.accepted, d


@pytest.mark.parametrize("impl", implementations(but="cuda"))
@pytest.mark.parametrize("reset", [-1e3, -1e6, -torch.inf])
def test_a_reset_leaves_small_decays_alone(impl: str, reset: float) -> None:
    """After a reset the same numbers as if the sequence had begun there with an empty state."""
    args = arguments(Case(lengths=(60,), dtype="float32", gate="given", decay="slow"), device(impl))
    args["g"] = args["g"].clone()
    args["g"][:, 20] = reset
    whole = kda.fwd(**args, impl=impl)
    rest = dict(args, initial_state=None, cu_seqlens=None)
    for name in ("q", "k", "v", "g", "beta"):
        rest[name] = args[name][:, 20:]
    alone = kda.fwd(**rest, impl=impl)
    torch.testing.assert_close(whole.o[:, 20:], alone.o, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(whole.final_state, alone.final_state, rtol=2e-5, atol=2e-6)


def budget_bound() -> float:
    """The strongest bound that bf16 Triton kernels still anchor by constants, from the budget's own formula."""
    bits_per_unit = exponent_margin(TOKENS, 0.0) - exponent_margin(TOKENS, -1.0)
    return -(exponent_margin(TOKENS, 0.0) - ANCHORED_MARGIN) / bits_per_unit


def test_budget_is_a_formula_with_two_sides() -> None:
    edge = budget_bound()
    assert -5.5 < edge < -5.0
    assert anchor(facts_of(Case(lower_bound=edge * 0.9999))) == round(TOKENS / 2 * -edge / math.log(2))
    assert anchor(facts_of(Case(lower_bound=0.0))) == 0
    assert anchor(facts_of(Case(lower_bound=edge * 1.0001))) is None
    assert anchor(facts_of(Case(gate="softplus"))) is None
    assert anchor(facts_of(Case(gate="given"))) is None
    assert anchor(facts_of(Case(dtype="float32"))) is None


@pytest.mark.parametrize("impl", kernels(but="cuda"))
@pytest.mark.parametrize("decay", ["strong", "usual", "resets", "none"])
@pytest.mark.parametrize("side", [0.9999, 1.0001, 0.5])
def test_both_sides_of_the_budget(impl: str, decay: str, side: float) -> None:
    case = Case(lengths=(65, 17), K=32, lower_bound=budget_bound() * side, decay=decay)
    check(case, impl)
    check(replace(case, keys="close", beta="full"), impl)
