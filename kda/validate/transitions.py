"""The arguments of `kda.transition`, and of what it returns."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.validate.require import require_dtype, require_float, require_shape, require_tensor


def key(k: Tensor, cu_seqlens: object) -> None:
    """k, before it stands for q too in a call of `kda.fwd`, whose messages would be about q."""
    require_tensor("k", k)
    if k.dim() != 4:
        raise ValueError(f"k: expected shape [B, T, H, K], got {list(k.shape)}")
    if k.shape[-1] == 0:
        raise ValueError("k: expected at least one channel, got K = 0")
    require_float("k", k)
    if cu_seqlens is not None and k.shape[0] != 1:
        raise ValueError(
            f"k: expected batch 1 with cu_seqlens, got {k.shape[0]}; pack the sequences along T: "
            "x.flatten(0, 1).unsqueeze(0)"
        )


def _require_device(name: str, value: Tensor, expected: torch.device) -> None:
    if value.device != expected:
        raise ValueError(f"{name}: expected device {expected} (the transition's), got {value.device}; move it there")


def start(initial_state: Tensor, state: Tensor) -> None:
    """States that a transition, whose own is `state`, is applied to."""
    require_tensor("initial_state", initial_state)
    require_shape("initial_state", initial_state, "[N, HV, V, K]", tuple(state.shape), "V comes before K")
    require_float("initial_state", initial_state)
    _require_device("initial_state", initial_state, state.device)


def successor(later: object, earlier: tuple[Tensor, Tensor]) -> None:
    """The transition that follows `earlier`."""
    if type(later) is not type(earlier):
        raise TypeError(
            f"later: expected a Transition, got {type(later).__name__}; to apply it to a state call apply(state)"
        )
    for field, symbols, theirs, own in zip(
        *(("phi", "state"), ("[N, HV, K, K]", "[N, HV, V, K]"), later, earlier), strict=True
    ):
        name = f"later.{field}"
        require_shape(name, theirs, symbols, tuple(own.shape), "both are of the same sequences")
        require_dtype(name, theirs, own.dtype, "the earlier one's")
        _require_device(name, theirs, own.device)
