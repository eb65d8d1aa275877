"""Stage 1, token-parallel: one program turns the chunks of a block of tokens of one head into what `recur` needs.

See kda.ref.chunked for the algorithm. Tiles have the block's rows; products of two tiles hold those of all pairs of
rows, and a select keeps the pairs that are meant.

A bounded gate's exponents are known: rows of one half of a chunk are anchored by 1 and of the other by a power of two,
the same whatever the gates are, and one product holds the triangle. Any other gate's triangle is built by doubling, as
in the specification: at level b every row belongs to the left or the right block of a pair of b-blocks, and with F the
cumulative log decay and c the last row of the left block, exp(-|F_i - F_c|) is row i's factor in either role. It is
never above 1 and depends on tokens up to the row it is used for. F goes through the workspace, so that any row of it
can be loaded as an anchor.
"""

import triton
import triton.language as tl

from kda.triton.math import (
    GIVEN,
    LOG2E,
    SUM_UNIT,
    below_16,
    bounds,
    by_chunks,
    cast,
    cumulative,
    fitted,
    indices,
    log2_scale_of,
    log_decay,
    operand,
    piece_of,
    product,
    raw_product,
    scale_of,
    sigmoid,
    since,
    split_norm,
    summed,
    to_end,
    two_terms,
)


@triton.jit
def _tile(x, rows, x_t, d, x_d, mask, other):
    """Rows and channels of one head."""
    return tl.load(x + rows[:, None] * x_t + d[None, :] * x_d, mask=mask, other=other)


