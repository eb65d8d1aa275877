"""A pool of states: which of its slots are read and written. The arguments of `kda.step`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kda.environment import switched_on
from kda.problem import StepProblem
from kda.validate.inputs import Inputs, check_inputs
from kda.validate.memory import require_buffers
from kda.validate.require import (
    looks_at_contents,
    name_of,
    require_dtype,
    require_shape,
    require_state_dtype,
    require_tensor,
)

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def require_indices(name: str, value: Tensor, symbols: str, shape: tuple[int, ...]) -> None:
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected an integer dtype, got {name_of(value.dtype)}")
    require_shape(name, value, symbols, shape, "one slot of the pool for each, negative for none")


def require_states(name: str, pool: Tensor, given: Inputs) -> None:
    """Slots of states."""
    if pool.dim() != 4:
        raise ValueError(f"{name}: expected shape [slots, HV, V, K], got {list(pool.shape)}; V comes before K")
    shape = (pool.shape[0], given.HV, given.V, given.K)
    require_shape(name, pool, "[slots, HV, V, K]", shape, "V comes before K")
    require_state_dtype(name, pool, given.tensors["q"])


def require_pool(name: str, pool: Tensor, N: int, given: Inputs) -> None:
    """The pool, and what says which slots of it N sequences read and write."""
    require_states(name, pool, given)
    reads, fresh = given.tensors.get("state_indices"), given.tensors.get("fresh")
    if reads is None and pool.shape[0] < N:
        raise ValueError(
            f"{name}: expected a slot for each of N = {N} sequences, got {pool.shape[0]}; without state_indices "
            "sequence n has slot n"
        )
    for indices in ("state_indices", "write_indices"):
        if indices in given.tensors:
            require_indices(indices, given.tensors[indices], "[N]", (N,))
    if fresh is not None:
        require_dtype("fresh", fresh, torch.bool, "whether a sequence starts from zero")
        require_shape("fresh", fresh, "[N]", (N,))


def slots_within(slots: int, what: str, **indices: Tensor | None) -> None:
    for name, value in indices.items():
        if value is not None and value.numel() and int(value.max()) >= slots:
            raise ValueError(f"{name}: expected slots below {slots}, {what}, got {int(value.max())}")


def begun(read: list[int], fresh: Tensor | None) -> list[int]:
    """The slots that sequences begin from: none for those that are fresh."""
    if fresh is None:
        return read
    return [-1 if new else slot for slot, new in zip(read, fresh.tolist(), strict=True)]


def no_collision(names: str, reads: list[int], writes: Iterable[Iterable[int]], reader: str = "state_indices") -> None:
    """Of each sequence the slot that is read and those that are written; negative ones are none.

    names: of the arguments that say what is written; reader: of the one that says what is read.
    """
    owner: dict[int, int] = {}  # slot -> the sequence that writes it
    for n, written in enumerate(writes):
        for slot in written:
            if slot >= 0 and slot in owner:
                raise ValueError(
                    f"{names}: expected one write to a slot in a call, got slot {slot} for sequences "
                    f"{owner[slot]} and {n}; give each its own, or a negative index for no write"
                )
            if slot >= 0:
                owner[slot] = n
    for n, slot in enumerate(reads):
        if slot >= 0 and owner.get(slot, n) != n:
            raise ValueError(
                f"{reader}: expected slots that no other sequence writes, got slot {slot} for sequence {n}, which "
                f"sequence {owner[slot]} writes ({names}); sequences run in any order"
            )


def names_of(**indices: Tensor | None) -> str:
    """The names of those that are there; of what says where final states go, the one that does."""
    if indices.get("write_indices") is not None:
        indices["state_indices"] = None
    return ", ".join(name for name, value in indices.items() if value is not None)


def read_and_written(N: int, reads: Tensor | None, writes: Tensor | None) -> tuple[list[int], list[int]]:
    """The slots that N sequences read, and those that their final states are written to."""
    read = list(range(N)) if reads is None else reads.tolist()
    write = read if writes is None else writes.tolist()
    return read, [-1 if at < 0 else to for at, to in zip(read, write, strict=True)]


def pool_contents(
    N: int, slots: int, reads: Tensor | None, writes: Tensor | None, tokens: Tensor | None, fresh: Tensor | None
) -> None:
    """Where contents are looked at: whether indices are within the pool; and, on request, whether two writes meet."""
    slots_within(slots, "the pool's size", state_indices=reads, write_indices=writes, token_indices=tokens)
    if not switched_on("KDA_CHECK"):
        return
    read, write = read_and_written(N, reads, writes)
    after = [[]] * len(read) if tokens is None else tokens.tolist()
    written = [[] if at < 0 else [to, *each] for at, to, each in zip(read, write, after, strict=True)]
    names = names_of(state_indices=reads, write_indices=writes, token_indices=tokens)
    no_collision(names, begun(read, fresh), written, names if reads is None else "state_indices")


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    *,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    token_indices: Tensor | None,
    fresh: Tensor | None,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> StepProblem:
    """The arguments of `kda.step` as a `StepProblem`. Raises ValueError or TypeError before anything is written."""
    flags = {
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
    }
    require_tensor("state", state)
    optional: dict[str, Tensor | None] = {
        "state": state,
        "out": out,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "state_indices": state_indices,
        "write_indices": write_indices,
        "token_indices": token_indices,
        "fresh": fresh,
    }
    given = check_inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, optional, flags, scale, lower_bound, "N")
    N, T, HV, V = given.B, given.T, given.HV, given.V
    require_pool("state", state, N, given)
    if token_indices is not None:
        require_indices("token_indices", token_indices, "[N, T]", (N, T))
    if given.graded:
        raise ValueError(
            f"{given.graded[0]}: expected no gradient, but it requires grad; the state is updated in place, which "
            "cannot be differentiated. Call under torch.no_grad(), or use kda.fwd"
        )
    if out is not None:
        require_shape("out", out, "[N, T, HV, V]", (N, T, HV, V))
        require_dtype("out", out, q.dtype, "q's")
    require_buffers(given.tensors, {"out": "", "state": ""})
    if looks_at_contents(q):
        pool_contents(N, state.shape[0], state_indices, write_indices, token_indices, fresh)

    facts = given.facts(
        N=state.shape[0],
        varlen=False,
        state_dtype=state.dtype,
        initial_state=True,
        final_state=True,
        **flags,
        batch_invariant=True,
        operation="step",
    )
    return StepProblem(
        **given.fields(),
        state=state,
        out=out,
        state_indices=state_indices,
        write_indices=write_indices,
        token_indices=token_indices,
        fresh=fresh,
        facts=facts,
    )
