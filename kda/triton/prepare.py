"""Stage 1, token-parallel: one program turns one chunk of one head into what the recurrence needs (see kda.ref.chunked).

The lower triangle is built by doubling, as in the specification, with masks in place of slices: at level b every row of
the tile belongs to the left or the right block of a pair. Row i's factor is exp(sum of log decays between it and the
pair's boundary), one exponential for either role, and never above 1. Products of all pairs come out of one dot of the
whole tile with itself; a select keeps the pairs.
"""

import triton
import triton.language as tl

from kda.triton.math import (
    BF16,
    FP32,
    bounds,
    cast,
    dot,
    exp,
    exp_of_sums,
    halves,
    inverse_norm,
    log_decay,
    sequence_of,
    sigmoid,
)


@triton.jit
def _between(i, s, b: tl.constexpr):
    """Whether token s lies between row i and the boundary of its pair of b-blocks: [boundary, i] or (i, boundary)."""
    boundary = i // (2 * b) * (2 * b) + b
    right = i >= boundary
    return tl.where(right, (s >= boundary) & (s <= i), (s > i) & (s < boundary))


@triton.jit
def _paired(i, j, b: tl.constexpr):
    """Whether row i is in the right and column j in the left block of one pair."""
    return (i // (2 * b) == j // (2 * b)) & (i // b % 2 == 1) & (j // b % 2 == 0)


@triton.jit
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    Kd,  # [HV, B * T, K], the dot's dtype
    Qd,  # [HV, B * T, K]
    Ak,  # [HV, B * T, K]
    Aq,  # [HV, B * T, C]
    decay,  # [slots, HV, K] fp32
    scale,
    lower_bound,
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
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,  # log2(C)
    GATE: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VARLEN: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    OPERAND: tl.constexpr,
    INVERSE: tl.constexpr,
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

    rows = tl.arange(0, C).to(tl.int64)
    live = start + rows < stop
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    q += row * q_b + start * q_t + h * q_h
    k += row * k_b + start * k_t + h * k_h
    g += row * g_b + start * g_t + hv * g_h
    token = hv * tokens + row * T + start  # row of the workspace

    b = tl.load(beta + row * beta_b + (start + rows) * beta_t + hv * beta_h, mask=live, other=0.0).to(tl.float32)
    if SIGMOID:
        b = sigmoid(b)
    b = tl.where(live, BETA_FACTOR * b, 0.0)

    q_scale = tl.zeros((C,), tl.float32) + scale
    k_scale = tl.zeros((C,), tl.float32) + 1.0
    if L2NORM:
        q_square = tl.zeros((C,), tl.float32)
        k_square = tl.zeros((C,), tl.float32)
        for first in range(0, K, BK):
            d = first + tl.arange(0, BK)
            mask = live[:, None] & (d < K)[None, :]
            q_tile = tl.load(q + rows[:, None] * q_t + d[None, :] * q_d, mask=mask, other=0.0).to(tl.float32)
            k_tile = tl.load(k + rows[:, None] * k_t + d[None, :] * k_d, mask=mask, other=0.0).to(tl.float32)
            q_square += tl.sum(q_tile * q_tile, axis=1)
            k_square += tl.sum(k_tile * k_tile, axis=1)
        q_scale *= inverse_norm(q_square)
        k_scale *= inverse_norm(k_square)

    # L[i, j] = sum_c k_ic k_jc exp(G_ic - G_jc) below the diagonal; M the same for q, with the diagonal.
    L = tl.zeros((C, C), tl.float32)
    M = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        inside = d < K
        mask = live[:, None] & inside[None, :]
        q_tile = tl.load(q + rows[:, None] * q_t + d[None, :] * q_d, mask=mask, other=0.0).to(tl.float32)
        k_tile = tl.load(k + rows[:, None] * k_t + d[None, :] * k_d, mask=mask, other=0.0).to(tl.float32)
        q_tile *= q_scale[:, None]
        k_tile *= k_scale[:, None]
        a = tl.load(g + rows[:, None] * g_t + d[None, :] * g_d, mask=mask, other=0.0).to(tl.float32)
        rate = 0.0
        bias = tl.zeros((BK,), tl.float32)
        if HAS_A_LOG:
            rate = tl.load(A_log + hv).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(dt_bias + hv * K + d, mask=inside, other=0.0).to(tl.float32)
        a = tl.where(mask, log_decay(a, rate, bias, lower_bound, GATE, HAS_A_LOG, HAS_BIAS), 0.0)
        high, low = halves(a)

        M += tl.where(i == j, tl.sum(q_tile * k_tile, axis=1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            if level == 0:
                e = tl.where(i % 2 == 1, exp(a), 1.0)
            else:
                e = exp_of_sums(_between(i, j, 1 << level), high, low, INTERPRET)
            ke = k_tile * e
            columns = tl.trans(ke)
            pairs = _paired(i, j, 1 << level)
            L += tl.where(pairs, dot(ke, columns, OPERAND, INTERPRET), 0.0)
            M += tl.where(pairs, dot(q_tile * e, columns, OPERAND, INTERPRET), 0.0)

        e = exp_of_sums(j <= i, high, low, INTERPRET)
        at = (token + rows)[:, None] * K + d[None, :]
        tl.store(Kd + at, cast(k_tile * e, Kd.dtype.element_ty, INTERPRET), mask=mask)
        tl.store(Qd + at, cast(q_tile * e, Qd.dtype.element_ty, INTERPRET), mask=mask)
        e = exp_of_sums(j > i, high, low, INTERPRET)
        tl.store(Ak + at, cast(k_tile * e, Ak.dtype.element_ty, INTERPRET), mask=mask)  # Kr, until A is known
        tl.store(decay + (slot.to(tl.int64) * HV + hv) * K + d, exp(tl.sum(a, axis=0)), mask=inside)

    # A = (I + diag(beta) L)^-1 diag(beta), by the same doubling: T <- T - T X T.
    X = L * b[:, None]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(_paired(i, j, 1), X, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = tl.where(_paired(i, j, 1 << level), X, 0.0)
        inverse -= dot(inverse, dot(below, inverse, INVERSE, INTERPRET), INVERSE, INTERPRET)
    A = inverse * b[None, :]
    at = (token + rows)[:, None] * C + j
    tl.store(Aq + at, cast(dot(M, A, INVERSE, INTERPRET), Aq.dtype.element_ty, INTERPRET), mask=live[:, None])

    tl.debug_barrier()  # Kr was stored by other threads than will load it
    A = tl.trans(A)
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        mask = live[:, None] & (d < K)[None, :]
        at = (token + rows)[:, None] * K + d[None, :]
        Kr = tl.load(Ak + at, mask=mask, other=0.0).to(tl.float32)
        if OPERAND == BF16:  # Kr is one bf16 term already; A keeps two
            A_high = cast(A, tl.bfloat16, INTERPRET).to(tl.float32)
            product = dot(A_high, Kr, BF16, INTERPRET) + dot(A - A_high, Kr, BF16, INTERPRET)
        else:
            product = dot(A, Kr, FP32, INTERPRET)
        tl.debug_barrier()
        tl.store(Ak + at, cast(product, Ak.dtype.element_ty, INTERPRET), mask=mask)
