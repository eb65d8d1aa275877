"""Which states a call begins from and where it leaves them, in plain PyTorch: tensors of its own, or slots of a pool.

Reads indices and offsets on the host: a synchronisation on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.problem import Output, Problem, Span, StepProblem


def slots(indices: Tensor | None, pool: Tensor) -> list[Any] | None:
    """The numbers of slots, negative where the pool has no such slot."""
    if indices is None:
        return None
    return torch.where(indices.to(torch.int64) < pool.shape[0], indices.to(torch.int64), -1).tolist()


class Rows(NamedTuple):
    """Of a call on a pool, for each of its N sequences."""

    read: list[int]  # slot it begins from; negative for padding
    write: list[int]  # slot for its final state; negative for none
    fresh: list[bool]  # whether it begins from zero


def rows(problem: Problem | StepProblem, pool: Tensor, N: int) -> Rows:
    read = slots(problem.state_indices, pool)
    read = list(range(N)) if read is None else read
    write = slots(problem.write_indices, pool)
    write = read if write is None else write
    fresh = [False] * N if problem.fresh is None else problem.fresh.tolist()
    return Rows(read, [-1 if at < 0 else to for at, to in zip(read, write, strict=True)], fresh)


def of_pool(rows: Rows, pool: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [N, HV, V, K] that the rows begin from, copied; zero for padding."""
    states = pool.new_zeros(len(rows.read), *pool.shape[1:], dtype=dtype)
    for n, (slot, fresh) in enumerate(zip(rows.read, rows.fresh, strict=True)):
        if slot >= 0 and not fresh:
            states[n] = pool[slot]
    return states


def initial(problem: Problem) -> Tensor:
    """The initial states with K first, [N, HV, K, V], in the dtype to compute in; zeros where none were given."""
    facts, dtype = problem.facts, problem.compute_dtype
    if problem.state_pool is not None:
        return of_pool(rows(problem, problem.state_pool, facts.N), problem.state_pool, dtype).mT
    if problem.initial_state is not None:
        return problem.initial_state.to(dtype).mT
    # V first in memory too, as given states are: where the numbers lie decides in which order torch sums.
    return problem.q.new_zeros(facts.N, facts.HV, facts.V, facts.K, dtype=dtype).mT


def spans(problem: Problem) -> list[Span]:
    """The sequences; those without a slot in the pool are empty."""
    every = problem.layout.spans()
    if problem.state_pool is None:
        return every
    read = rows(problem, problem.state_pool, len(every)).read
    return [Span(row, a, a if slot < 0 else b) for (row, a, b), slot in zip(every, read, strict=True)]


class Checkpoints:
    """Where the states on the way are kept."""

    def __init__(self, problem: Problem) -> None:
        self._into, self._every = problem.checkpoints, problem.checkpoint_every
        self._slots: list[list[int]] = []
        if self._into is not None:
            self._slots = slots(problem.checkpoint_indices, self._into) or []

    def keep(self, n: int, tokens: int, S: Tensor) -> None:
        """S [HV, K, V] of sequence n after so many tokens, if that is where a checkpoint is asked for."""
        if self._into is None or tokens % self._every:
            return
        column = tokens // self._every - 1
        if column < len(self._slots[n]) and (slot := self._slots[n][column]) >= 0:
            self._into[slot] = S.mT.to(self._into.dtype)


def output(problem: Problem, o: Tensor, final_state: Tensor) -> Output:
    """What the call returns, from o and final states [N, HV, V, K] of any dtype: rounded, and written where asked."""
    facts, pool = problem.facts, problem.state_pool
    o = o.to(facts.dtype)
    o = o if problem.out is None else problem.out.copy_(o)
    if pool is not None:
        for slot, state in zip(rows(problem, pool, facts.N).write, final_state, strict=True):
            if slot >= 0:
                pool[slot] = state.to(pool.dtype)
    if not facts.final_state:
        return Output(o, None)
    state = final_state.to(facts.state_dtype).contiguous()
    return Output(o, state if problem.final_state is None else problem.final_state.copy_(state))
