"""`kda.fwd` as one opaque operator, `torch.ops.kda.fwd`, for graphs that torch.compile traces.

An operator may not return its inputs, so buffers are filled outside of it. Calls that are not traced go past it: an
operator of its own costs 10 us of host time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Keywords of `kda.fwd` in the operator's order.
FLAGS = (
    "output_final_state",
    "use_qk_l2norm",
    "use_beta_sigmoid",
    "allow_neg_eigval",
    "batch_invariant",
    "impl",
)

_LIBRARY = torch.library.Library("kda", "DEF")
_LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale, Tensor? A_log, Tensor? dt_bias, "
    "float? lower_bound, Tensor? initial_state, Tensor? cu_seqlens, bool output_final_state, bool use_qk_l2norm, "
    "bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, str impl) -> (Tensor, Tensor)"
)


def implement(fwd: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Make `fwd`, with the arguments of `kda.fwd`, what the operator runs."""

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        *flags: object,
    ) -> tuple[Tensor, Tensor]:
        gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        rest = dict(zip(FLAGS, flags, strict=True), initial_state=initial_state, cu_seqlens=cu_seqlens)
        o, state = fwd(q, k, v, g, beta, scale, **gate, **rest)
        return o, q.new_empty(0) if state is None else state

    _LIBRARY.impl("fwd", run, "CompositeExplicitAutograd")


@torch.library.register_fake("kda::fwd", lib=_LIBRARY)
def _shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    *flags: object,
) -> tuple[Tensor, Tensor]:
    """The results without their contents. What is wrong with a call is said when it runs."""
    o = v.new_empty(v.shape)
    if not output_final_state:
        return o, q.new_empty(0)
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if initial_state is not None:
        dtype = initial_state.dtype
    return o, v.new_empty(N, v.shape[2], v.shape[3], k.shape[3], dtype=dtype)
