"""The arguments of `kda.fwd`."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.environment import switched_on
from kda.numerics import CHUNK
from kda.problem import GateKind, Layout, Problem, computed_in
from kda.validate.inputs import Inputs, check_inputs
from kda.validate.layouts import in_order, offsets
from kda.validate.memory import require_buffers, same
from kda.validate.pool import (
    begun,
    names_of,
    no_collision,
    read_and_written,
    require_indices,
    require_pool,
    require_states,
    slots_within,
)
from kda.validate.require import looks_at_contents, require_dtype, require_shape, require_state_dtype


def _cu_seqlens(value: Tensor, q: Tensor) -> None:
    offsets(value)
    if q.shape[0] != 1:
        raise ValueError(
            f"q: expected batch 1 with cu_seqlens, got {q.shape[0]}; pack the sequences along T: "
            "x.flatten(0, 1).unsqueeze(0)"
        )


def state_contents(problem: Problem) -> None:
    """Where contents are looked at: whether indices' slots are there; and, on request, whether two writes meet."""
    pool, kept = problem.state_pool, problem.checkpoints
    if pool is not None:
        slots_within(
            pool.shape[0], "the pool's size", state_indices=problem.state_indices, write_indices=problem.write_indices
        )
    if kept is not None:
        slots_within(kept.shape[0], "the number in checkpoints", checkpoint_indices=problem.checkpoint_indices)
    if not switched_on("KDA_CHECK"):
        return
    N = problem.facts.N
    read, write = [0] * N, [-1] * N  # without a pool
    if pool is not None:
        read, write = read_and_written(N, problem.state_indices, problem.write_indices)
    due: list[list[int]] = [[] for _ in range(N)]
    if kept is not None and problem.checkpoint_indices is not None:
        slots = problem.checkpoint_indices.tolist()
        for n, (_, start, stop) in enumerate(problem.layout.spans()):
            due[n] = [] if read[n] < 0 else slots[n][: (stop - start) // problem.checkpoint_every]
    together = pool is not None and kept is not None and same(pool, kept)
    if pool is not None:
        written = [[to, *(due[n] if together else ())] for n, to in enumerate(write)]
        begin = begun(read, problem.fresh)
        names = names_of(
            state_indices=problem.state_indices,
            write_indices=problem.write_indices,
            checkpoint_indices=problem.checkpoint_indices if together else None,
        )
        no_collision(names, begin, written, names if problem.state_indices is None else "state_indices")
    if not together:
        no_collision("checkpoint_indices", [], due)


def _above_zero(g: Tensor, cu_seqlens: Tensor | None, state_indices: Tensor | None) -> float | None:
    """The largest of the given log decays above 0, if there is any. Padding may hold anything."""
    rows = [g[row, start:stop] for row, start, stop in Layout(g.shape[0], g.shape[1], cu_seqlens).spans()]
    if state_indices is not None:
        rows = [row for row, slot in zip(rows, state_indices.tolist(), strict=True) if slot >= 0]
    above = [row[row > 0] for row in rows]  # NaN is not
    return max((x.max().item() for x in above if x.numel()), default=None)


def contents(
    q: Tensor, g: Tensor, kind: GateKind, cu_seqlens: Tensor | None, state_indices: Tensor | None = None
) -> None:
    """What only the contents can tell: free on a CPU, a synchronisation elsewhere (done under KDA_CHECK=1 alone)."""
    if cu_seqlens is None and kind is not GateKind.GIVEN:
        return
    if not looks_at_contents(q):
        return
    if cu_seqlens is not None:
        in_order(cu_seqlens.tolist(), q.shape[1])
    if kind is not GateKind.GIVEN or not switched_on("KDA_CHECK"):
        return
    if (worst := _above_zero(g, cu_seqlens, state_indices)) is not None:
        raise ValueError(
            f"g: expected log decays <= 0 when neither lower_bound nor A_log is given, got {worst}; "
            "pass the activated gate, or A_log for the raw one"
        )


def _states(given: Inputs, N: int, checkpoint_every: int | None, output_final_state: bool) -> torch.dtype:
    """Checks where states come from and go to, and returns their dtype."""
    tensors, q = given.tensors, given.tensors["q"]
    pool, initial, final = (tensors.get(name) for name in ("state_pool", "initial_state", "final_state"))
    if pool is not None:
        for name, other in (("initial_state", initial), ("final_state", final)):
            if other is not None:
                raise ValueError(f"{name}: expected nothing beside state_pool, which takes its place, got a tensor")
        if output_final_state:
            raise ValueError(
                "output_final_state: expected False with state_pool, got True; final states are in their slots"
            )
        require_pool("state_pool", pool, N, given)
    else:
        for name in ("state_indices", "write_indices", "fresh"):
            if name in tensors:
                raise ValueError(f"{name}: expected state_pool beside it, got none; it is about the pool's slots")
    _checkpoints(given, N, checkpoint_every)
    for name, state in (("initial_state", initial), ("final_state", final)):
        if state is not None:
            require_shape(name, state, "[N, HV, V, K]", (N, given.HV, given.V, given.K), "V comes before K")
            require_state_dtype(name, state, q)
    if final is not None and initial is not None:
        require_dtype("initial_state", initial, final.dtype, "final_state's")
    there = next((x for x in (pool, final, initial) if x is not None), None)
    return computed_in(q.dtype) if there is None else there.dtype


def _checkpoints(given: Inputs, N: int, every: int | None) -> None:
    kept, indices = (given.tensors.get(name) for name in ("checkpoints", "checkpoint_indices"))
    if kept is None:
        for name, value in (("checkpoint_indices", indices), ("checkpoint_every", every)):
            if value is not None:
                raise ValueError(f"{name}: expected checkpoints beside it, got none; pass the slots that receive them")
        return
    require_states("checkpoints", kept, given)
    if indices is None or every is None:
        name, what = ("checkpoint_indices", "[N, M] slots") if indices is None else ("checkpoint_every", "tokens")
        raise ValueError(f"{name}: expected {what} beside checkpoints, got None")
    columns = indices.shape[-1] if indices.dim() else 0
    require_indices("checkpoint_indices", indices, "[N, M]", (N, columns))
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"checkpoint_every: expected an integer, got {type(every).__name__}")
    if every <= 0 or every % CHUNK:
        raise ValueError(f"checkpoint_every: expected a positive multiple of {CHUNK} tokens, got {every}")


