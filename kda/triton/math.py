"""Device helpers shared by the kernels. All arithmetic is fp32; values are rounded at loads, stores and dots only."""

import triton
import triton.language as tl

from kda.numerics import L2NORM_EPS, LOG2E, LOG_DECAY_FLOOR, MAX_EXP
from kda.triton.config import FP16_SCALE

# Kinds of product: operands in bf16, in fp16, or fp32 by three TF32 products.
BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)

BOUNDED = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
GIVEN = tl.constexpr(2)

_LOG2E = tl.constexpr(LOG2E)
_EPS = tl.constexpr(L2NORM_EPS)
_FLOOR = tl.constexpr(LOG_DECAY_FLOOR)
_MAX_EXP = tl.constexpr(MAX_EXP)
#: Operands in fp16 are at most 2, and products of decays small: scaled, they reach down to FP16_LOST.
_FP16_SCALE = tl.constexpr(FP16_SCALE)


@triton.jit
def indices(n: tl.constexpr, WIDE: tl.constexpr):
    """0..n-1 for offsets inside a tile. 32 bits do unless a stride is huge, and save a third of the registers."""
    return tl.arange(0, n).to(tl.int64) if WIDE else tl.arange(0, n)


@triton.jit
def slot_at(indices, offset, slots, given):
    """A slot of a pool by its number in a tensor, or -1: there is none, or the pool has no such slot."""
    slot = tl.load(indices + offset, mask=given != 0, other=0).to(tl.int64)  # of any dtype: -1 is 255 in one of them
    return tl.where((given != 0) & (slot < slots), slot, -1)


@triton.jit
def slot_to_read(reads, reads_n, n, slots, has_reads):
    """The slot a sequence begins from; -1 for padding."""
    n = n.to(tl.int64)
    return tl.where(has_reads != 0, slot_at(reads, n * reads_n, slots, has_reads), n)


@triton.jit
def cast(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 to `DTYPE`, to nearest even. The interpreter truncates to bf16, so there the bits are rounded first."""
    if INTERPRET and DTYPE == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def _dot(a, b, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    a, b = cast(a, DTYPE, INTERPRET), cast(b, DTYPE, INTERPRET)
    if INTERPRET:  # it multiplies the bit patterns of bf16: multiply in fp32 what was rounded as on the device
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def in_fp16_range(x):
    """Saturated at fp16's largest number; NaN stays NaN. An infinity would reach rows before it as 0 * inf."""
    x = tl.where(x > 65504.0, 65504.0, x)
    return tl.where(x < -65504.0, -65504.0, x)


@triton.jit
def dot(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b in fp32, with operands rounded as `KIND` says."""
    if KIND == BF16:
        return _dot(a, b, tl.bfloat16, INTERPRET)
    elif KIND == FP16:
        product = _dot(in_fp16_range(a * _FP16_SCALE), in_fp16_range(b * _FP16_SCALE), tl.float16, INTERPRET)
        return product * (1.0 / (_FP16_SCALE * _FP16_SCALE))
    else:
        return tl.dot(a, b, input_precision="ieee" if INTERPRET else "tf32x3")


@triton.jit
def exp(x):
    return tl.exp2(x * _LOG2E)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate in relative terms also where exp(x) vanishes beside 1."""
    e = exp(-tl.abs(x))
    one_plus = 1.0 + e
    # log1p by its rounded argument: the quotient undoes the rounding of 1 + e.
    log1p = tl.where(one_plus == 1.0, e, tl.log(one_plus) * (e / (one_plus - 1.0)))
    return tl.where(x > 0, x, 0.0) + tl.where(x == x, log1p, x)


@triton.jit
def log_decay(g, A_log, dt_bias, lower_bound, GATE: tl.constexpr):
    """Activated gate of a tile [rows, channels], floored so that a hard reset stays finite. NaN stays NaN."""
    if GATE != GIVEN:
        g += dt_bias[None, :]
        if GATE == SOFTPLUS:
            g = -softplus(g)
        # Selects, not minimum and maximum: NaN stays NaN.
        A_log = tl.where(A_log > _MAX_EXP, _MAX_EXP, A_log)
        g = g * exp(tl.where(A_log < -_MAX_EXP, -_MAX_EXP, A_log))
        if GATE == BOUNDED:
            g = lower_bound * sigmoid(g)
    return tl.where(g < _FLOOR, _FLOOR, g)


@triton.jit
def split_norm(square, normalise):
    """Rows as norm times unit vector, from their sums of squares: the norm to keep, and the factor that gives the unit.

    The norm to keep is 1 where rows are normalised.
    """
    norm = tl.where(normalise != 0, 1.0, tl.sqrt(square))
    unit = 1.0 / tl.where(normalise != 0, tl.sqrt(square + _EPS), tl.maximum(norm, 1e-18))
    return norm, unit


@triton.jit
def unit_factor(x, normalise):
    """What a vector is multiplied by to be normalised, 1 where it is taken as it is."""
    return tl.where(normalise != 0, 1.0 / tl.sqrt(tl.sum(x * x, 0) + _EPS), 1.0)


@triton.jit
def cumulative(a, TWO_TERMS: tl.constexpr):
    """Cumulative sum of a chunk's log decays [C, channels] down the rows, as two terms to be added.

    A difference of two such sums cancels: after a hard reset, what is left of fp32 is 2^-24 of the reset. With two
    terms the first holds multiples of 2^-10 (at most 2^13, so every sum and difference is exact), the second the rest.
    """
    if TWO_TERMS:
        coarse = tl.floor(a * 1024.0 + 0.5) * (1.0 / 1024.0)
        return tl.cumsum(coarse, axis=0), tl.cumsum(a - coarse, axis=0)
    return tl.cumsum(a, axis=0), tl.zeros_like(a)


@triton.jit
def since(anchor, F, R, sums, rest, d, KW: tl.constexpr, TWO_TERMS: tl.constexpr):
    """F_i - F_c for row c = anchor[i] of the chunk: [C, channels], <= 0 where the anchor is earlier.

    F and R are the chunk's two terms in registers; `sums` and `rest` hold them in memory, visible to the whole program.
    """
    at = anchor * KW + d[None, :]
    difference = F - tl.load(sums + at, mask=(d < KW)[None, :], other=0.0)
    if TWO_TERMS:
        difference += R - tl.load(rest + at, mask=(d < KW)[None, :], other=0.0)
    return difference


@triton.jit
def bounds(cu_seqlens, cu_stride, n, T):
    """First token and end of packed sequence n, clamped to the tensors."""
    cu_seqlens += n.to(tl.int64) * cu_stride
    start = tl.load(cu_seqlens).to(tl.int64)
    stop = tl.load(cu_seqlens + cu_stride).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), T)
    return start, tl.minimum(tl.maximum(stop, start), T)


@triton.jit
def sequence_of(slot, cu_seqlens, cu_stride, N, T, CHUNK: tl.constexpr):
    """The packed sequence that owns chunk slot `slot`.

    Sequence n owns the slots from start_n // CHUNK + n on, as many as it has chunks: these ranges never overlap, so no
    table and no sum over other sequences is needed. Slots between two ranges stay unused.
    """
    zero = tl.zeros((), tl.int64)
    low = zero.to(tl.int32)
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(cu_seqlens + (zero + middle) * cu_stride).to(tl.int64)
        start = tl.minimum(tl.maximum(start, 0), T)
        owns = start // CHUNK + middle <= slot
        low = tl.where(owns, middle, low)
        high = tl.where(owns, high, middle)
    return low
