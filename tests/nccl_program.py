"""Run by test_distributed.py under torchrun: `kda.distributed.fwd` against one device that has the whole batch.

Over NCCL with a GPU for each rank, else over Gloo on the CPU. Prints a JSON object per rank and shape: sizes,
agreement, whether bits are those of `kda.fwd` on the slice where they should be, and on GPUs times in ms. By itself:

    torchrun --nproc-per-node 2 tests/nccl_program.py
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kda
import kda.distributed

GPU = torch.cuda.is_available()
#: Lengths of the batch, and heads.
SHAPES: list[tuple[tuple[int, ...], int]] = (
    [((32768,), 8), ((131072,), 8), ((131072,), 32), ((65536,), 96), ((20000, 0, 25536, 20000), 32)]
    if GPU
    else [((700,), 2), ((300, 0, 400), 2)]
)
CHANNELS = 128 if GPU else 16


def batch(lengths: tuple[int, ...], H: int, device: torch.device) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Tokens, gate and initial states, the same on every rank. Slow channels: what comes from other ranks matters."""
    T = sum(lengths)
    torch.manual_seed(T + H)
    tokens = [torch.randn(1, T, H, CHANNELS, device=device, dtype=torch.bfloat16) for _ in range(4)]
    tokens.append(torch.randn(1, T, H, device=device))
    bias = torch.empty(H, CHANNELS, device=device).uniform_(-9, 1)
    gate = {"A_log": torch.zeros(H, device=device), "dt_bias": bias, "lower_bound": -5.0}
    return tokens, gate, 0.1 * torch.randn(len(lengths), H, CHANNELS, CHANNELS, device=device)


def timed(call: Callable[[], object], rounds: int = 20) -> float:
    """Median ms of a call that all ranks make at once, each time that of the slowest."""
    found = []
    for _ in range(rounds + 3):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(found[3:], device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def compare(lengths: tuple[int, ...], H: int, odd: bool, device: torch.device) -> dict[str, Any]:
    """One shape; `odd`: slices of different sizes that end anywhere."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, gate, initial = batch(lengths, H, device)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    T = sum(lengths)
    inner = [T * r // ranks // 64 * 64 + (7 * r + 1) * odd for r in range(1, ranks)]
    sizes = [b - a for a, b in pairwise([0, *inner, T])]
    mine = [x.split(sizes, 1)[rank].contiguous() for x in tokens]
    pieces = kda.distributed.pieces(cu_seqlens, sizes, rank)
    states = initial[[piece.sequence for piece in pieces]].clone()
    states[[not piece.begins for piece in pieces]] = torch.nan
    offsets = torch.tensor([0, *(piece.stop for piece in pieces)], device=device)

    def parallel() -> kda.Output:
        more = {"cu_seqlens": cu_seqlens, "split_sizes": sizes, "output_final_state": True}
        return kda.distributed.fwd(*mine, **gate, initial_state=states, **more)

    def alone() -> kda.Output:
        return kda.fwd(*tokens, **gate, initial_state=initial, cu_seqlens=whole_offsets, output_final_state=True)

    def on_the_slice(begin: Tensor) -> kda.Output:
        return kda.fwd(*mine, **gate, initial_state=begin, cu_seqlens=offsets, output_final_state=True)

    whole_offsets = cu_seqlens.to(device)
    whole, first = alone(), parallel()
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # a warm call waits for nothing
    result = parallel()
    if GPU:
        torch.cuda.set_sync_debug_mode("default")
    expected = whole.o.split(sizes, 1)[rank]
    row: dict[str, Any] = {"rank": rank, "ranks": ranks, "lengths": lengths, "H": H, "sizes": sizes}
    row["repeats"] = torch.equal(first.o, result.o) and torch.equal(first.final_state, result.final_state)  # type: ignore
    row["o"] = relative(result.o, expected)
    ends = [i for i, piece in enumerate(pieces) if piece.ends]
    if ends:
        sequences = [pieces[i].sequence for i in ends]
        row["state"] = relative(result.final_state[ends], whole.final_state[sequences])  # type: ignore[index]
    if pieces[0].begins:
        plain = on_the_slice(states)
        row["bits"] = torch.equal(plain.o, result.o) and torch.equal(plain.final_state, result.final_state)  # type: ignore
    else:  # what it would be if nothing had come from the ranks before
        row["o_if_forgotten"] = relative(on_the_slice(states.nan_to_num(0.0)).o, expected)
    if GPU and not odd:
        row["ms_alone"], row["ms_parallel"] = timed(alone), timed(parallel)
        row["ms_slice"] = timed(lambda: kda.fwd(*mine, **gate))
        row["ms_transition"] = timed(lambda: kda.transition(*mine[1:], **gate))
    return row


def main() -> None:
    device = torch.device("cpu")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if GPU else "gloo")
    for lengths, H in SHAPES:
        for odd in (False, True):
            print(json.dumps(compare(lengths, H, odd, device)) + "\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
