"""Device helpers shared by the kernels. All arithmetic is fp32; values are rounded at loads, stores and dots only."""

import math

import triton
import triton.language as tl

from kda import numerics
from kda.triton.config import FP16_SCALE

# Kinds of product: operands in bf16, in fp16, or fp32 by three TF32 products.
BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
FP32 = tl.constexpr(2)

BOUNDED = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
GIVEN = tl.constexpr(2)

LOG2E = tl.constexpr(numerics.LOG2E)
_EPS = tl.constexpr(numerics.L2NORM_EPS)
_FLOOR = tl.constexpr(numerics.LOG_DECAY_FLOOR)
_MAX_EXP = tl.constexpr(numerics.MAX_EXP)
#: Times log decays, of at most 104: fp16 holds them.
SUM_UNIT = tl.constexpr(512.0)
#: Operands in fp16 are at most 2, and products of decays small: scaled, they reach down to FP16_LOST.
_FP16_SCALE = tl.constexpr(FP16_SCALE)
_FP16_BITS = tl.constexpr(math.log2(FP16_SCALE))


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
def in_fp16_range(x):
    """Saturated at fp16's largest number; NaN stays NaN. An infinity would reach rows before it as 0 * inf."""
    x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(KIND: tl.constexpr):
    """What operands are multiplied by."""
    return _FP16_SCALE if KIND == FP16 else 1.0


@triton.jit
def log2_scale_of(KIND: tl.constexpr):
    return _FP16_BITS if KIND == FP16 else 0.0


