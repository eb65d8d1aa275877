"""Host side of the Triton forward: workspace, grids and launches. No synchronisation, no look at any contents."""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from kda.devices import current_stream, multiprocessors
from kda.problem import TENSORS, Apart, Facts, GateKind, Output, Problem, with_buffers
from kda.triton import math, split
from kda.triton.config import (
    ANCHORED_K,
    BLOCK,
    MERGE_TILE,
    MERGE_V,
    MERGE_WARPS,
    TOKENS,
    anchor,
    power_of_two,
    tiles,
)
from kda.triton.launch import Launch, aligned, launch
from kda.triton.merge import merge_kernel
from kda.triton.prepare import prepare_kernel
from kda.triton.recur import recur_kernel
from kda.triton.split import Split

#: The kernels' numbers of the gates.
GATES = {GateKind.BOUNDED: math.BOUNDED, GateKind.SOFTPLUS: math.SOFTPLUS, GateKind.GIVEN: math.GIVEN}


def _tile_reach(x: Tensor, rows: int) -> int:
    """Elements from the first to the last of one head's tile: [B, T, H, D] or, for beta, [B, T, H]."""
    channels = (x.shape[3] - 1) * abs(x.stride(3)) if x.dim() == 4 else 0
    return (rows - 1) * abs(x.stride(1)) + channels