@triton.jit
def _paired(i, j, b):
    """Whether row i is in the right and column j in the left block of one pair."""
    return (i // (2 * b) == j // (2 * b)) & (i // b % 2 == 1) & (j // b % 2 == 0)


@triton.jit
def _joined(T, X, LEVEL: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """T - T X T for inverses T of blocks of 2^LEVEL rows, with X what joins pairs of them: the inverses of those.

    T and X are multiplied as operands are.
    """
    n: tl.constexpr = X.shape[1]
    i = tl.arange(0, n)[:, None]
    j = tl.arange(0, n)[None, :]
    unscale = 1.0 / scale_of(KIND)
    below = fitted(tl.where(_paired(i, j, 1 << LEVEL), X, 0.0), KIND, INTERPRET)
    right = fitted(T, KIND, INTERPRET)
    right = fitted(raw_product(below, right, KIND, INTERPRET) * unscale, KIND, INTERPRET)
    return T - raw_product(fitted(T, KIND, INTERPRET), right, KIND, INTERPRET) * unscale


@triton.jit
def _inverse(X, LEVELS: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """(I + X)^-1 as an operand, for strictly lower X with blocks of 2^LEVELS rows on its diagonal. By doubling.

    Up to 16 rows by the 16 x 16 blocks of the diagonal alone.
    """
    R: tl.constexpr = X.shape[0] // 16
    a = tl.arange(0, R)
    on_diagonal = a[:, None, None, None] == a[None, None, :, None]
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    X *= scale_of(KIND)
    small = tl.sum(tl.where(on_diagonal, tl.reshape(X, (R, 16, R, 16)), 0.0), axis=2)
    T = tl.where(i == j, scale_of(KIND), 0.0) - tl.where(_paired(i, j, 1), small, 0.0)
    for level in tl.static_range(1, 4):
        T = _joined(T, small, level, KIND, INTERPRET)
    T = tl.reshape(tl.where(on_diagonal, T[:, :, None, :], 0.0), X.shape)
    for level in tl.static_range(4, LEVELS):
        T = _joined(T, X, level, KIND, INTERPRET)
    return fitted(T, KIND, INTERPRET)


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
    decay,  # [blocks, BLOCK / C, HV, KW] fp32
    sums,  # [HV, B * T, KW] fp32 scratch: cumulative log decay inside the chunk; any pointer where ANCHORED
    rest,  # the same, second term; only if TWO_TERMS
    scale,
    lower_bound,
    anchor,  # log2 of the power of two
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
    BLOCK: tl.constexpr,  # rows of a tile, in chunks
    ANCHORED: tl.constexpr,
    LEVELS: tl.constexpr,  # log2(C)
    GATE: tl.constexpr,
    VARLEN: tl.constexpr,
    OPERAND: tl.constexpr,
    INVERSE: tl.constexpr,
    TWO_TERMS: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    place = tl.program_id(0) // HV
    hv = (tl.program_id(0) % HV).to(tl.int64)
    h = hv // GROUP
    n, block = piece_of(place, cu_seqlens, cu_stride, N, T, BLOCK, VARLEN)
    row = tl.zeros((), tl.int64)
    start = tl.zeros((), tl.int64)
    stop = start + T
    if VARLEN:
        start, stop = bounds(cu_seqlens, cu_stride, n, T)
    else:
        row += n
    start += block.to(tl.int64) * BLOCK
    if start >= stop:
        return

    rows = indices(BLOCK, WIDE)
    live = rows < stop - start
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    within = i // C == j // C  # one chunk
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
    decay += (place.to(tl.int64) * (BLOCK // C) * HV + hv) * KW
    dt_bias += hv * K

    weight = tl.load(beta + rows * beta_t, mask=live, other=0.0).to(tl.float32)
    weight = tl.where(is_logit != 0, sigmoid(weight), weight)
    weight = tl.where(live, beta_factor * weight, 0.0)

    # Where nothing is, a raw gate whose decay is none.
    nothing: tl.constexpr = 0.0 if GATE == GIVEN else float("-inf")
    d = indices(BK, WIDE)
    rate = tl.zeros((), tl.float32)
    if has_A_log != 0:
        rate = tl.load(A_log + hv).to(tl.float32)
    if KW <= BK:  # then all that a program loads is asked for at once
        gates = _tile(g, rows, g_t, d, g_d, live[:, None] & (d < K)[None, :], nothing)
        bias = tl.load(dt_bias + d, mask=d < K * has_bias, other=0.0)

    q_square = tl.zeros((BLOCK,), tl.float32)
    k_square = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, KW, BK):
        d = first + indices(BK, WIDE)
        mask = live[:, None] & (d < K)[None, :]
        q_tile = _tile(q, rows, q_t, d, q_d, mask, 0.0).to(tl.float32)
        k_tile = _tile(k, rows, k_t, d, k_d, mask, 0.0).to(tl.float32)
        q_square += tl.sum(q_tile * q_tile, axis=1)
        k_square += tl.sum(k_tile * k_tile, axis=1)
    # The triangle and its inverse are made of unit vectors also where q and k are taken as they are: with keys
    # n k_unit the update is that of k_unit with weight beta n^2, up to a factor n for each row of Ak and each column
    # of Aq. So no entry of the inverse exceeds the largest weight, 2 for any recurrence that does not grow, and fp16
    # holds it.
    q_norm, q_unit = split_norm(q_square, normalise)
    k_norm, k_unit = split_norm(k_square, normalise)
    q_norm *= scale

    # L[i, j] = sum_c k_ic k_jc exp(G_ic - G_jc) below the diagonal; M the same for q, with the diagonal.
    L = tl.zeros((BLOCK, BLOCK), tl.float32)
    M = tl.zeros((BLOCK, BLOCK), tl.float32)
    diagonal = tl.zeros((BLOCK,), tl.float32)
    kept = below_16(tl.zeros((BLOCK, BK), tl.float32), INVERSE)  # Kr, of the only block of channels
    UNIT: tl.constexpr = 1.0 if TWO_TERMS else SUM_UNIT
    LOG2: tl.constexpr = LOG2E / UNIT
    #: Of a row, where ANCHORED: the exponent of its anchor.
    exponent = tl.where(tl.arange(0, BLOCK) % C < C // 2, 0.0, anchor)
    k_factor, q_factor = k_norm, q_norm
    if ANCHORED:
        k_factor *= tl.exp2(-exponent)
        q_factor *= tl.exp2(-exponent)
    last = tl.minimum(stop - start, BLOCK).to(tl.int32) - 1
    for first in range(0, KW, BK):
        d = first + indices(BK, WIDE)
        in_work = d < KW
        mask = live[:, None] & (d < K)[None, :]
        work_mask = live[:, None] & in_work[None, :]
        at = i * KW + d[None, :]
        if KW > BK:
            gates = _tile(g, rows, g_t, d, g_d, mask, nothing)
            bias = tl.load(dt_bias + d, mask=d < K * has_bias, other=0.0)
        # Log decays times UNIT, as are their sums. No bounded gate that is anchored reaches the floor.
        bound = lower_bound * UNIT if ANCHORED else lower_bound
        a = log_decay(gates.to(tl.float32), rate, bias.to(tl.float32), bound, GATE, FLOORED=not ANCHORED)
        if not ANCHORED:
            a *= UNIT
        if TWO_TERMS:
            a, b = two_terms(a)
            F, R = cumulative(a, C), cumulative(b, C)
            total, total_rest = tl.sum(by_chunks(a, C), axis=1), tl.sum(by_chunks(b, C), axis=1)
            whole = total + total_rest
        else:
            F = summed(within & (i >= j), a, INTERPRET)
            R = F
            total = tl.sum(by_chunks(a, C), axis=1)
            whole = total
        chunk = tl.arange(0, BLOCK // C)
        tl.store(decay + chunk[:, None] * (HV * KW) + d[None, :], tl.exp2(whole * LOG2), mask=in_work[None, :])

        k_hat = _tile(k, rows, k_t, d, k_d, mask, 0.0).to(tl.float32)
        k_hat *= k_unit[:, None]
        left = to_end(total, F, C)
        if TWO_TERMS:
            left += to_end(total_rest, R, C)
        Kr = k_hat * tl.exp2(left * LOG2 + log2_scale_of(INVERSE))
        if KW > BK:  # kept there until T is known
            tl.store(Ak + at, cast(Kr, Ak.dtype.element_ty, INTERPRET), mask=work_mask)
        else:
            kept = below_16(Kr, INVERSE)
        if ANCHORED:
            ki = operand(k_hat * tl.exp2(F * -LOG2 - exponent[:, None]), OPERAND, INTERPRET)
            e = tl.exp2(F * LOG2 + exponent[:, None])
            kd = k_hat * e
            L = product(operand(kd, OPERAND, INTERPRET), tl.trans(ki), OPERAND, INTERPRET) + L
        else:
            e = tl.exp2((F + R if TWO_TERMS else F) * LOG2)
            kd = k_hat * e
        tl.store(Kd + at, cast(kd * k_factor[:, None], Kd.dtype.element_ty, INTERPRET), mask=work_mask)

        q_hat = _tile(q, rows, q_t, d, q_d, mask, 0.0).to(tl.float32)
        q_hat *= q_unit[:, None]
        qd = q_hat * e
        tl.store(Qd + at, cast(qd * q_factor[:, None], Qd.dtype.element_ty, INTERPRET), mask=work_mask)
        if ANCHORED:
            M = product(operand(qd, OPERAND, INTERPRET), tl.trans(ki), OPERAND, INTERPRET) + M
        else:
            tl.store(sums + at, F, mask=work_mask)
            if TWO_TERMS:
                tl.store(rest + at, R, mask=work_mask)
            tl.debug_barrier()  # other threads load what this one stored
            diagonal += tl.sum(q_hat * k_hat, axis=1)
            for level in range(LEVELS):  # not unrolled: the masks of all levels would fill the registers
                half = 1 << level
                c = tl.minimum(i // (2 * half) * (2 * half) + half - 1, last)
                f = tl.exp2(-tl.abs(since(c, F, R, sums, rest, d, KW, TWO_TERMS)) * LOG2)
                ke = operand(k_hat * f, OPERAND, INTERPRET)
                columns = tl.trans(ke)
                pairs = _paired(i, j, half)
                L += tl.where(pairs, product(ke, columns, OPERAND, INTERPRET), 0.0)
                qe = operand(q_hat * f, OPERAND, INTERPRET)
                M += tl.where(pairs, product(qe, columns, OPERAND, INTERPRET), 0.0)
    if ANCHORED:  # rows of a second half by 2^anchor, columns of a first half by 1
        exact = tl.where(_paired(i, j, C // 2), tl.exp2(-anchor), 1.0)
        L = tl.where(within & (i > j), L * exact, 0.0)
        M = tl.where(within & (i >= j), M * exact, 0.0)
    else:
        M += tl.where(i == j, diagonal[:, None], 0.0)

    # T = (I + diag(beta) L)^-1, Aq = M T diag(beta), Ak = diag(beta) T^T Kr.
    inverse = _inverse(L * (weight * k_norm * k_norm)[:, None], LEVELS, INVERSE, INTERPRET)
    weight *= k_norm
    aq = product(below_16(M * scale_of(INVERSE), INVERSE), inverse, INVERSE, INTERPRET)
    aq *= q_norm[:, None] * weight[None, :]
    tl.store(Aq + i * C + j % C, cast(aq, Aq.dtype.element_ty, INTERPRET), mask=live[:, None] & within)
    inverse = tl.trans(inverse)
    if KW > BK:
        tl.debug_barrier()  # Kr was stored by other threads than will load it
    for first in range(0, KW, BK):
        d = first + indices(BK, WIDE)
        work_mask = live[:, None] & (d < KW)[None, :]
        at = i * KW + d[None, :]
        if KW > BK:
            # With their scale in bf16. LLVM moves a multiplication between the two conversions behind the second: there
            # fp16 would have lost what the scale is to save.
            kept = below_16(tl.load(Ak + at, mask=work_mask, other=0.0).to(tl.float32), INVERSE)
        ak = product(inverse, kept, INVERSE, INTERPRET)
        if KW > BK:
            tl.debug_barrier()
        tl.store(Ak + at, cast(ak * weight[:, None], Ak.dtype.element_ty, INTERPRET), mask=work_mask)
