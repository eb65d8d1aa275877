"""The three gates, beta and the normalisation in plain PyTorch; this is also their specification."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.numerics import L2NORM_EPS, MAX_EXP
from kda.problem import Facts, GateKind, Problem, StepProblem


def log_decay(
    g: Tensor, kind: GateKind, lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None
) -> Tensor:
    """Natural log of the decay, one number <= 0 per token, head and key channel.

    g: [..., HV, K] in the dtype to compute in; A_log: [HV]; dt_bias: [HV, K]. Returns g's shape and dtype.

    bounded:  lower_bound * sigmoid(exp(A_log) * (g + dt_bias))      (the "safe gate" of FlashKDA)
    softplus: -exp(A_log) * softplus(g + dt_bias)                    (Kimi Linear, arXiv:2510.26692)
    given:    g
    """
    if kind is GateKind.GIVEN:
        return g
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype)
    rate = None
    if A_log is not None:
        # Clamped so that exp neither overflows nor vanishes: 0 * inf would be NaN where the gate has a limit.
        rate = A_log.to(g.dtype).clamp(-MAX_EXP, MAX_EXP).exp()[:, None]
    if kind is GateKind.SOFTPLUS:
        # logaddexp keeps its relative accuracy for very negative gates, which decide how long a channel remembers.
        g = torch.logaddexp(g, torch.zeros((), dtype=g.dtype, device=g.device))
        return -g if rate is None else -rate * g
    return (lower_bound or 0.0) * torch.sigmoid(g if rate is None else rate * g)


def problem_log_decay(problem: Problem | StepProblem, g: Tensor) -> Tensor:
    """`log_decay` of `g` ([..., HV, K], already in the dtype to compute in) with the problem's own gate."""
    facts = problem.facts
    return log_decay(g, facts.gate, facts.lower_bound, problem.A_log, problem.dt_bias)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def activate_beta(beta: Tensor, facts: Facts) -> Tensor:
    """Weight of the delta rule: sigmoid of the logit unless switched off, doubled with `allow_neg_eigval`."""
    if facts.use_beta_sigmoid:
        beta = torch.sigmoid(beta)
    return 2 * beta if facts.allow_neg_eigval else beta
