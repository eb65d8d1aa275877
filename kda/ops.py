"""`kda.fwd` as one opaque operator, `torch.ops.kda.fwd`, for graphs that torch.compile traces.

An operator may not return its inputs, so buffers are filled outside of it. Calls that are not traced go past it: an
operator of its own costs 10 us of host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda.problem import computed_in

_LIBRARY = torch.library.Library("kda", "DEF")
_LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, Tensor? A_log, Tensor? dt_bias, "
    "float? lower_bound, Tensor? initial_state, Tensor? cu_seqlens, bool output_final_state, bool use_qk_l2norm, "
    "bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, str impl) -> (Tensor, Tensor)"
)


def _named(values: tuple[Any, ...]) -> dict[str, Any]:
    """The operator's arguments under their names, which are those of `kda.fwd`."""
    names = (argument.name for argument in torch.ops.kda.fwd.default._schema.arguments)
    return dict(zip(names, values, strict=True))


def implement(fwd: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Make `fwd`, with the arguments of `kda.fwd`, what the operator runs."""

    def run(*values: Any) -> tuple[Tensor, Tensor]:
        call = _named(values)
        o, state = fwd(**call)
        return o, call["q"].new_empty(0) if state is None else state

    _LIBRARY.impl("fwd", run, "CompositeExplicitAutograd")


@torch.library.register_fake("kda::fwd", lib=_LIBRARY)
def _shapes(*values: Any) -> tuple[Tensor, Tensor]:
    """The results without their contents. What is wrong with a call is said when it runs."""
    call = _named(values)
    q, v, initial_state, cu_seqlens = (call[name] for name in ("q", "v", "initial_state", "cu_seqlens"))
    o = v.new_empty(v.shape)
    if not call["output_final_state"]:
        return o, q.new_empty(0)
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = computed_in(q.dtype) if initial_state is None else initial_state.dtype
    return o, v.new_empty(N, v.shape[2], v.shape[3], q.shape[3], dtype=dtype)
