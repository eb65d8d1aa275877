"""Judge gradients: those of `chunked`, by autograd, against those of `recurrent`, both in fp64.

How far rounding may move a gradient is measured: the reference's own gradient is taken again with everything that the
recurrence reads (unit q and k, v, log decays, weights, initial states) moved by a small relative step, at random, and
by the same at every token because equal inputs round alike. Scaled down to the unit roundoff of fp64 this is what one
rounding of every input does. A chunk sums up to `CHUNK` such terms in an order of its own, so it counts that often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from kda import api, gate
from kda.numerics import CHUNK, L2NORM_EPS, unit_roundoff
from kda.ref.error import SIGMAS
from kda.testing.cases import TOKENS, Case, Printed, arguments, in_fp64
from kda.testing.judge import Finding, reproducer

Call = dict[str, Any]
Gradients = dict[str, Tensor]

#: Relative size of the step. Far above rounding, far below where the gradient's own curvature shows.
STEP = 2.0**-30


@dataclass(frozen=True, repr=False)
class GradientCase(Printed):
    """Gradients of one random linear functional of o and final_state. Its repr is the reproducer.

    case: the call, taken in fp64 whatever its dtype says.
    seed: of the functional.
    """

    case: Case
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.case) is not Case or type(self.seed) is not int:
            raise ValueError(f"expected a Case and an integer, got {self.case!r}, {self.seed!r}")


def call_of(case: GradientCase) -> Call:
    """The call in fp64, all float inputs leaves that require grad. Rows of padding hold 0."""
    call = in_fp64(arguments(case.case))
    for name, x in call.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            call[name] = torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf).requires_grad_()
    return call


def leaves(call: Call) -> dict[str, Tensor]:
    """The inputs that have gradients."""
    return {name: x for name, x in call.items() if isinstance(x, Tensor) and x.requires_grad}


def _gradients(case: GradientCase, call: Call, impl: str, of: dict[str, Tensor]) -> tuple[Gradients, bool]:
    """Gradients of the case's functional of the call's result, and whether all of the result is finite."""
    results = [x for x in api.fwd(**call, impl=impl) if x is not None]
    noise = Generator().manual_seed(case.seed)
    loss = torch.zeros((), dtype=torch.float64)
    for x in results:
        loss = loss + (x * torch.randn(x.shape, generator=noise, dtype=x.dtype)).sum()
    found: tuple[Tensor | None, ...] = (None,) * len(of)
    if loss.requires_grad:  # not where there is neither a token nor a state
        found = torch.autograd.grad(loss, list(of.values()), allow_unused=True)
    given = {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(of.items(), found, strict=True)}
    return given, all(bool(x.isfinite().all()) for x in results)


def _moved(case: GradientCase, call: Call, noise: Generator, together: bool) -> tuple[Gradients, Gradients]:
    """The reference's gradients with all that the recurrence reads moved, and those of unit q and k.

    together: by the same at every token.
    """
    problem, _ = api.gather(**call)
    read = {"q": problem.q, "k": problem.k, "v": problem.v, "g": gate.problem_log_decay(problem, problem.g)}
    read["beta"] = gate.activate_beta(problem.beta, problem.facts)
    if problem.facts.use_qk_l2norm:
        read |= {name: gate.l2norm(read[name]) for name in ("q", "k")}
    units = {name: read[name] for name in ("q", "k")}
    if problem.initial_state is not None:
        read["initial_state"] = problem.initial_state
    for name, x in read.items():
        shape = (1, 1, *x.shape[2:]) if together and name in TOKENS else x.shape
        read[name] = x * (1 + STEP * torch.randn(shape, generator=noise, dtype=x.dtype))
    plain = {"use_qk_l2norm": False, "use_beta_sigmoid": False, "output_final_state": True, "scale": problem.scale}
    tagged = {f"unit {name}": x for name, x in units.items()}
    moved = {**read, **plain, "cu_seqlens": call.get("cu_seqlens")}
    found, _ = _gradients(case, moved, "recurrent", {**leaves(call), **tagged})
    return found, {name: found.pop(f"unit {name}") for name in units}


def _size(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _cancelled(case: GradientCase, call: Call, units: Gradients) -> dict[str, float]:
    """The size of terms that cancel in a gradient, while their rounding does not. units: gradients of unit q and k.

    Of q and k, what lies along the vector that is normalised. Of what the gate is made from: a chunk scales q and k by
    sums of log decays, so the gradient of one log decay is a difference of sums of their products with their gradients.
    """
    sizes = {}
    problem, _ = api.gather(**call)
    unit = {name: call[name].detach() for name in units}
    if case.case.use_qk_l2norm:
        for name, x in unit.items():
            norm = (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt()
            unit[name], sizes[name] = x / norm, _size(units[name] / norm)
    products = sum(_size(x * units[name]) for name, x in unit.items())
    of = {name: call[name] for name in ("g", "A_log", "dt_bias") if call.get(name) is not None}
    a = gate.problem_log_decay(problem, problem.g)
    found = torch.autograd.grad(a, list(of.values()), torch.full_like(a, products), allow_unused=True)
    return sizes | {name: 0.0 if x is None else _size(x) for name, x in zip(of, found, strict=True)}


def judge(case: GradientCase) -> tuple[float, str]:
    """The worst error in standard deviations, and what is wrong: an empty text if nothing is."""
    call = call_of(case)
    exact, finite = _gradients(case, call, "recurrent", leaves(call))
    actual, _ = _gradients(case, call, "chunked", leaves(call))
    if not finite:
        return 0.0, ""
    both = (("recurrent", exact), ("chunked", actual))
    lost = [f"{impl}'s gradient of {name}" for impl, all_ in both for name, x in all_.items() if not x.isfinite().all()]
    if lost:
        return 0.0, f"not finite, though the result is: {', '.join(lost)}"
    noise = Generator().manual_seed(case.seed)
    others = [_moved(case, call, noise, together) for together in (False, True)]
    cancelled = _cancelled(case, call, others[0][1])
    worst, wrong = 0.0, []
    for name, x in exact.items():
        moved = max(_size(other[name] - x) for other, _ in others) / STEP
        sigma = CHUNK * unit_roundoff(torch.float64) * (moved + _size(x) + cancelled.get(name, 0.0))
        error = _size(actual[name] - x)
        ratio = error / sigma if error else 0.0
        worst = max(worst, ratio)
        if not ratio <= SIGMAS:
            wrong.append(f"the gradient of {name} is {ratio:.3g} standard deviations off (accepted: {SIGMAS:g})")
    return worst, "; ".join(wrong)


def check(case: GradientCase, impl: str = "") -> float:
    """The worst error in standard deviations. Raises `Finding` with the reproducer when anything is wrong."""
    worst, wrong = judge(case)
    if wrong:
        raise Finding(reproducer(case, impl, f"gradient: {wrong}"))
    return worst