@triton.jit
def fitted(x, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """What was multiplied already, as an operand."""
    if KIND == BF16:
        return cast(x, tl.bfloat16, INTERPRET)
    elif KIND == FP16:
        return in_fp16_range(x).to(tl.float16)
    else:
        return x.to(tl.float32)


@triton.jit
def below_16(x, KIND: tl.constexpr):
    """The same for FP16 and FP32 where it is known to be in range before it was multiplied, or is NaN."""
    return x.to(tl.float16) if KIND == FP16 else x


@triton.jit
def operand(x, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """x as `product` takes it, rounded as `KIND` says."""
    return fitted(x * _FP16_SCALE if KIND == FP16 else x, KIND, INTERPRET)


@triton.jit
def raw_product(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b in fp32, of operands as they are multiplied."""
    if KIND == FP32:
        return tl.dot(a, b, input_precision="ieee" if INTERPRET else "tf32x3")
    if INTERPRET:  # it multiplies the bit patterns of bf16: multiply in fp32 what was rounded as on the device
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def product(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b in fp32, of operands."""
    ab = raw_product(a, b, KIND, INTERPRET)
    if KIND == FP16:
        ab *= 1.0 / (_FP16_SCALE * _FP16_SCALE)
    return ab


@triton.jit
def dot(a, b, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b in fp32, with operands rounded as `KIND` says."""
    return product(operand(a, KIND, INTERPRET), operand(b, KIND, INTERPRET), KIND, INTERPRET)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


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
def log_decay(g, A_log, dt_bias, lower_bound, GATE: tl.constexpr, FLOORED: tl.constexpr = True):
    """Activated gate of a tile [rows, channels], floored so that a hard reset stays finite. NaN stays NaN."""
    if GATE != GIVEN:
        # Selects, not minimum and maximum: NaN stays NaN.
        A_log = tl.where(A_log > _MAX_EXP, _MAX_EXP, A_log)
        rate = exp(tl.where(A_log < -_MAX_EXP, -_MAX_EXP, A_log))
        g += dt_bias[None, :]
        if GATE == SOFTPLUS:
            g = -softplus(g) * rate
        else:
            # The reciprocal as that of a square root of the square: one instruction, where a division takes eight.
            denominator = 1.0 + tl.exp2(g * (-LOG2E * rate))
            g = lower_bound * tl.rsqrt(denominator * denominator)
    return tl.where(g < _FLOOR, _FLOOR, g) if FLOORED else g


@triton.jit
def split_norm(square, normalise):
    """Rows as norm times unit vector, from their sums of squares: the norm to keep, and the factor that gives the unit.

    The norm to keep is 1 where rows are normalised.
    """
    unit = tl.rsqrt(tl.where(normalise != 0, square + _EPS, tl.maximum(square, 1e-36)))
    return tl.where(normalise != 0, 1.0, square * unit), unit


@triton.jit
def unit_factor(x, normalise):
    """What a vector is multiplied by to be normalised, 1 where it is taken as it is."""
    return tl.where(normalise != 0, 1.0 / tl.sqrt(tl.sum(x * x, 0) + _EPS), 1.0)


@triton.jit
def two_terms(a):
    """Log decays as two terms to be added, of which cumulative sums are made.

    A difference of two such sums cancels: after a hard reset, what is left of fp32 is 2^-24 of the reset. With two
    terms the first holds multiples of 2^-10 (at most 2^13, so every sum and difference is exact), the second the rest.
    """
    coarse = tl.floor(a * 1024.0 + 0.5) * (1.0 / 1024.0)
    return coarse, a - coarse


@triton.jit
def by_chunks(x, C: tl.constexpr):
    """A tile [rows, channels] as [chunks, C, channels]."""
    return tl.reshape(x, (x.shape[0] // C, C, x.shape[1]))


@triton.jit
def cumulative(a, C: tl.constexpr):
    """Cumulative sums of a tile's log decays [rows, channels] down the rows of each chunk."""
    return tl.reshape(tl.cumsum(by_chunks(a, C), axis=1), (a.shape[0], a.shape[1]))


@triton.jit
def to_end(total, F, C: tl.constexpr):
    """What is left from each row to its chunk's end, of sums F and the chunks' totals [chunks, channels]."""
    to = tl.broadcast_to(total[:, None, :], (total.shape[0], C, total.shape[1]))
    return tl.reshape(to, (F.shape[0], F.shape[1])) - F


@triton.jit
def summed(which, a, INTERPRET: tl.constexpr):
    """Sums of a tile's log decays in SUM_UNIT: those of the rows of `which`, which is 0 or 1. By the tensor cores.

    As two terms in fp16, together of 22 bits; their sum is exact but for fp32's own rounding.
    """
    high = a.to(tl.float16)
    low = (a - high.to(tl.float32)).to(tl.float16)
    which = tl.where(which, 1.0, 0.0).to(tl.float16)
    if INTERPRET:
        which, high, low = which.to(tl.float32), high.to(tl.float32), low.to(tl.float32)
    return tl.dot(which, low, tl.dot(which, high))


@triton.jit
def since(anchor, F, R, sums, rest, d, KW: tl.constexpr, TWO_TERMS: tl.constexpr):
    """F_i - F_c for row c = anchor[i] of the tile: [rows, channels], <= 0 where the anchor is earlier.

    F and R are the two terms in registers; `sums` and `rest` hold them in memory, visible to the whole program.
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
def piece_of(place, cu_seqlens, cu_stride, N, T, size, VARLEN: tl.constexpr):
    """The sequence that owns a place for pieces of `size` tokens, and the number of the piece in it.

    Packed sequence n owns the places from start_n // size + n on, as many as it has pieces and at least one: these
    ranges never overlap, so no table and no sum over other sequences is needed. Places between two ranges stay unused:
    there the piece lies behind the sequence's end.
    """
    if VARLEN:
        zero = tl.zeros((), tl.int64)
        low = zero.to(tl.int32)
        high = low + N
        begin = zero
        while high - low > 1:
            middle = (low + high) // 2
            start = tl.load(cu_seqlens + (zero + middle) * cu_stride).to(tl.int64)
            start = tl.minimum(tl.maximum(start, 0), T)
            owns = start // size + middle <= place
            low = tl.where(owns, middle, low)
            high = tl.where(owns, high, middle)
        begin, _ = bounds(cu_seqlens, cu_stride, low, T)
        return low, (place - (begin // size + low)).to(tl.int32)
    else:
        pieces = tl.cdiv(T, size)
        return place // pieces, place % pieces
