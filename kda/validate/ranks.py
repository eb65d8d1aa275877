"""The arguments of `kda.distributed` that `kda.fwd` has not, and what the ranks of a group have to agree on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, distributed

from kda.validate.layouts import in_order, offsets
from kda.validate.require import require_tensor


def membership(group: Any) -> tuple[int, int]:
    """The rank of this process in the group, the default one if it is None, and the number of ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "group: expected an initialised process group, got none; call torch.distributed.init_process_group first"
        )
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group: expected a torch.distributed.ProcessGroup that this process is in, got {group!r}; for a device "
            "mesh pass mesh.get_group()"
        )
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("group: expected one that this process is in, got another; call on the group's ranks alone")
    return rank, ranks


def host_offsets(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The contents of cu_seqlens of the whole batch of so many tokens: they decide on the host who waits for whom."""
    offsets(cu_seqlens)
    if not cu_seqlens.is_cpu:
        raise ValueError(
            f"cu_seqlens: expected device cpu, got {cu_seqlens.device}; the host needs its contents, and to fetch them "
            "would wait for the device. Keep the lengths on the CPU too"
        )
    found: list[int] = cu_seqlens.tolist()
    in_order(found, tokens)
    return found


def bounds(split_sizes: Sequence[int]) -> list[int]:
    """The tokens before each rank, and in the end all, from the tokens of each."""
    if isinstance(split_sizes, Tensor) or not isinstance(split_sizes, Sequence):
        raise TypeError(
            f"split_sizes: expected a sequence of integers, got {type(split_sizes).__name__}; one for each rank, as "
            "torch.split takes them"
        )
    for size in split_sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"split_sizes: expected integers, got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"split_sizes: expected numbers of tokens, got {size}")
    return [0, *accumulate(split_sizes)]


def rank_of(rank: object, ranks: int) -> None:
    """The number of a rank, where it is an argument."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank: expected an integer, got {type(rank).__name__}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected one of the {ranks} that split_sizes has tokens of, from 0 on, got {rank}")


def own_tokens(q: Tensor, split_sizes: Sequence[int] | None, rank: int, ranks: int) -> list[int]:
    """`bounds` of the ranks, on one of which q is: by default as many tokens on every rank."""
    require_tensor("q", q)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape [1, T, H, K], got {list(q.shape)}")
    if q.shape[0] != 1:
        raise ValueError(
            f"q: expected batch 1, got {q.shape[0]}; the ranks hold slices of one packed row. Call once for each row, "
            "or pack the sequences along T"
        )
    T = q.shape[1]
    if split_sizes is None:
        return bounds([T] * ranks)
    found = bounds(split_sizes)
    if len(split_sizes) != ranks:
        raise ValueError(
            f"split_sizes: expected the tokens of each of the group's {ranks} ranks, got {len(split_sizes)} numbers"
        )
    if split_sizes[rank] != T:
        raise ValueError(
            f"q: expected the {split_sizes[rank]} tokens that split_sizes has for rank {rank}, got {T}; "
            "pass this rank's slice, x.split(split_sizes, dim=1)[rank]"
        )
    return found


def own_states(states: dict[str, Tensor | None], pieces: int, rank: int) -> None:
    """Initial and final states have a row for each piece of a sequence on this rank."""
    for name, value in states.items():
        if value is None:
            continue
        require_tensor(name, value)
        if value.dim() != 4 or value.shape[0] != pieces:
            raise ValueError(
                f"{name}: expected shape [{pieces}, HV, V, K], one state for each sequence with a part on rank {rank}, "
                f"got {list(value.shape)}; kda.distributed.pieces lists them"
            )


def no_gradient(names: Sequence[str]) -> None:
    if names:
        raise ValueError(
            f"{names[0]}: expected no gradient, but it requires grad; nothing flows back from one rank to another. "
            "Call under torch.no_grad()"
        )


def agreement(views: list[dict[str, Any]]) -> None:
    """What every rank was given, by rank, is the same."""
    for rank, view in enumerate(views):
        for name, value in view.items():
            if value != views[0][name]:
                raise ValueError(
                    f"{name}: expected the same on every rank, got {views[0][name]} on rank 0 and {value} on {rank}"
                )
