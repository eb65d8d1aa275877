"""A whole call as the calls of ranks, their results as a whole one, and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

import kda.distributed
from kda import Output
from kda.distributed import Piece
from kda.testing.cases import TOKENS, Case, arguments

Call = dict[str, Any]
R = TypeVar("R")

FP64 = {"dtype": "float64", "state_dtype": "float64"}

#: Name -> the whole batch, and the tokens of each rank. The number of ranks is that of the processes which run it.
CASES: dict[str, tuple[Case, tuple[int, ...]]] = {
    "one sequence on two": (Case(lengths=(100,), dtype="float32", K=12, V=20), (60, 40)),
    "nothing crosses": (Case(lengths=(50, 0, 0, 30), dtype="float32"), (50, 30)),
    "nothing on the first": (Case(lengths=(40, 0), dtype="float32"), (0, 40)),
    "nothing on the last": (Case(lengths=(40, 0), dtype="float32"), (40, 0)),
    "all empty on two": (Case(lengths=(0, 0)), (0, 0)),
    "padding on the last": (Case(lengths=(30, 20, 0), padding=14, dtype="float32"), (32, 32)),
    "bf16 states on two": (Case(lengths=(9, 70, 0, 30), state_dtype="bfloat16", H=2, group=2), (50, 59)),
    "one sequence on four": (Case(lengths=(200,), dtype="float32", K=12, V=20), (33, 64, 3, 100)),
    "an empty rank within": (Case(lengths=(120,), **FP64), (40, 0, 30, 50)),
    "ragged": (Case(lengths=(10, 150, 0, 0, 30, 5), H=2, group=2, **FP64), (60, 60, 45, 30)),
    "ends at the edges": (Case(lengths=(0, 40, 0, 0, 40, 0, 60, 0), dtype="float32"), (40, 40, 40, 20)),
    "tails are empty": (Case(lengths=(70, 20, 0), dtype="float32"), (30, 60, 0, 0)),
    "heads are empty": (Case(lengths=(0, 70, 20), dtype="float32"), (0, 0, 30, 60)),
    "softplus": (Case(lengths=(20, 100), gate="softplus", decay="mixed", dtype="float32", H=2), (30, 30, 30, 30)),
    "given, resets": (Case(lengths=(15, 90, 15), gate="given", decay="resets", dtype="float32"), (30, 30, 30, 30)),
    "slow channels": (Case(lengths=(160,), decay="slow", keys="close", beta="strong", dtype="float32"), (40,) * 4),
    "no decay, one key": (Case(lengths=(120,), decay="none", keys="repeated", beta="full", **FP64), (30,) * 4),
    "negative eigenvalues": (
        Case(lengths=(100, 20), decay="none", beta="full", allow_neg_eigval=True, dtype="float32"),
        (30, 40, 20, 30),
    ),
    "no initial state": (Case(lengths=(100, 20), initial_state=False, decay="slow", **FP64), (30, 40, 20, 30)),
    "weights and units given": (
        Case(lengths=(100, 20), use_qk_l2norm=False, use_beta_sigmoid=False, dtype="float32"),
        (30, 40, 20, 30),
    ),
    "bf16 on four": (Case(lengths=(9, 120, 0, 31), state_dtype="bfloat16"), (50, 40, 30, 40)),
    "padding over ranks": (Case(lengths=(40, 0), padding=60, dtype="float32"), (30, 30, 20, 20)),
}


def cases_of(ranks: int) -> dict[str, tuple[Case, tuple[int, ...]]]:
    """Those for so many ranks."""
    return {name: (case, sizes) for name, (case, sizes) in CASES.items() if len(sizes) == ranks}


def pieces_of(call: Call, sizes: tuple[int, ...], rank: int) -> list[Piece]:
    return kda.distributed.pieces(call["cu_seqlens"], sizes, rank)


def own_call(call: Call, sizes: tuple[int, ...], rank: int) -> Call:
    """The part of a whole packed call that is a rank's. Initial states that belong to others are NaN."""
    own = dict(call, split_sizes=sizes)
    for name in TOKENS:
        own[name] = call[name].split(sizes, dim=1)[rank]
    if call.get("initial_state") is not None:
        here = pieces_of(call, sizes, rank)
        states = call["initial_state"][[piece.sequence for piece in here]]
        states[[not piece.begins for piece in here]] = torch.nan
        own["initial_state"] = states
    return own


def whole(call: Call, sizes: tuple[int, ...], results: list[tuple[Tensor, Tensor]]) -> Output:
    """The outputs of all ranks in a row, and each sequence's state from the rank where it ends."""
    states: dict[int, Tensor] = {}
    for rank, (_, final) in enumerate(results):
        for piece, state in zip(pieces_of(call, sizes, rank), final, strict=True):
            if piece.ends:
                states[piece.sequence] = state
    N = call["cu_seqlens"].numel() - 1
    final = torch.stack([states[n] for n in range(N)]) if N else results[0][1]
    return Output(torch.cat([o for o, _ in results], 1), final)


def on_threads(ranks: int, function: Callable[[int], R], sees: Callable[[int, Tensor], None] | None = None) -> list[R]:
    """What `function` returns on each rank of a group whose ranks are threads.

    sees: called with a rank and the tensor that it sends to all.
    """
    place, barrier = threading.local(), threading.Barrier(ranks, timeout=60)
    sent: list[Any] = [None] * ranks

    def exchange(own: Any, take: Callable[[], None]) -> None:
        sent[place.rank] = own
        barrier.wait()
        take()
        barrier.wait()

    def all_gather(received: list[Tensor], x: Tensor, group: object = None) -> None:
        if sees is not None:
            sees(place.rank, x)
        exchange(x.clone(), lambda: [a.copy_(b) for a, b in zip(received, sent, strict=True)])  # type: ignore[arg-type]

    def all_gather_object(received: list[Any], x: object, group: object = None) -> None:
        exchange(x, lambda: received.__setitem__(slice(None), sent))

    def run(rank: int) -> R:
        place.rank = rank
        try:
            return function(rank)
        except BaseException:
            barrier.abort()  # so that the others do not wait
            raise

    with (
        patch.multiple(
            torch.distributed,
            is_initialized=lambda: True,
            get_rank=lambda group=None: place.rank,
            get_world_size=lambda group=None: ranks,
            all_gather=all_gather,
            all_gather_object=all_gather_object,
        ),
        ThreadPoolExecutor(ranks) as pool,
    ):
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


def parallel(call: Call, sizes: tuple[int, ...], **changes: Any) -> Output:
    """The whole call, on ranks that are threads."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        o, state = kda.distributed.fwd(**own_call(call, sizes, rank), **changes)
        assert state is not None
        return o, state

    return whole(call, sizes, on_threads(len(sizes), run))


def call_of(case: Case, **changes: Any) -> Call:
    """The whole call of a case, on the CPU."""
    return arguments(case) | changes
