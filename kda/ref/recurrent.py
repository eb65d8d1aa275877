"""The specification of KDA: one token at a time, as the formulas read. Runs anywhere, in up to fp64, differentiable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from kda.gate import activate_beta, l2norm, problem_log_decay
from kda.numerics import Rounding
from kda.problem import Facts, Implementation, Output, Problem, computed_in


class Step(NamedTuple):
    """One token of one sequence, after its update, per value head."""

    sequence: int
    row: int
    token: int
    q: Tensor  # [HV, K] normalised and scaled
    k: Tensor  # [HV, K] normalised
    v: Tensor  # [HV, V]
    log_decay: Tensor  # [HV, K]
    beta: Tensor  # [HV]
    decayed: Tensor  # [HV, K, V] the state before the update
    state: Tensor  # [HV, K, V] and after
    o: Tensor  # [HV, V]


def steps(problem: Problem) -> Iterator[Step]:
    """The recurrence itself, sequence after sequence and token by token.

    Each token is activated and normalised by itself: what a vectorised function returns for an element may depend, in
    the last bit, on how many others are computed with it, and a token's output must not depend on later tokens.
    """
    facts, dtype, group = problem.facts, problem.compute_dtype, problem.group()
    q, k, v, g, beta = (x.to(dtype) for x in (problem.q, problem.k, problem.v, problem.g, problem.beta))
    initial = problem.initial()
    for n, (row, start, stop) in enumerate(problem.layout.spans()):
        S = initial[n]
        for t in range(start, stop):
            qt, kt, vt = q[row, t], k[row, t], v[row, t]  # [H, K], [H, K], [HV, V]
            if facts.use_qk_l2norm:
                qt, kt = l2norm(qt), l2norm(kt)
            qt, kt = (problem.scale * qt).repeat_interleave(group, 0), kt.repeat_interleave(group, 0)
            at, bt = problem_log_decay(problem, g[row, t]), activate_beta(beta[row, t], facts)

            decayed = at.exp()[..., None] * S
            residual = vt - einsum("hk,hkv->hv", kt, decayed)
            S = decayed + einsum("hk,hv->hkv", bt[:, None] * kt, residual)
            o = einsum("hk,hkv->hv", qt, S)
            yield Step(n, row, t, qt, kt, vt, at, bt, decayed, S, o)


def fwd(problem: Problem) -> Output:
    """`kda.fwd` by the recurrence. Rows that belong to no sequence are zero; an empty sequence keeps its state."""
    facts = problem.facts
    initial = problem.initial()
    zero = initial.new_zeros(facts.HV, facts.V)
    o = [[zero] * facts.T for _ in range(facts.B)]
    states = list(initial)
    for step in steps(problem):
        o[step.row][step.token] = step.o
        states[step.sequence] = step.state
    stacked = torch.stack([x for row in o for x in row]) if facts.B * facts.T else initial.new_zeros(0)
    final = torch.stack(states) if states else initial
    return problem.output(stacked.reshape(problem.v.shape), final.transpose(-1, -2))


def _reasons(facts: Facts) -> list[str]:
    return []


def _rounding(facts: Facts) -> Rounding:
    dtype = computed_in(facts.dtype)
    return Rounding.uniform(dtype, output=facts.dtype, stored_state=facts.state_dtype, chunk=1)


IMPL = Implementation(
    name="recurrent",
    summary="the specification, one token at a time in PyTorch; any device, up to fp64, differentiable",
    reasons=_reasons,
    rounding=_rounding,
    fwd=fwd,
)
