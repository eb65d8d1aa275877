"""The specification of KDA: one token at a time, as the formulas read. Runs anywhere, in up to fp64, differentiable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from kda.gate import activate_beta, problem_log_decay
from kda.numerics import L2NORM_EPS, Rounding
from kda.problem import Facts, Implementation, Output, Problem


class Inputs(NamedTuple):
    """A problem's inputs as the recurrence takes them, all per value head, in the dtype to compute in."""

    q: Tensor  # [B, T, HV, K] normalised and scaled
    k: Tensor  # [B, T, HV, K] normalised
    v: Tensor  # [B, T, HV, V]
    log_decay: Tensor  # [B, T, HV, K]
    beta: Tensor  # [B, T, HV]
    state: Tensor  # [N, HV, K, V] initial


class Step(NamedTuple):
    """One token of one sequence, after its update. `decayed` and `state` are [HV, K, V], the state before and after."""

    sequence: int
    row: int
    token: int
    decayed: Tensor
    residual: Tensor  # [HV, V] v_t - k_t^T decayed
    state: Tensor
    o: Tensor  # [HV, V]


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def prepare(problem: Problem) -> Inputs:
    """Activate and normalise: everything that concerns one token alone."""
    facts, dtype = problem.facts, problem.compute_dtype
    q, k = problem.q.to(dtype), problem.k.to(dtype)
    if facts.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(problem.group(), dim=2) for x in (q * problem.scale, k))
    if problem.initial_state is None:
        state = torch.zeros(facts.N, facts.HV, facts.K, facts.V, dtype=dtype, device=q.device)
    else:
        state = problem.initial_state.to(dtype).transpose(-1, -2)
    log_decay = problem_log_decay(problem, problem.g.to(dtype))
    return Inputs(q, k, problem.v.to(dtype), log_decay, activate_beta(problem.beta.to(dtype), facts), state)


def steps(problem: Problem, inputs: Inputs) -> Iterator[Step]:
    """The recurrence itself, token by token, sequence after sequence."""
    q, k, v, log_decay, beta, initial = inputs
    for n, (row, start, stop) in enumerate(problem.layout.spans()):
        S = initial[n]
        for t in range(start, stop):
            qt, kt, vt = q[row, t], k[row, t], v[row, t]  # [HV, K], [HV, K], [HV, V]
            decayed = log_decay[row, t].exp()[..., None] * S
            residual = vt - einsum("hk,hkv->hv", kt, decayed)
            S = decayed + einsum("h,hk,hv->hkv", beta[row, t], kt, residual)
            yield Step(n, row, t, decayed, residual, S, einsum("hk,hkv->hv", qt, S))


def fwd(problem: Problem) -> Output:
    """`kda.fwd` by the recurrence. Rows that belong to no sequence are zero; an empty sequence keeps its state."""
    inputs = prepare(problem)
    facts = problem.facts
    zero = inputs.v.new_zeros(facts.HV, facts.V)
    o = [[zero] * facts.T for _ in range(facts.B)]
    states = list(inputs.state)
    for step in steps(problem, inputs):
        o[step.row][step.token] = step.o
        states[step.sequence] = step.state
    stacked = torch.stack([x for row in o for x in row]) if facts.B * facts.T else inputs.v.new_zeros(0)
    final = torch.stack(states) if states else inputs.state
    return problem.output(stacked.reshape(problem.v.shape), final.transpose(-1, -2))


def _reasons(facts: Facts) -> list[str]:
    return []


def _rounding(facts: Facts) -> Rounding:
    dtype = torch.float64 if facts.dtype == torch.float64 else torch.float32
    return Rounding.uniform(dtype, output=facts.dtype, stored_state=facts.state_dtype, chunk=1)


IMPL = Implementation(
    name="recurrent",
    summary="the specification, one token at a time in PyTorch; any device, up to fp64, differentiable",
    reasons=_reasons,
    rounding=_rounding,
    fwd=fwd,
)
