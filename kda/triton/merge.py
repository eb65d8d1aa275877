"""The states between segments: S_{i+1} = Phi_i S_i + S_local_i, one program for a V block of one sequence and head.

In fp32, operands included: what a slow channel has gathered passes through every Phi.
"""

import triton
import triton.language as tl

from kda.triton.math import FP32, bounds, dot


@triton.jit(do_not_specialize=["cu_stride", "N", "T", "HV", "segment"])
def merge_kernel(
    local,  # [places, HV, V, K] fp32: S_local after each segment; becomes S
    transition,  # [places, HV, K, K] fp32: Phi
    cu_seqlens,
    cu_stride,
    N,
    T,
    HV,
    segment,  # tokens
    K,
    V,
    BK: tl.constexpr,
    KP: tl.constexpr,  # K rounded up to a power of two
    BV: tl.constexpr,
    VARLEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    blocks = tl.cdiv(V, BV)
    task = tl.program_id(0) // blocks
    n = task // HV
    hv = task % HV
    if VARLEN:
        start, stop = bounds(cu_seqlens, cu_stride, n, T)
        place = start // segment + n
    else:
        start = tl.zeros((), tl.int64)
        stop = start + T
        place = n.to(tl.int64) * tl.cdiv(T, segment)
    w = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    c = tl.arange(0, KP)
    local += (place * HV + hv) * V * K + w[:, None] * K
    transition += (place * HV + hv) * K * K + c[:, None] * K
    in_v = w < V
    # The first segment began with a state that was known, and nothing needs the end of the last.
    for _ in range(1, tl.cdiv(stop - start, segment).to(tl.int32) - 1):
        step = HV.to(tl.int64) * K
        transition += step * K
        S = tl.load(local + step * V + c[None, :], mask=in_v[:, None] & (c < K)[None, :], other=0.0)
        for first in range(0, K, BK):
            r = first + tl.arange(0, BK)
            before = tl.load(local + r[None, :], mask=in_v[:, None] & (r < K)[None, :], other=0.0)
            phi = tl.load(transition + r[None, :], mask=(c < K)[:, None] & (r < K)[None, :], other=0.0)
            S += dot(before, tl.trans(phi), FP32, INTERPRET)
        local += step * V
        tl.store(local + c[None, :], S, mask=in_v[:, None] & (c < K)[None, :])
        tl.debug_barrier()  # other threads load what this one stored
