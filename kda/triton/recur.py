"""Stage 2, the chain: one program walks the chunks of one sequence and head with a V block of the state.

Two dependent products a chunk: R = V - Kd S, then S' = diag(decay) S + Ak^T R; the output O = Qd S + Aq R hangs off it.
"""

import triton
import triton.language as tl

from kda.triton.math import bounds, cast, dot


@triton.jit
def recur_kernel(
    Kd,  # [HV, B * T, K], the dot's dtype
    Qd,  # [HV, B * T, K]
    Ak,  # [HV, B * T, K]
    Aq,  # [HV, B * T, C]
    decay,  # [slots, HV, K] fp32
    v,
    out,
    initial,
    final,
    cu_seqlens,
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
    cu_stride,
    N,
    T,
    tokens,  # B * T
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,  # K rounded up to a power of two
    BV: tl.constexpr,
    C: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    VARLEN: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    blocks: tl.constexpr = (V + BV - 1) // BV
    task = tl.program_id(0) // blocks
    n = task // HV
    hv = (task % HV).to(tl.int64)
    rows = tl.arange(0, C).to(tl.int64)
    d = tl.arange(0, KP)
    w = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    in_k = d < K
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

    v += row * v_b + hv * v_h + w[None, :] * v_d
    out += row * o_b + hv * o_h + w[None, :] * o_d
    token = hv * tokens + row * T  # row of the workspace
    in_state = in_k[:, None] & in_v[None, :]
    if HAS_INITIAL:
        at = n.to(tl.int64) * i_n + hv * i_h + d[:, None].to(tl.int64) * i_k + w[None, :].to(tl.int64) * i_v
        S = tl.load(initial + at, mask=in_state, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((KP, BV), tl.float32)

    for begin in range(start, stop, C):
        t = begin + rows
        live = t < stop
        mask = live[:, None] & in_k[None, :]
        at = (token + t)[:, None] * K + d[None, :]
        kd = tl.load(Kd + at, mask=mask, other=0.0)
        qd = tl.load(Qd + at, mask=mask, other=0.0)
        ak = tl.load(Ak + at, mask=mask, other=0.0)
        aq = tl.load(Aq + (token + t)[:, None] * C + tl.arange(0, C)[None, :], mask=live[:, None], other=0.0)
        e = tl.load(decay + (slot * HV + hv) * K + d, mask=in_k, other=0.0)
        mask = live[:, None] & in_v[None, :]
        values = tl.load(v + t[:, None] * v_t, mask=mask, other=0.0).to(tl.float32)
        R = values - dot(kd, S, OPERAND, INTERPRET)
        O = dot(qd, S, OPERAND, INTERPRET) + dot(aq, R, OPERAND, INTERPRET)
        S = S * e[:, None] + dot(tl.trans(ak), R, OPERAND, INTERPRET)
        tl.store(out + t[:, None] * o_t, cast(O, out.dtype.element_ty, INTERPRET), mask=mask)
        slot += 1

    if HAS_FINAL:
        at = n.to(tl.int64) * f_n + hv * f_h + d[:, None].to(tl.int64) * f_k + w[None, :].to(tl.int64) * f_v
        tl.store(final + at, cast(S, final.dtype.element_ty, INTERPRET), mask=in_state)
    if VARLEN:
        if n == N - 1:  # what follows the last sequence is padding
            for begin in range(stop, tl.zeros((), tl.int64) + T, C):
                t = begin + rows
                zero = tl.zeros((C, BV), tl.float32).to(out.dtype.element_ty)
                tl.store(out + t[:, None] * o_t, zero, mask=(t < T)[:, None] & in_v[None, :])
