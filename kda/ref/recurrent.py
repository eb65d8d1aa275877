"""The specification of KDA: one token at a time, as the formulas read. Runs anywhere, in up to fp64, differentiable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, einsum

from kda.gate import activate_beta, l2norm, problem_log_decay
from kda.numerics import Rounding
from kda.problem import Facts, Implementation, Output, Problem, StepProblem, computed_in
from kda.ref import states


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


def update(
    problem: Problem | StepProblem,
    at: tuple[int, int, int],
    token: Sequence[Tensor],
    S: Tensor,
) -> Step:
    """One token: q, k [H, K], v [HV, V], g [HV, K] and beta [HV], in the dtype to compute in, and S [HV, K, V].

    at: its sequence, row and place.
    """
    q, k, v, g, beta = token
    facts = problem.facts
    group = facts.HV // max(facts.H, 1)
    if facts.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (problem.scale * q).repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    a, b = problem_log_decay(problem, g), activate_beta(beta, facts)

    decayed = a.exp()[..., None] * S
    residual = v - einsum("hk,hkv->hv", k, decayed)
    S = decayed + einsum("hk,hv->hkv", b[:, None] * k, residual)
    o = einsum("hk,hkv->hv", q, S)
    return Step(*at, q, k, v, a, b, decayed, S, o)


def steps(problem: Problem) -> Iterator[Step]:
    """The recurrence itself, sequence after sequence and token by token.

    Each token is activated and normalised by itself: what a vectorised function returns for an element may depend, in
    the last bit, on how many others are computed with it, and a token's output must not depend on later tokens.
    """
    dtype = problem.compute_dtype
    q, k, v, g, beta = (x.to(dtype) for x in (problem.q, problem.k, problem.v, problem.g, problem.beta))
    initial = states.initial(problem)
    for n, (row, start, stop) in enumerate(states.spans(problem)):
        S = initial[n]
        for t in range(start, stop):
            token = update(problem, (n, row, t), [x[row, t] for x in (q, k, v, g, beta)], S)
            S = token.state
            yield token


def step(problem: StepProblem) -> Tensor:
    """`kda.step` by the same recurrence, row after row. Reads the indices (a synchronisation on a GPU)."""
    facts, pool = problem.facts, problem.state
    dtype = computed_in(facts.dtype)
    q, k, v, g, beta = (x.to(dtype) for x in (problem.q, problem.k, problem.v, problem.g, problem.beta))
    rows = states.rows(problem, pool, facts.B)
    tokens = states.slots(problem.token_indices, pool)
    o = torch.zeros(problem.v.shape, dtype=dtype, device=problem.q.device)
    for n, S in enumerate(states.of_pool(rows, pool, dtype).mT):  # all rows read the pool as it was
        if rows.read[n] < 0:
            continue
        for t in range(facts.T):
            token = update(problem, (n, n, t), [x[n, t] for x in (q, k, v, g, beta)], S)
            S, o[n, t] = token.state, token.o
            if tokens is not None and tokens[n][t] >= 0:
                pool[tokens[n][t]] = S.mT.to(pool.dtype)
        if rows.write[n] >= 0:
            pool[rows.write[n]] = S.mT.to(pool.dtype)
    return o.to(facts.dtype) if problem.out is None else problem.out.copy_(o)


def fwd(problem: Problem) -> Output:
    """`kda.fwd` by the recurrence. Rows that belong to no sequence are zero; an empty sequence keeps its state."""
    facts = problem.facts
    initial = states.initial(problem)
    checkpoints = states.Checkpoints(problem)
    zero = initial.new_zeros(facts.HV, facts.V)
    o = [[zero] * facts.T for _ in range(facts.B)]
    final, tokens = list(initial), [0] * facts.N
    for step in steps(problem):
        n = step.sequence
        o[step.row][step.token] = step.o
        final[n] = step.state
        tokens[n] += 1
        checkpoints.keep(n, tokens[n], step.state)
    stacked = torch.stack([x for row in o for x in row]) if facts.B * facts.T else initial.new_zeros(0)
    return states.output(problem, stacked.reshape(problem.v.shape), (torch.stack(final) if final else initial).mT)


def _reasons(facts: Facts) -> list[str]:
    return []


def _rounding(facts: Facts) -> Rounding:
    dtype = computed_in(facts.dtype)
    return Rounding.uniform(dtype, output=facts.dtype, stored_state=facts.state_dtype, chunk=1)


IMPL = Implementation(
    name="recurrent",
    summary="the specification, one token at a time in PyTorch, decode too; any device, up to fp64, differentiable",
    reasons=_reasons,
    rounding=_rounding,
    fwd=fwd,
    step=step,
)
