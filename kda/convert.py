"""Conversions at the edges of the library that are easily written wrong. Plain PyTorch, differentiable.

States here are V-first, [N, HV, V, K]; other libraries also keep them K-first, [N, HV, K, V]. Sequences of different
lengths are packed along T with `cu_seqlens` here; elsewhere they are padded to [B, T] with a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda import validate


def transpose_state(state: Tensor) -> Tensor:
    """K-first [..., K, V] to V-first [..., V, K], what `kda.fwd` takes as `initial_state`, or back. Contiguous."""
    validate.matrix("state", state)
    return state.mT.contiguous()


def cu_seqlens(mask: Tensor) -> Tensor:
    """[B, T] bool, True where there is a token -> [B + 1] int32, cumulative numbers of tokens. No synchronisation."""
    validate.mask("mask", mask)
    counts = mask.sum(1, dtype=torch.int32)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def pack(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T, ...] -> [1, tokens, ...]: the tokens of every row in turn, wherever in the row they are.

    The number of tokens is the size of the result, so this waits for the GPU.
    """
    validate.mask("mask", mask, x)
    return x[mask][None]


def unpack(x: Tensor, mask: Tensor) -> Tensor:
    """[1, tokens, ...] -> [B, T, ...]: back to where `pack` took them from, zero elsewhere.

    Raises ValueError if there are not as many tokens as the mask has.
    """
    validate.mask("mask", mask)
    validate.packed("x", x, int(mask.sum()))
    out = x.new_zeros(*mask.shape, *x.shape[2:])
    out[mask] = x[0]
    return out


def padding_mask(cu_seqlens: Tensor, T: int) -> Tensor:
    """[N + 1] cumulative lengths -> [N, T] bool, True where there is a token, all on the left. No synchronisation.

    Tokens beyond T are cut off.
    """
    validate.offsets(cu_seqlens)
    return torch.arange(T, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]
