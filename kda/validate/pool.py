"""The arguments of `kda.step`: a pool of states, and which of its slots are read and written."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.environment import switched_on
from kda.problem import StepProblem
from kda.validate.inputs import check_inputs
from kda.validate.memory import extent, require_writable
from kda.validate.require import (
    name_of,
    require_dtype,
    require_no_capture,
    require_shape,
    require_state_dtype,
    require_tensor,
)

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _indices(name: str, value: Tensor, symbols: str, shape: tuple[int, ...]) -> None:
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected an integer dtype, got {name_of(value.dtype)}")
    require_shape(name, value, symbols, shape, "one slot of the pool for each, negative for none")


def pool_contents(q: Tensor, slots: int, reads: Tensor | None, writes: Tensor | None, tokens: Tensor | None) -> None:
    """What only the indices' contents can tell: on a CPU whether they are within the pool; collisions on request."""
    checking = switched_on("KDA_CHECK")
    if not checking and q.device.type != "cpu":
        return
    if checking:
        require_no_capture(q)
    N = q.shape[0]
    for name, indices in (("state_indices", reads), ("write_indices", writes), ("token_indices", tokens)):
        if indices is not None and indices.numel() and int(indices.max()) >= slots:
            raise ValueError(f"{name}: expected slots below {slots}, the pool's size, got {int(indices.max())}")
    if not checking:
        return
    read = list(range(N)) if reads is None else reads.tolist()
    write = read if writes is None else writes.tolist()
    owner: dict[int, int] = {}  # slot -> the row that writes it
    for n in range(N):
        if read[n] < 0:
            continue
        for slot in (write[n], *(() if tokens is None else tokens[n].tolist())):
            if slot >= 0 and slot in owner:
                raise ValueError(
                    f"write_indices, token_indices: expected one write to a slot in a call, got slot {slot} in rows "
                    f"{owner[slot]} and {n}; give each its own, or a negative index for no write"
                )
            if slot >= 0:
                owner[slot] = n
    for n, slot in enumerate(read):
        if slot >= 0 and owner.get(slot, n) != n:
            raise ValueError(
                f"state_indices: expected slots that no other row writes, got slot {slot} in row {n}, which row "
                f"{owner[slot]} writes; rows run in any order"
            )


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
    indices = {"state_indices": state_indices, "write_indices": write_indices, "token_indices": token_indices}
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
        **indices,
        "fresh": fresh,
    }
    given = check_inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, optional, flags, scale, lower_bound, "N")
    N, T, HV, K, V = given.B, given.T, given.HV, given.K, given.V

    if state.dim() != 4:
        raise ValueError(f"state: expected shape [slots, HV, V, K], got {list(state.shape)}; V comes before K")
    slots = state.shape[0]
    require_shape("state", state, "[slots, HV, V, K]", (slots, HV, V, K), "V comes before K")
    require_state_dtype("state", state, q)
    if state_indices is None and slots < N:
        raise ValueError(
            f"state: expected a slot for each of N = {N} rows, got {slots}; without state_indices row n has slot n"
        )
    for name, value in indices.items():
        if value is not None:
            by_token = name == "token_indices"
            _indices(name, value, "[N, T]" if by_token else "[N]", (N, T) if by_token else (N,))
    if fresh is not None:
        require_dtype("fresh", fresh, torch.bool, "whether a row starts from zero")
        require_shape("fresh", fresh, "[N]", (N,))
    if given.graded:
        raise ValueError(
            f"{given.graded[0]}: expected no gradient, but it requires grad; the state is updated in place, which "
            "cannot be differentiated. Call under torch.no_grad(), or use kda.fwd"
        )
    if out is not None:
        require_shape("out", out, "[N, T, HV, V]", (N, T, HV, V))
        require_dtype("out", out, q.dtype, "q's")
    extents = {name: extent(x) for name, x in given.tensors.items()}
    for name in ("state", "out"):
        if name in given.tensors:
            readers = {other: x for other, x in given.tensors.items() if other != name}
            require_writable(name, given.tensors[name], readers, extents)
    pool_contents(q, slots, state_indices, write_indices, token_indices)

    facts = given.facts(
        N=slots,
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
