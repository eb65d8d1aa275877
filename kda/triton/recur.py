"""Stage 2, the chain: one program walks the chunks of one sequence and head with a V block of the state.

Two dependent products a chunk: R = V - Kd S, then S' = diag(decay) S + Ak^T R; the output O = Qd S + Aq R hangs off it.
"""

import triton
import triton.language as tl

from kda.triton.math import bounds, cast, dot, indices, slot_at, slot_to_read


@triton.jit
def _state_at(states, slot, s_n, s_h, s_v, s_k, hv, d, w):
    """Where a V block of one head's state lies in a slot, K first."""
    at = states + slot * s_n + hv * s_h
    return at + (d[:, None].to(tl.int64) * s_k + w[None, :].to(tl.int64) * s_v)


@triton.jit(
    do_not_specialize=[
        *("N", "T", "tokens", "HV", "has_initial", "has_final", "cu_stride"),
        *("slots", "has_reads", "has_writes", "has_fresh", "checkpoint_slots", "columns", "every"),
        *("reads_n", "writes_n", "fresh_n", "columns_n", "columns_m"),
    ]
)
def recur_kernel(
    Kd,  # [HV, B * T, KW], the dot's dtype
    Qd,  # [HV, B * T, KW]
    Ak,  # [HV, B * T, KW]
    Aq,  # [HV, B * T, C]
    decay,  # [slots, HV, KW] fp32
    v,
    out,
    initial,  # any pointer where has_initial is 0; the pool where there is one, as is final
    final,  # any pointer where has_final is 0
    cu_seqlens,
    reads,  # [N] slots; this and what follows: any pointer of its kind where there is none
    writes,  # [N] slots
    fresh,  # [N] bytes
    checkpoints,
    checkpoint_indices,  # [N, columns]
    v_b,
    v_t,
    v_h,
    v_d,
    o_b,
    o_t,
    o_h,
    o_d,
    i_n,
    i_h,
    i_v,
    i_k,
    f_n,
    f_h,
    f_v,
    f_k,
    c_n,
    c_h,
    c_v,
    c_k,
    cu_stride,
    reads_n,
    writes_n,
    fresh_n,
    columns_n,
    columns_m,
    N,
    T,
    tokens,  # B * T
    HV,
    has_initial,
    has_final,
    has_reads,
    has_writes,
    has_fresh,
    slots,  # of the pool; N without one
    checkpoint_slots,
    columns,
    every,  # chunks from one checkpoint to the next
    K,
    V,
    KW: tl.constexpr,  # row length of the workspace
    KP: tl.constexpr,  # K rounded up to a power of two
    BV: tl.constexpr,
    C: tl.constexpr,
    VARLEN: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    OPERAND: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    blocks = tl.cdiv(V, BV)
    task = tl.program_id(0) // blocks
    n = task // HV
    hv = (task % HV).to(tl.int64)
    rows = indices(C, WIDE)
    i = tl.arange(0, C)[:, None]
    d = tl.arange(0, KP)
    w = (tl.program_id(0) % blocks) * BV + indices(BV, WIDE)
    in_k = d < K
    in_work = d < KW
    in_v = w < V
    if VARLEN:
        row = tl.zeros((), tl.int64)
        start, stop = bounds(cu_seqlens, cu_stride, n, T)
        slot = start // C + n
    else:
        row = n.to(tl.int64)
        start = tl.zeros((), tl.int64)
        stop = start + T
        slot = row * tl.cdiv(T, C)

    read = slot_to_read(reads, reads_n, n, slots, has_reads)
    if read < 0:  # a sequence without a slot
        stop = start

    v += row * v_b + start * v_t + hv * v_h
    out += row * o_b + start * o_t + hv * o_h
    token = hv * tokens + row * T + start  # row of the workspace
    Kd += token * KW
    Qd += token * KW
    Ak += token * KW
    Aq += token * C
    decay += (slot.to(tl.int64) * HV + hv) * KW
    step = tl.zeros((), tl.int64) + C
    in_state = in_k[:, None] & in_v[None, :]
    S = tl.zeros((KP, BV), tl.float32)
    zero = tl.load(fresh + n.to(tl.int64) * fresh_n, mask=has_fresh != 0, other=0) != 0
    if (has_initial != 0) & (read >= 0) & (zero == 0):
        at = _state_at(initial, read, i_n, i_h, i_v, i_k, hv, d, w)
        S = tl.load(at, mask=in_state, other=0.0).to(tl.float32)
    done = tl.zeros((), tl.int32)  # chunks

    for left in range((stop - start).to(tl.int32), 0, -C):  # tokens still to come
        live = rows < left
        mask = live[:, None] & in_work[None, :]
        kd = tl.load(Kd + i * KW + d[None, :], mask=mask, other=0.0)
        qd = tl.load(Qd + i * KW + d[None, :], mask=mask, other=0.0)
        ak = tl.load(Ak + i * KW + d[None, :], mask=mask, other=0.0)
        aq = tl.load(Aq + i * C + tl.arange(0, C)[None, :], mask=live[:, None], other=0.0)
        e = tl.load(decay + d, mask=in_work, other=0.0)
        mask = live[:, None] & in_v[None, :]
        values = tl.load(v + rows[:, None] * v_t + w[None, :] * v_d, mask=mask, other=0.0).to(tl.float32)
        R = values - dot(kd, S, OPERAND, INTERPRET)
        O = dot(qd, S, OPERAND, INTERPRET) + dot(aq, R, OPERAND, INTERPRET)
        S = S * e[:, None] + dot(tl.trans(ak), R, OPERAND, INTERPRET)
        o_at = rows[:, None] * o_t + w[None, :] * o_d
        tl.store(out + o_at, cast(O, out.dtype.element_ty, INTERPRET), mask=mask)
        Kd += C * KW
        Qd += C * KW
        Ak += C * KW
        Aq += C * C
        decay += HV * KW
        v += step * v_t
        out += step * o_t
        if CHECKPOINTS:
            done += 1
            if (done % every == 0) & (left >= C) & (done // every <= columns):
                at_index = n.to(tl.int64) * columns_n + (done // every - 1).to(tl.int64) * columns_m
                kept = slot_at(checkpoint_indices, at_index, checkpoint_slots, 1)
                if kept >= 0:
                    at = _state_at(checkpoints, kept, c_n, c_h, c_v, c_k, hv, d, w)
                    tl.store(at, cast(S, checkpoints.dtype.element_ty, INTERPRET), mask=in_state)

    # Looked up again: what is kept in registers until here makes the loop spill.
    write = slot_to_read(reads, reads_n, n, slots, has_reads)
    if (has_writes != 0) & (write >= 0):
        write = slot_at(writes, n.to(tl.int64) * writes_n, slots, has_writes)
    if (has_final != 0) & (write >= 0):
        at = _state_at(final, write, f_n, f_h, f_v, f_k, hv, d, w)
        tl.store(at, cast(S, final.dtype.element_ty, INTERPRET), mask=in_state)
    end = start + T  # of the rows of out to clear: those of a sequence without a slot, and what follows the last
    if VARLEN:
        _, end = bounds(cu_seqlens, cu_stride, n, T)
        end = tl.where(n == N - 1, T, end)
    out += (stop - start - tl.cdiv(stop - start, C) * C) * o_t  # back from the end of the last tile
    for left in range((end - stop).to(tl.int32), 0, -C):
        zeros = tl.zeros((C, BV), tl.float32).to(out.dtype.element_ty)
        o_at = rows[:, None] * o_t + w[None, :] * o_d
        tl.store(out + o_at, zeros, mask=(rows < left)[:, None] & in_v[None, :])
        out += step * o_t