def strides(x: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if x is None else x.stride()


class Workspace:
    """What the kernels leave for each other, in one piece of memory. Parts by name; those that a call has not are 0."""

    def __init__(self, parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._parts, self._offsets, self._size = parts, {}, 0
        for name, (shape, dtype) in parts.items():
            self._offsets[name] = self._size
            self._size += triton.cdiv(prod(shape) * dtype.itemsize, 256) * 256

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=device)

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        views = {}
        for name, (shape, dtype) in self._parts.items():
            at = self._offsets[name]
            views[name] = memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return views

    def addresses(self, memory: Tensor) -> dict[str, int]:
        """Of the same."""
        start = memory.data_ptr()
        return {name: start + at for name, at in self._offsets.items()}


def workspace(facts: Facts, blocks: int, KW: int, split: Split | None) -> Workspace:
    """3 K + C operands per token and value head, where the gate is not anchored sums of log decays, and states."""
    rows, HV = facts.B * facts.T, facts.HV
    bf16 = facts.dtype == torch.bfloat16
    work = torch.bfloat16 if bf16 else torch.float32
    parts = dict.fromkeys(("Kd", "Qd", "Ak"), ((HV, rows, KW), work))
    parts["Aq"] = (HV, rows, TOKENS), work
    parts["decay"] = (blocks + 1, BLOCK // TOKENS, HV, KW), torch.float32
    if anchor(facts) is None:
        parts["sums"] = (HV, rows, KW), torch.float32
    if not bf16:
        parts["rest"] = (HV, rows, KW), torch.float32
    if split is not None:
        parts["local"] = (split.places, HV, facts.V, facts.K), torch.float32
        parts["transition"] = (split.places, HV, facts.K, facts.K), torch.float32
    return Workspace(parts)


#: What each kernel takes of the workspace, in the order of its arguments.
OF_PREPARE = ("Kd", "Qd", "Ak", "Aq", "decay", "sums", "rest")
OF_RECUR = ("Kd", "Qd", "Ak", "Aq", "decay", "local", "transition")
OF_MERGE = ("local", "transition")

T = TypeVar("T")


def parts_of(space: dict[str, T], names: tuple[str, ...]) -> list[T]:
    """The parts of a workspace by name; in place of those that a call has not, any other."""
    return [space.get(name, space["decay"]) for name in names]


class Repeated(NamedTuple):
    """What is kept of a call for its like."""

    space: Workspace
    prepare: Launch | None  # where there are tokens
    cut: tuple[Launch, Launch] | None  # the local states and the merge, where the chain is cut
    recur: Launch


def fwd(problem: Problem) -> Output:
    """`kda.fwd` in two kernels, or four where the chain is cut."""
    facts = problem.facts
    q, k, v, g, beta = problem.q, problem.k, problem.v, problem.g, problem.beta
    B, T, HV, K, V, N = facts.B, facts.T, facts.HV, facts.K, facts.V, facts.N
    config = tiles(facts)
    bf16 = facts.dtype == torch.bfloat16
    anchored = anchor(facts)
    cu_seqlens = problem.layout.cu_seqlens
    blocks = T // BLOCK + N if facts.varlen else B * triton.cdiv(T, BLOCK)

    out, final = problem.buffers()
    initial = problem.initial_state
    if problem.state_pool is not None:
        initial = final = problem.state_pool
    kept = problem.checkpoints
    reads, writes, columns = problem.state_indices, problem.write_indices, problem.checkpoint_indices
    any_indices = next((x for x in (reads, writes, columns) if x is not None), q)
    if N * HV == 0:
        return Output(out.zero_(), final if facts.final_state else None)

    KW = triton.cdiv(K, 16) * 16  # rows of whole vectors, whatever K is
    KP = power_of_two(K)
    cut = split.plan(facts, multiprocessors(q.device))
    space = workspace(facts, blocks, KW, cut)
    parts = space.tensors(space.allocate(q.device))
    decay = parts["decay"]
    common = dict(
        K=K,
        KW=KW,
        C=TOKENS,
        BLOCK=BLOCK,
        VARLEN=facts.varlen,
        OPERAND=math.BF16 if bf16 else math.FP32,
        WIDE=any(_tile_reach(x, BLOCK) >= 2**31 for x in (q, k, v, g, beta, out)),
        INTERPRET=facts.triton_interpreter,
    )
    cu_stride = 0 if cu_seqlens is None else cu_seqlens.stride(0)
    on_device = torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
    with on_device:
        prepare = None
        if B * T:
            prepare = launch(
                prepare_kernel,
                blocks * HV,
                (
                    q,
                    k,
                    g,
                    beta,
                    decay if problem.A_log is None else problem.A_log,
                    decay if problem.dt_bias is None else problem.dt_bias,
                    cu_seqlens,
                    *parts_of(parts, OF_PREPARE),
                ),
                (
                    problem.scale,
                    0.0 if facts.lower_bound is None else facts.lower_bound,
                    float(anchored or 0),
                    2.0 if facts.allow_neg_eigval else 1.0,
                    *q.stride(),
                    *k.stride(),
                    *g.stride(),
                    *beta.stride(),
                    cu_stride,
                    N,
                    T,
                    B * T,
                    HV,
                    problem.group(),
                    int(problem.A_log is not None),
                    int(problem.dt_bias is not None),
                    int(facts.use_beta_sigmoid),
                    int(facts.use_qk_l2norm),
                ),
                dict(
                    common,
                    BK=config.block_k if anchored is None else min(KP, ANCHORED_K),
                    ANCHORED=anchored is not None,
                    LEVELS=TOKENS.bit_length() - 1,
                    GATE=GATES[facts.gate],
                    INVERSE=math.FP16 if bf16 else math.FP32,
                    TWO_TERMS=not bf16,
                ),
                num_warps=config.prepare_warps,
                num_stages=1,  # its loads follow stores of other threads: nothing may be loaded ahead
            )
        tensors = (
            *parts_of(parts, OF_RECUR),
            v,
            out,
            decay if initial is None else initial,
            decay if final is None else final,
            cu_seqlens,
            any_indices if reads is None else reads,
            any_indices if writes is None else writes,
            decay if problem.fresh is None else problem.fresh.view(torch.uint8),
            decay if kept is None else kept,
            any_indices if columns is None else columns,
        )
        numbers = (
            *v.stride(),
            *out.stride(),
            *strides(initial, 4),
            *strides(final, 4),
            *strides(kept, 4),
            cu_stride,
            *(strides(x, 1)[0] for x in (reads, writes, problem.fresh)),
            *strides(columns, 2),
            N,
            T,
            B * T,
            HV,
            0 if cut is None else cut.segment,
            *(int(x is not None) for x in (initial, final, reads, writes, problem.fresh)),
            N if problem.state_pool is None else problem.state_pool.shape[0],
            0 if kept is None else kept.shape[0],
            0 if columns is None else columns.shape[1],
            problem.checkpoint_every // TOKENS,
        )
        constants = dict(common, V=V, KP=KP, BV=config.block_v, SPLIT=cut is not None)
        options = dict(num_warps=config.recur_warps, num_stages=config.recur_stages)
        blocks_v, blocks_k = triton.cdiv(V, config.block_v), triton.cdiv(K, config.block_v)
        chains, first = N * HV, None
        if cut is not None:
            chains = cut.places * HV
            local = launch(
                recur_kernel,
                chains * (blocks_v + blocks_k),
                tensors,
                numbers,
                dict(constants, LOCAL=True, CHECKPOINTS=False),
                **options,
            )
            merge = launch(
                merge_kernel,
                N * HV * triton.cdiv(V, MERGE_V),
                (*parts_of(parts, OF_MERGE), cu_seqlens),
                (cu_stride, N, T, HV, cut.segment),
                dict(
                    K=K,
                    V=V,
                    BK=min(KP, MERGE_TILE // KP),
                    KP=KP,
                    BV=MERGE_V,
                    VARLEN=facts.varlen,
                    INTERPRET=facts.triton_interpreter,
                ),
                num_warps=MERGE_WARPS,
                num_stages=1,  # as above
            )
            first = None if local is None or merge is None else (local, merge)
        recur = launch(
            recur_kernel,
            chains * blocks_v,
            tensors,
            numbers,
            dict(constants, LOCAL=False, CHECKPOINTS=kept is not None),
            **options,
        )
    if recur is not None and (prepare is not None or not B * T) and (first is not None or cut is None):
        problem.memo.setdefault("triton", Repeated(space, prepare, first, recur))
    return Output(out, final if facts.final_state else None)


def again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor], apart: Apart) -> Output | None:
    """`fwd` of a repeated call: the same kernels by addresses; None where others are called for."""
    known: Repeated = memo["triton"]
    device = tensors[0].device
    stream = current_stream(device)
    if stream is None or not apart(tensors):
        return None
    tensors, result = with_buffers(facts, tensors)
    at = dict(zip(TENSORS, map(Tensor.data_ptr, tensors), strict=True))
    if not aligned([*at.values()]):
        return None
    work = known.space.allocate(device)
    parts = known.space.addresses(work)
    cu_seqlens, initial, final = at["cu_seqlens"], at["initial_state"], at["final_state"]
    if facts.pool:
        initial = final = at["state_pool"]
    if known.prepare is not None:
        gates = (at["A_log"], at["dt_bias"])
        inputs = (at["q"], at["k"], at["g"], at["beta"])
        known.prepare((*inputs, *gates, cu_seqlens, *parts_of(parts, OF_PREPARE)), stream)
    slots = (at[name] for name in ("state_indices", "write_indices", "fresh", "checkpoints", "checkpoint_indices"))
    of_recur = (*parts_of(parts, OF_RECUR), at["v"], at["out"], initial, final, cu_seqlens, *slots)
    if known.cut is not None:
        local, merge = known.cut
        local(of_recur, stream)
        merge((*parts_of(parts, OF_MERGE), cu_seqlens), stream)
    known.recur(of_recur, stream)
    return result
