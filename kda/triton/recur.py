"""Stage 2, the chain: one program walks the chunks of one sequence and head with a V block of the state.

Two dependent products a chunk: R = V - Kd S, then S' = diag(decay) S + Ak^T R; the output O = Qd S + Aq R hangs off it.
All of it is held transposed: the state's rows are V, so S^T and R^T are accumulators of one product and, rounded, left
operands of the next, and need not leave the registers.

Few chains leave most of a GPU idle, so long sequences are cut into segments (`kda.triton.split`), which are walked
twice. The first time, `LOCAL`, without any output: from a state of zeros, and with V = 0 from the identity. That gives
the local state and the transition Phi of a segment, for `merge`; the second time begins with the states that it made.
"""

import triton
import triton.language as tl

from kda.triton.math import BF16, bounds, cast, dot, indices, piece_of, slot_at, slot_to_read


@triton.jit
def _state_at(states, slot, s_n, s_h, s_v, s_k, hv, w, d):
    """Where a V block of one head's state lies in a slot, V first."""
    at = states + slot * s_n + hv * s_h
    return at + (w[:, None].to(tl.int64) * s_v + d[None, :].to(tl.int64) * s_k)


@triton.jit(
    do_not_specialize=[
        *("N", "T", "tokens", "HV", "has_initial", "has_final", "cu_stride", "segment"),
        *("slots", "has_reads", "has_writes", "has_fresh", "checkpoint_slots", "columns", "every"),
        *("reads_n", "writes_n", "fresh_n", "columns_n", "columns_m"),
    ]
)
def recur_kernel(
    Kd,  # [HV, B * T, KW], the dot's dtype
    Qd,  # [HV, B * T, KW]
    Ak,  # [HV, B * T, KW]
    Aq,  # [HV, B * T, C]
    decay,  # [slots, CHUNK / C, HV, KW] fp32
    local,  # [segments, HV, V, K] fp32: states after each segment, from zeros at first; any pointer unless SPLIT
    transition,  # [segments, HV, K, K] fp32: Phi
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
    segment,  # tokens
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
    BLOCK: tl.constexpr,  # tokens of a slot of the workspace
    SPLIT: tl.constexpr,
    LOCAL: tl.constexpr,
    VARLEN: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    OPERAND: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    blocks = tl.cdiv(V, BV)
    block = tl.program_id(0)
    if LOCAL:
        blocks += tl.cdiv(K, BV)
    task = block // blocks
    block = block % blocks
    hv = (task % HV).to(tl.int64)
    place = task // HV  # of the segment, or of the sequence
    piece = tl.zeros((), tl.int32)
    pieces = piece + 1
    if SPLIT:
        n, piece = piece_of(place, cu_seqlens, cu_stride, N, T, segment, VARLEN)
    else:
        n = place
    row = tl.zeros((), tl.int64)
    if VARLEN:
        start, stop = bounds(cu_seqlens, cu_stride, n, T)
        slot = start // BLOCK + n
    else:
        row += n
        start = tl.zeros((), tl.int64)
        stop = start + T
        slot = row * tl.cdiv(T, BLOCK)
    if SPLIT:
        pieces = tl.maximum(tl.cdiv(stop - start, segment), 1).to(tl.int32)
        if piece >= pieces - LOCAL:  # a slot between two sequences, or the last segment, whose end nothing needs
            return
        start += piece.to(tl.int64) * segment
        stop = tl.minimum(stop, start + segment)
    is_transition = block >= tl.cdiv(V, BV)
    if LOCAL:
        if is_transition & (piece == 0):  # which begins with a state that is known
            return
        block = tl.where(is_transition, block - tl.cdiv(V, BV), block)

    rows = indices(C, WIDE)
    i = tl.arange(0, C)[:, None]
    d = tl.arange(0, KP)
    w = block * BV + indices(BV, WIDE)
    in_k = d < K
    in_work = d < KW
    in_v = w < V
    in_values = in_v
    if LOCAL:
        in_v = w < tl.where(is_transition, K, V)
        in_values = w < tl.where(is_transition, 0, V)

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
    decay += ((slot.to(tl.int64) * (BLOCK // C) + piece.to(tl.int64) * segment // C) * HV + hv) * KW
    step = tl.zeros((), tl.int64) + C
    in_state = in_v[:, None] & in_k[None, :]
    S = tl.zeros((BV, KP), tl.float32)
    # The end of the last segment is needed by none, so its place keeps the state that the first began with: where
    # states are updated in place another program may have written over it before the second walk begins.
    spare = (place + pieces - 1).to(tl.int64) * HV
    if LOCAL and piece > 0:
        S = tl.where(is_transition & (w[:, None] == d[None, :]), 1.0, 0.0)
    elif SPLIT and not LOCAL and pieces > 1:
        before = tl.where(piece > 0, (place - 1).to(tl.int64) * HV, spare)
        S = tl.load(_state_at(local, before, V * K, V * K, K, 1, hv, w, d), mask=in_state, other=0.0)
    else:
        zero = tl.load(fresh + n.to(tl.int64) * fresh_n, mask=has_fresh != 0, other=0) != 0
        if (has_initial != 0) & (read >= 0) & (zero == 0):
            at = _state_at(initial, read, i_n, i_h, i_v, i_k, hv, w, d)
            S = tl.load(at, mask=in_state, other=0.0).to(tl.float32)
        if LOCAL:
            tl.store(_state_at(local, spare, V * K, V * K, K, 1, hv, w, d), S, mask=in_state)

    e = tl.load(decay + d, mask=in_work, other=0.0)
    # Values come by a product, exactly: a load for products is made chunks ahead, one for registers is waited for.
    minus_one = tl.where(tl.arange(0, BV)[:, None] == tl.arange(0, BV)[None, :], -1.0, 0.0)
    # Parts end at checkpoints. In tokens from the sequence's start:
    at_first = (piece * segment).to(tl.int64)
    at_last = at_first + (stop - start)
    part_first, part_last = 0, 1
    if CHECKPOINTS:
        span = tl.minimum(every, T // C + 1).to(tl.int64) * C
        part_first, part_last = at_first // span, tl.cdiv(at_last, span)
    for part in range(part_first, part_last):
        length = stop - start
        if CHECKPOINTS:
            length = tl.minimum((part + 1) * span, at_last) - tl.maximum(part * span, at_first)
        for left in range(length.to(tl.int32), 0, -C):  # tokens still to come
            live = rows < left
            mask = live[:, None] & in_work[None, :]
            kd = tl.load(Kd + i * KW + d[None, :], mask=mask, other=0.0)
            ak = tl.load(Ak + i * KW + d[None, :], mask=mask, other=0.0)
            decay += HV * KW
            next_e = tl.load(decay + d, mask=in_work, other=0.0)  # nothing else would hide it; there is one more slot
            v_at = rows[:, None] * v_t + w[None, :] * v_d
            values = tl.load(v + v_at, mask=live[:, None] & in_values[None, :], other=0.0)
            if OPERAND == BF16:
                minus_R = dot(minus_one, tl.trans(values), OPERAND, INTERPRET)
                minus_R += dot(S, tl.trans(kd), OPERAND, INTERPRET)
                R = -minus_R
            else:
                R = tl.trans(values).to(tl.float32) - dot(S, tl.trans(kd), OPERAND, INTERPRET)
            if not LOCAL:
                qd = tl.load(Qd + i * KW + d[None, :], mask=mask, other=0.0)
                aq = tl.load(Aq + i * C + tl.arange(0, C)[None, :], mask=live[:, None], other=0.0)
                O = dot(S, tl.trans(qd), OPERAND, INTERPRET) + dot(R, tl.trans(aq), OPERAND, INTERPRET)
                o_at = w[:, None] * o_d + rows[None, :] * o_t
                tl.store(out + o_at, cast(O, out.dtype.element_ty, INTERPRET), mask=in_v[:, None] & live[None, :])
            S = S * e[None, :] + dot(R, ak, OPERAND, INTERPRET)
            e = next_e
            Kd += C * KW
            Qd += C * KW
            Ak += C * KW
            Aq += C * C
            v += step * v_t
            out += step * o_t
        if CHECKPOINTS:
            if ((part + 1) * span <= at_last) & (part < columns):
                at_index = n.to(tl.int64) * columns_n + part * columns_m
                kept = slot_at(checkpoint_indices, at_index, checkpoint_slots, 1)
                if kept >= 0:
                    at = _state_at(checkpoints, kept, c_n, c_h, c_v, c_k, hv, w, d)
                    tl.store(at, cast(S, checkpoints.dtype.element_ty, INTERPRET), mask=in_state)

    if LOCAL:
        at = _state_at(local, place.to(tl.int64) * HV, V * K, V * K, K, 1, hv, w, d)
        if is_transition:  # held transposed, as the states are
            at = _state_at(transition, place.to(tl.int64) * HV, K * K, K * K, 1, K, hv, w, d)
        tl.store(at, S, mask=in_state)
    else:
        # Looked up again: what is kept in registers until here makes the loop spill.
        write = slot_to_read(reads, reads_n, n, slots, has_reads)
        if (has_writes != 0) & (write >= 0):
            write = slot_at(writes, n.to(tl.int64) * writes_n, slots, has_writes)
        if (has_final != 0) & (write >= 0) & (piece == pieces - 1):
            at = _state_at(final, write, f_n, f_h, f_v, f_k, hv, w, d)
            tl.store(at, cast(S, final.dtype.element_ty, INTERPRET), mask=in_state)
        # Rows of out to clear: those of a sequence without a slot, and what follows the last.
        end = tl.zeros((), tl.int64) + T
        if VARLEN:
            _, end = bounds(cu_seqlens, cu_stride, n, T)
            end = tl.where(n == N - 1, T, end)
        if SPLIT and piece < pieces - 1:
            end = start + segment
        out += (stop - start - tl.cdiv(stop - start, C) * C) * o_t  # back from the end of the last tile
        for left in range((end - stop).to(tl.int32), 0, -C):
            zeros = tl.zeros((BV, C), tl.float32).to(out.dtype.element_ty)
            o_at = w[:, None] * o_d + rows[None, :] * o_t
            tl.store(out + o_at, zeros, mask=in_v[:, None] & (rows < left)[None, :])
            out += step * o_t
