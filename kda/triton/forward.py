"""Host side of the Triton forward: workspace, grids and launches. No synchronisation, no look at any contents."""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kda.problem import TENSORS, Apart, Facts, GateKind, Output, Problem, with_buffers
from kda.streams import current_stream
from kda.triton import math
from kda.triton.config import anchored_rows, power_of_two, tiles
from kda.triton.launch import Launch, aligned, launch
from kda.triton.prepare import prepare_kernel
from kda.triton.recur import recur_kernel

#: The kernels' numbers of the gates.
GATES = {GateKind.BOUNDED: math.BOUNDED, GateKind.SOFTPLUS: math.SOFTPLUS, GateKind.GIVEN: math.GIVEN}


def _tile_reach(x: Tensor, rows: int) -> int:
    """Elements from the first to the last of one head's tile: [B, T, H, D] or, for beta, [B, T, H]."""
    channels = (x.shape[3] - 1) * abs(x.stride(3)) if x.dim() == 4 else 0
    return (rows - 1) * abs(x.stride(1)) + channels


def strides(x: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if x is None else x.stride()


class Workspace:
    """What `prepare` leaves for `recur`, in one piece of memory."""

    def __init__(self, facts: Facts, slots: int, KW: int, C: int) -> None:
        tokens, HV = facts.B * facts.T, facts.HV
        bf16 = facts.dtype == torch.bfloat16
        work = torch.bfloat16 if bf16 else torch.float32
        row, square, sums = (HV, tokens, KW), (HV, tokens, C), torch.float32
        self._parts: list[tuple[tuple[int, ...], torch.dtype]] = [
            *[(row, work)] * 3,
            (square, work),
            ((slots, HV, KW), sums),
            *[(row, sums)] * (1 if bf16 else 2),
        ]
        self._offsets, self._size = [], 0
        for shape, dtype in self._parts:
            self._offsets.append(self._size)
            size = prod(shape) * dtype.itemsize
            self._size += triton.cdiv(size, 256) * 256
        if bf16:  # sums have one term
            self._parts.append(self._parts[-1])
            self._offsets.append(self._offsets[-1])

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=device)

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """Kd, Qd, Ak [HV, B * T, KW], Aq [HV, B * T, C], decay [slots, HV, KW], and two terms of sums like Kd."""
        views = []
        for (shape, dtype), at in zip(self._parts, self._offsets, strict=True):
            views.append(memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        return views

    def addresses(self, memory: Tensor) -> list[int]:
        """Of the same."""
        start = memory.data_ptr()
        return [start + at for at in self._offsets]


class Repeated(NamedTuple):
    """What is kept of a call for its like."""

    space: Workspace
    prepare: Launch | None  # where there are tokens
    recur: Launch


def fwd(problem: Problem) -> Output:
    """`kda.fwd` in two kernels. The workspace is 3 K + 64 operands per token and value head."""
    facts = problem.facts
    q, k, v, g, beta = problem.q, problem.k, problem.v, problem.g, problem.beta
    B, T, HV, K, V, N = facts.B, facts.T, facts.HV, facts.K, facts.V, facts.N
    config = tiles(facts)
    C = config.chunk
    bf16 = facts.dtype == torch.bfloat16
    operand = math.BF16 if bf16 else math.FP32
    inverse = math.FP16 if bf16 else math.FP32
    anchored = anchored_rows(facts)
    cu_seqlens = problem.layout.cu_seqlens
    slots = T // C + N if facts.varlen else B * triton.cdiv(T, C)

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
    space = Workspace(facts, slots, KW, C)
    Kd, Qd, Ak, Aq, decay, sums, rest = space.tensors(space.allocate(q.device))
    wide = any(_tile_reach(x, C) >= 2**31 for x in (q, k, v, g, beta, out))
    common = dict(
        K=K,
        KW=KW,
        C=C,
        VARLEN=facts.varlen,
        OPERAND=operand,
        WIDE=wide,
        INTERPRET=facts.triton_interpreter,
    )
    cu_stride = 0 if cu_seqlens is None else cu_seqlens.stride(0)
    on_device = torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
    with on_device:
        prepare = None
        if B * T:
            prepare = launch(
                prepare_kernel,
                slots * HV,
                (
                    q,
                    k,
                    g,
                    beta,
                    decay if problem.A_log is None else problem.A_log,
                    decay if problem.dt_bias is None else problem.dt_bias,
                    cu_seqlens,
                    Kd,
                    Qd,
                    Ak,
                    Aq,
                    decay,
                    sums,
                    rest,
                ),
                (
                    problem.scale,
                    0.0 if facts.lower_bound is None else facts.lower_bound,
                    -0.5 * anchored * (facts.lower_bound or 0.0),
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
                    BK=config.block_k,
                    ANCHORED=anchored,
                    FIRST_LEVEL=max(anchored.bit_length() - 1, 0),
                    LEVELS=C.bit_length() - 1,
                    GATE=GATES[facts.gate],
                    INVERSE=inverse,
                    TWO_TERMS=not bf16,
                ),
                num_warps=config.prepare_warps,
                num_stages=1,  # its loads follow stores of other threads: nothing may be loaded ahead
            )
        recur = launch(
            recur_kernel,
            N * HV * triton.cdiv(V, config.block_v),
            (
                Kd,
                Qd,
                Ak,
                Aq,
                decay,
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
            ),
            (
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
                *(int(x is not None) for x in (initial, final, reads, writes, problem.fresh)),
                N if problem.state_pool is None else problem.state_pool.shape[0],
                0 if kept is None else kept.shape[0],
                0 if columns is None else columns.shape[1],
                problem.checkpoint_every // C,
            ),
            dict(common, V=V, KP=power_of_two(K), BV=config.block_v, CHECKPOINTS=kept is not None),
            num_warps=config.recur_warps,
            num_stages=config.recur_stages,
        )
    if recur is not None and (prepare is not None or not B * T):
        problem.memo.setdefault("triton", Repeated(space, prepare, recur))
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
    Kd, Qd, Ak, Aq, decay, sums, rest = known.space.addresses(work)
    cu_seqlens, initial, final = at["cu_seqlens"], at["initial_state"], at["final_state"]
    if facts.pool:
        initial = final = at["state_pool"]
    if known.prepare is not None:
        gates = (at["A_log"], at["dt_bias"])
        inputs = (at["q"], at["k"], at["g"], at["beta"])
        known.prepare((*inputs, *gates, cu_seqlens, Kd, Qd, Ak, Aq, decay, sums, rest), stream)
    slots = (at[name] for name in ("state_indices", "write_indices", "fresh", "checkpoints", "checkpoint_indices"))
    known.recur((Kd, Qd, Ak, Aq, decay, at["v"], at["out"], initial, final, cu_seqlens, *slots), stream)
    return result