#: Tensors that are written, and what each may be exactly on: to update states in place is a normal thing to do, as is
#: to keep checkpoints in the pool itself.
_WRITTEN = {
    "out": "",
    "final_state": "initial_state",
    "state_pool": "",
    "checkpoints": "state_pool",
}


def _writable(given: Inputs) -> None:
    for name in _WRITTEN:
        if given.graded and name in given.tensors:
            raise ValueError(
                f"{name}: expected no buffer while {', '.join(given.graded)} requires grad, got one; results written "
                "in place cannot be differentiated. Leave the buffer out, or call under torch.no_grad()"
            )
    require_buffers(given.tensors, _WRITTEN)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    batch_invariant: bool,
    state_pool: Tensor | None,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    fresh: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_indices: Tensor | None,
    checkpoint_every: int | None,
) -> Problem:
    """The arguments of `kda.fwd` as a `Problem`. Raises ValueError or TypeError before anything is written."""
    optional: dict[str, Tensor | None] = {
        "out": out,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "final_state": final_state,
        "cu_seqlens": cu_seqlens,
        "state_pool": state_pool,
        "state_indices": state_indices,
        "write_indices": write_indices,
        "fresh": fresh,
        "checkpoints": checkpoints,
        "checkpoint_indices": checkpoint_indices,
    }
    flags = {
        "output_final_state": output_final_state,
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "batch_invariant": batch_invariant,
    }
    given = check_inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, optional, flags, scale, lower_bound, "B")
    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, q)
    layout = Layout(given.B, given.T, cu_seqlens)
    N = layout.sequences
    state_dtype = _states(given, N, checkpoint_every, output_final_state)
    if out is not None:
        require_shape("out", out, "[B, T, HV, V]", (given.B, given.T, given.HV, given.V))
        require_dtype("out", out, q.dtype, "q's")
    _writable(given)
    contents(q, g, given.gate, cu_seqlens, state_indices)

    facts = given.facts(
        N=N,
        varlen=cu_seqlens is not None,
        state_dtype=state_dtype,
        initial_state=initial_state is not None,
        final_state=output_final_state or final_state is not None,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        batch_invariant=batch_invariant,
        pool=state_pool is not None,
        checkpoint_dtype=None if checkpoints is None else checkpoints.dtype,
    )
    problem = Problem(
        **given.fields(),
        out=out,
        initial_state=None if initial_state is None else given.plain("initial_state"),
        final_state=final_state,
        layout=layout,
        facts=facts,
        state_pool=state_pool,
        state_indices=state_indices,
        write_indices=write_indices,
        fresh=fresh,
        checkpoints=checkpoints,
        checkpoint_indices=checkpoint_indices,
        checkpoint_every=min(checkpoint_every or 0, 2**62),  # of what is never reached, a number that kernels can take
    )
    if (state_pool is not None or checkpoints is not None) and looks_at_contents(q):
        state_contents(problem)
    return problem
