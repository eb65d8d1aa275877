"""`kda.fwd` and `kda.step` as opaque operators, `torch.ops.kda.*`, for graphs that torch.compile traces.

An operator may not return its inputs, so buffers are filled outside of it; pools and checkpoints are said to be
written.
Calls that are not traced go past it: an operator of its own costs 10 us of host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda.problem import computed_in

_LIBRARY = torch.library.Library("kda", "DEF")
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, Tensor? A_log, Tensor? dt_bias, "
    "float? lower_bound, Tensor? initial_state, Tensor? cu_seqlens, bool output_final_state, bool use_qk_l2norm, "
    "bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, str impl"
)
_LIBRARY.define(f"fwd({_INPUTS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"fwd_pool({_INPUTS}, Tensor(a!)? state_pool, Tensor? state_indices, Tensor? write_indices, Tensor? fresh, "
    "Tensor(b!)? checkpoints, Tensor? checkpoint_indices, int? checkpoint_every) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, float? scale, Tensor? A_log, "
    "Tensor? dt_bias, float? lower_bound, Tensor? state_indices, Tensor? write_indices, Tensor? token_indices, "
    "Tensor? fresh, bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval, str impl) -> Tensor"
)


def _named(operator: str, values: tuple[Any, ...]) -> dict[str, Any]:
    """The operator's arguments under their names, which are those of the call."""
    names = (argument.name for argument in getattr(torch.ops.kda, operator).default._schema.arguments)
    return dict(zip(names, values, strict=True))


def implement(fwd: Callable[..., tuple[Tensor, Tensor | None]], step: Callable[..., Tensor]) -> None:
    """Make `fwd` and `step`, with the arguments of `kda.fwd` and `kda.step`, what the operators run."""

    def runs(operator: str) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(*values: Any) -> tuple[Tensor, Tensor]:
            call = _named(operator, values)
            o, state = fwd(**call)
            return o, call["q"].new_empty(0) if state is None else state

        return run

    def run_step(*values: Any) -> Tensor:
        return step(**_named("step", values))

    for operator in ("fwd", "fwd_pool"):
        _LIBRARY.impl(operator, runs(operator), "CompositeExplicitAutograd")
    _LIBRARY.impl("step", run_step, "CompositeExplicitAutograd")


def _shapes(*values: Any) -> tuple[Tensor, Tensor]:
    """The results without their contents. What is wrong with a call is said when it runs."""
    call = _named("fwd_pool" if len(values) > _ARGUMENTS else "fwd", values)
    q, v, initial_state, cu_seqlens = (call[name] for name in ("q", "v", "initial_state", "cu_seqlens"))
    o = v.new_empty(v.shape)
    if not call["output_final_state"]:
        return o, q.new_empty(0)
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = computed_in(q.dtype) if initial_state is None else initial_state.dtype
    return o, v.new_empty(N, v.shape[2], v.shape[3], q.shape[3], dtype=dtype)


#: Of `fwd`; `fwd_pool` has more.
_ARGUMENTS = len(torch.ops.kda.fwd.default._schema.arguments)

for _operator in ("fwd", "fwd_pool"):
    torch.library.register_fake(f"kda::{_operator}", _shapes, lib=_LIBRARY)


@torch.library.register_fake("kda::step", lib=_LIBRARY)
def _step_shape(*values: Any) -> Tensor:
    v: Tensor = _named("step", values)["v"]
    return v.new_empty(v.shape)
