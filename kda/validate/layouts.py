"""What `kda.convert` is given, and cumulative lengths on their own."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kda.validate.require import name_of, require_dtype, require_tensor


def matrix(name: str, value: Tensor) -> None:
    """A tensor of at least two dimensions."""
    require_tensor(name, value)
    if value.dim() < 2:
        raise ValueError(f"{name}: expected at least the dimensions K and V, got shape {list(value.shape)}")


def mask(name: str, value: Tensor, x: Tensor | None = None) -> None:
    """A padding mask, of `x` if that is given."""
    require_tensor(name, value)
    require_dtype(name, value, torch.bool, "True where there is a token")
    if value.dim() != 2:
        raise ValueError(f"{name}: expected shape [B, T], got {list(value.shape)}")
    if x is not None:
        require_tensor("x", x)
        if x.shape[:2] != value.shape:
            raise ValueError(f"x: expected shape [B, T, ...] = {[*value.shape, '...']}, got {list(x.shape)}")


def packed(name: str, value: Tensor, tokens: int) -> None:
    """Packed sequences of so many tokens in all."""
    require_tensor(name, value)
    if value.dim() < 2 or value.shape[:2] != (1, tokens):
        raise ValueError(
            f"{name}: expected shape [1, tokens, ...] = [1, {tokens}, ...], got {list(value.shape)}; "
            "the mask has so many tokens"
        )


def offsets(value: Tensor) -> None:
    """cu_seqlens on their own."""
    require_tensor("cu_seqlens", value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected dtype int32 or int64, got {name_of(value.dtype)}")
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(
            f"cu_seqlens: expected shape [N + 1], got {list(value.shape)}; it starts with 0 and ends each sequence"
        )


def in_order(found: list[int], tokens: int) -> None:
    """What cu_seqlens holds, for so many tokens."""
    if found[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start with 0, got {found[0]}; prepend a 0")
    for n, (start, stop) in enumerate(pairwise(found)):
        if stop < start:
            raise ValueError(
                f"cu_seqlens: expected not to decrease, got {start} then {stop} at index {n + 1}; "
                "it holds cumulative offsets, not lengths"
            )
    if found[-1] > tokens:
        raise ValueError(f"cu_seqlens: expected to end at most at T = {tokens}, got {found[-1]}")
