"""Stage 1, token-parallel: one program turns a chunk of one head into what the recurrence needs (see kda.ref.chunked).

The lower triangle is built by doubling, as in the specification, with masks in place of slices: at level b every row of
the tile belongs to the left or the right block of a pair of b-blocks, and with F the cumulative log decay and c the
last row of the left block, exp(-|F_i - F_c|) is row i's factor in either role. It is never above 1 and depends on
tokens up to the row it is used for. One dot of the whole tile with itself holds the products of all pairs; a select
keeps them. F goes through the workspace, so that any row of it can be loaded as an anchor.
"""

import triton
import triton.language as tl

from kda.triton.math import (
    BF16,
    FP32,
    bounds,
    cast,
    cumulative,
    dot,
    exp,
    indices,
    log_decay,
    sequence_of,
    sigmoid,
    since,
    split_norm,
)


@triton.jit
def _paired(i, j, b):
    """Whether row i is in the right and column j in the left block of one pair."""
    return (i // (2 * b) == j // (2 * b)) & (i // b % 2 == 1) & (j // b % 2 == 0)


#: Integers whose value opens no shortcut: not compiling for each keeps the number of variants small, and lets a flag
#: of 1 run the very code that a flag of 0 runs.
SIZES = ["N", "T", "tokens", "HV", "GROUP", "cu_stride", "beta_b", "beta_t", "beta_h"]
FLAGS = ["has_A_log", "has_bias", "is_logit", "normalise"]


@triton.jit(do_not_specialize=SIZES + FLAGS)
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,  # any pointer where has_A_log is 0
    dt_bias,  # any pointer where has_bias is 0
    cu_seqlens,
    Kd,  # [HV, B * T, KW], the dot's dtype; columns from K on are written as zeros
    Qd,  # [HV, B * T, KW]
    Ak,  # [HV, B * T, KW]
    Aq,  # [HV, B * T, C]
    decay,  # [slots, HV, KW] fp32
    sums,  # [HV, B * T, KW] fp32 scratch: cumulative log decay inside the chunk
    rest,  # the same, second term; only if TWO_TERMS
    scale,
    lower_bound,
    centre,
    beta_factor,
    q_b,
    q_t,
    q_h,
    q_d,
    k_b,
    k_t,
    k_h,
    k_d,
    g_b,
    g_t,
    g_h,
    g_d,
    beta_b,
    beta_t,
    beta_h,
    cu_stride,
    N,
    T,
    tokens,  # B * T
    HV,
    GROUP,
    has_A_log,
    has_bias,
    is_logit,
    normalise,
    K,
    KW: tl.constexpr,  # row length of the workspace
    BK: tl.constexpr,
    C: tl.constexpr,
    ANCHORED: tl.constexpr,  # rows per directly anchored block, or 0
    FIRST_LEVEL: tl.constexpr,  # log2(ANCHORED), or 0
    LEVELS: tl.constexpr,  # log2(C)
    GATE: tl.constexpr,
    VARLEN: tl.constexpr,
    OPERAND: tl.constexpr,
    INVERSE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    slot = tl.program_id(0) // HV
    hv = (tl.program_id(0) % HV).to(tl.int64)
    h = hv // GROUP
    if VARLEN:
        n = sequence_of(slot, cu_seqlens, cu_stride, N, T, C)
        row = tl.zeros((), tl.int64)
        start, stop = bounds(cu_seqlens, cu_stride, n, T)
        start += (slot - (start // C + n)).to(tl.int64) * C
    else:
        chunks = tl.cdiv(T, C)
        row = (slot // chunks).to(tl.int64)
        start = (slot % chunks).to(tl.int64) * C
        stop = tl.zeros((), tl.int64) + T
    if start >= stop:
        return

    rows = indices(C, WIDE)
    live = rows < stop - start
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    q += row * q_b + start * q_t + h * q_h
    k += row * k_b + start * k_t + h * k_h
    g += row * g_b + start * g_t + hv * g_h
    beta += row * beta_b + start * beta_t + hv * beta_h
    token = hv * tokens + row * T + start  # row of the workspace
    Kd += token * KW
    Qd += token * KW
    Ak += token * KW
    sums += token * KW
    rest += token * KW
    Aq += token * C
    decay += (slot.to(tl.int64) * HV + hv) * KW
    dt_bias += hv * K

    weight = tl.load(beta + rows * beta_t, mask=live, other=0.0).to(tl.float32)
    weight = tl.where(is_logit != 0, sigmoid(weight), weight)
    weight = tl.where(live, beta_factor * weight, 0.0)

    q_square = tl.zeros((C,), tl.float32)
    k_square = tl.zeros((C,), tl.float32)
    for first in range(0, KW, BK):
        d = first + indices(BK, WIDE)
        mask = live[:, None] & (d < K)[None, :]
        q_tile = tl.load(q + rows[:, None] * q_t + d[None, :] * q_d, mask=mask, other=0.0).to(tl.float32)
        k_tile = tl.load(k + rows[:, None] * k_t + d[None, :] * k_d, mask=mask, other=0.0).to(tl.float32)
        q_square += tl.sum(q_tile * q_tile, axis=1)
        k_square += tl.sum(k_tile * k_tile, axis=1)
    # The triangle and its inverse are made of unit vectors also where q and k are taken as they are: with keys
    # n k_unit the update is that of k_unit with weight beta n^2, up to a factor n for each row of Ak and each column
    # of Aq. So no entry of the inverse exceeds the largest weight, 2 for any recurrence that does not grow, and fp16
    # holds it.
    q_norm, q_unit = split_norm(q_square, normalise)
    k_norm, k_unit = split_norm(k_square, normalise)

    # L[i, j] = sum_c k_ic k_jc exp(G_ic - G_jc) below the diagonal; M the same for q, with the diagonal.
    L = tl.zeros((C, C), tl.float32)
    M = tl.zeros((C, C), tl.float32)
    diagonal = tl.zeros((C,), tl.float32)
    last = tl.minimum(stop - start, C).to(tl.int32) - 1
    for first in range(0, KW, BK):
        d = first + indices(BK, WIDE)
        inside = d < K
        in_work = d < KW
        mask = live[:, None] & inside[None, :]
        work_mask = live[:, None] & in_work[None, :]
        q_tile = tl.load(q + rows[:, None] * q_t + d[None, :] * q_d, mask=mask, other=0.0)
        k_tile = tl.load(k + rows[:, None] * k_t + d[None, :] * k_d, mask=mask, other=0.0)
        a = tl.load(g + rows[:, None] * g_t + d[None, :] * g_d, mask=mask, other=0.0).to(tl.float32)
        rate = tl.zeros((), tl.float32)
        if has_A_log != 0:
            rate = tl.load(A_log + hv).to(tl.float32)
        bias = tl.load(dt_bias + d, mask=d < K * has_bias, other=0.0).to(tl.float32)
        a = tl.where(mask, log_decay(a, rate, bias, lower_bound, GATE), 0.0)
        at = i * KW + d[None, :]
        F, R = cumulative(a, TWO_TERMS)
        tl.store(sums + at, F, mask=work_mask)
        if TWO_TERMS:
            tl.store(rest + at, R, mask=work_mask)
        tl.debug_barrier()  # other threads load what this one stored

        diagonal += tl.sum(q_tile.to(tl.float32) * k_tile.to(tl.float32), axis=1)
        if ANCHORED > 0:
            # The gate is bounded: a block of ANCHORED rows fits the exponent with one anchor, its first row, and a
            # constant that centres the range. The doubling then starts from these blocks.
            x = since(tl.minimum(i // ANCHORED * ANCHORED, last), F, R, sums, rest, d, KW, TWO_TERMS)
            columns = tl.trans(k_tile.to(tl.float32) * exp(-x - centre))
            e = exp(x + centre)
            pairs = (i // ANCHORED == j // ANCHORED) & (i > j)
            L += tl.where(pairs, dot(k_tile.to(tl.float32) * e, columns, OPERAND, INTERPRET), 0.0)
            M += tl.where(pairs, dot(q_tile.to(tl.float32) * e, columns, OPERAND, INTERPRET), 0.0)
        for level in range(FIRST_LEVEL, LEVELS):  # not unrolled: the masks of all levels would fill the registers
            block = 1 << level
            anchor = tl.minimum(i // (2 * block) * (2 * block) + block - 1, last)
            e = exp(-tl.abs(since(anchor, F, R, sums, rest, d, KW, TWO_TERMS)))
            ke = k_tile.to(tl.float32) * e
            columns = tl.trans(ke)
            pairs = _paired(i, j, block)
            L += tl.where(pairs, dot(ke, columns, OPERAND, INTERPRET), 0.0)
            M += tl.where(pairs, dot(q_tile.to(tl.float32) * e, columns, OPERAND, INTERPRET), 0.0)

        k_hat = k_tile.to(tl.float32) * k_unit[:, None]
        e = exp(-tl.abs(since(i * 0 + last, F, R, sums, rest, d, KW, TWO_TERMS)))
        tl.store(Ak + at, cast(k_hat * e, Ak.dtype.element_ty, INTERPRET), mask=work_mask)  # Kr, until T is known
        if TWO_TERMS:
            F += R
        e = exp(F)
        tl.store(Kd + at, cast(k_hat * k_norm[:, None] * e, Kd.dtype.element_ty, INTERPRET), mask=work_mask)
        q_hat = q_tile.to(tl.float32) * (q_unit * q_norm * scale)[:, None]
        tl.store(Qd + at, cast(q_hat * e, Qd.dtype.element_ty, INTERPRET), mask=work_mask)
        total = tl.load(sums + last * KW + d, mask=in_work, other=0.0)
        if TWO_TERMS:
            total += tl.load(rest + last * KW + d, mask=in_work, other=0.0)
        tl.store(decay + d, exp(total), mask=in_work)
    L *= k_unit[:, None] * k_unit[None, :]
    M = (M + tl.where(i == j, diagonal[:, None], 0.0)) * (q_unit[:, None] * k_unit[None, :])

    # T = (I + diag(beta) L)^-1 by the same doubling: T <- T - T X T. Then Aq = M T diag(beta), Ak = diag(beta) T^T Kr.
    X = L * (weight * k_norm * k_norm)[:, None]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(_paired(i, j, 1), X, 0.0)
    for level in range(1, LEVELS):
        below = tl.where(_paired(i, j, 1 << level), X, 0.0)
        inverse -= dot(inverse, dot(below, inverse, INVERSE, INTERPRET), INVERSE, INTERPRET)
    weight *= k_norm
    aq = dot(M, inverse, INVERSE, INTERPRET) * ((scale * q_norm)[:, None] * weight[None, :])
    tl.store(Aq + i * C + j, cast(aq, Aq.dtype.element_ty, INTERPRET), mask=live[:, None])

    tl.debug_barrier()  # Kr was stored by other threads than will load it
    inverse = tl.trans(inverse)
    for first in range(0, KW, BK):
        d = first + indices(BK, WIDE)
        work_mask = live[:, None] & (d < KW)[None, :]
        at = i * KW + d[None, :]
        Kr = tl.load(Ak + at, mask=work_mask, other=0.0).to(tl.float32)
        if OPERAND == BF16:  # Kr is one bf16 term already; the inverse keeps two
            high = cast(inverse, tl.bfloat16, INTERPRET).to(tl.float32)
            ak = dot(high, Kr, BF16, INTERPRET) + dot(inverse - high, Kr, BF16, INTERPRET)
        else:
            ak = dot(inverse, Kr, FP32, INTERPRET)
        tl.debug_barrier()
        tl.store(Ak + at, cast(ak * weight[:, None], Ak.dtype.element_ty, INTERPRET), mask=work_mask)
