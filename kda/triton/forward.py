"""Host side of the Triton forward: workspace, grids and launches. No synchronisation, no look at any contents."""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from kda.problem import GateKind, Output, Problem
from kda.triton import math
from kda.triton.config import anchored_rows, power_of_two, tiles
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

    work = torch.bfloat16 if bf16 else torch.float32
    KW = triton.cdiv(K, 16) * 16  # rows of whole vectors, whatever K is
    Kd, Qd, Ak = torch.empty(3, HV, B * T, KW, dtype=work, device=q.device)
    Aq = torch.empty(HV, B * T, C, dtype=work, device=q.device)
    decay = torch.empty(slots, HV, KW, dtype=torch.float32, device=q.device)
    sums = torch.empty(1 if bf16 else 2, HV, B * T, KW, dtype=torch.float32, device=q.device)
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
        if B * T:
            prepare_kernel[(slots * HV,)](
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
                sums[0],
                sums[-1],
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
                BK=config.block_k,
                ANCHORED=anchored,
                FIRST_LEVEL=max(anchored.bit_length() - 1, 0),
                LEVELS=C.bit_length() - 1,
                GATE=GATES[facts.gate],
                INVERSE=inverse,
                TWO_TERMS=not bf16,
                num_warps=config.prepare_warps,
                num_stages=1,  # its loads follow stores of other threads: nothing may be loaded ahead
                **common,
            )
        recur_kernel[(N * HV * triton.cdiv(V, config.block_v),)](
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
            V=V,
            KP=power_of_two(K),
            BV=config.block_v,
            CHECKPOINTS=kept is not None,
            num_warps=config.recur_warps,
            num_stages=config.recur_stages,
            **common,
        )
    return Output(out, final if facts.final_state else None)
