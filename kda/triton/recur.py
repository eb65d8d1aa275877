"""Stage 2, the chain: one program walks the chunks of one sequence and head with a V block of the state.

Two dependent products a chunk: R = V - Kd S, then S' = diag(decay) S + Ak^T R; the output O = Qd S + Aq R hangs off it.
"""

import triton
import triton.language as tl

from kda.triton.math import bounds, cast, dot, indices


@triton.jit(do_not_specialize=["N", "T", "tokens", "HV", "has_initial", "has_final", "cu_stride"])
def recur_kernel(
    Kd,  # [HV, B * T, KW], the dot's dtype
    Qd,  # [HV, B * T, KW]
    Ak,  # [HV, B * T, KW]
    Aq,  # [HV, B * T, C]
    decay,  # [slots, HV, KW] fp32
    v,
    out,
    initial,  # any pointer where has_initial is 0
    final,  # any pointer where has_final is 0
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
    has_initial,
    has_final,
    K,
    V,
    KW: tl.constexpr,  # row length of the workspace
    KP: tl.constexpr,  # K rounded up to a power of two
    BV: tl.constexpr,
    C: tl.constexpr,
    VARLEN: tl.constexpr,
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
    if has_initial != 0:
        initial += n.to(tl.int64) * i_n + hv * i_h
        at_initial = d[:, None].to(tl.int64) * i_k + w[None, :].to(tl.int64) * i_v
        S = tl.load(initial + at_initial, mask=in_state, other=0.0).to(tl.float32)

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

    if has_final != 0:
        final += n.to(tl.int64) * f_n + hv * f_h
        at_final = d[:, None].to(tl.int64) * f_k + w[None, :].to(tl.int64) * f_v
        tl.store(final + at_final, cast(S, final.dtype.element_ty, INTERPRET), mask=in_state)
    if VARLEN:
        if n == N - 1:  # what follows the last sequence is padding
            out += (stop - start - tl.cdiv(stop - start, C) * C) * o_t  # back from the end of the last tile
            for left in range((T - stop).to(tl.int32), 0, -C):
                zero = tl.zeros((C, BV), tl.float32).to(out.dtype.element_ty)
                o_at = rows[:, None] * o_t + w[None, :] * o_d
                tl.store(out + o_at, zero, mask=(rows < left)[:, None] & in_v[None, :])
                out += step * o_t
