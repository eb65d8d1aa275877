"""Constants, rounding units and the exponent budget. Each has this one home.

Triton kernels get these as compile-time constants, CUDA kernels as the header that `cuda_header` writes, tests as
tolerances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2E = math.log2(math.e)

#: Added to the sum of squares before the square root when q and k are normalised.
L2NORM_EPS = 1e-6

#: Tokens of one chunk of every chunked implementation. A sequence is always cut from its own start, so this is also
#: the reach of a NaN towards earlier tokens and the granularity at which a prefill can be split bitwise.
CHUNK = 64

#: exp of anything below is 0 in fp32. A kernel that multiplies log decays by 0 clamps them here first, so that a hard
#: reset (-inf) stays finite without changing any result.
LOG_DECAY_FLOOR = -104.0

#: Argument whose exp is finite in fp32, and that of its negative a normal number: A_log beyond either saturates instead
#: of turning 0 * inf into NaN.
MAX_EXP = 87.0

#: Bits of exponent between the smallest and the largest normal number of fp32 and bf16.
EXPONENT_BITS = 253.0


#: Of the Hopper kernel: tokens of a chunk, channels, and the power of two that its state is held below its true size.
SM90_TOKENS = 32
SM90_CHANNELS = 128
SM90_CARRIED = 40
#: And the power of two that its operands in fp16 are held above theirs, out of the reach of fp16's smallest numbers.
SM90_FP16_BITS = 12


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest in `dtype`: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Rounding:
    """Where an implementation rounds, as unit roundoffs. The tolerance of every test is derived from these.

    operand:  what enters a product (normalised keys and queries times a decay, the state, the residual).
    inverse:  the chunk's triangular inverse and its products.
    gate:     relative error of one activated log decay, and of exp.
    state:    the state's accumulator, once per token.
    output:   `o` when it is stored.
    stored_state: `final_state` when it is stored.
    chunk:    tokens folded into one update of the state; 1 for a recurrence.
    lost:     size below which a coefficient that a token enters the state with (at most 2) is lost.
    flushed:  size below which a number of the state is lost, in the state's own units.
    """

    operand: float
    inverse: float
    gate: float
    state: float
    output: float
    stored_state: float
    chunk: int
    lost: float = 0.0
    flushed: float = 0.0

    @classmethod
    def uniform(cls, dtype: torch.dtype, output: torch.dtype, stored_state: torch.dtype, chunk: int) -> Rounding:
        """All arithmetic in `dtype`; results stored as `output` and `stored_state`."""
        u = unit_roundoff(dtype)
        # A handful of roundings in the activation and the sum of log decays; exp and log are good to 2 units.
        return cls(u, u, 8 * u, u, unit_roundoff(output), unit_roundoff(stored_state), chunk)


def exponent_margin(chunk: int, lower_bound: float) -> float:
    """Bits of exponent left when `chunk` tokens of the strongest bounded gate are anchored once.

    A chunk whose keys are divided by their own cumulative decay spans `chunk * |lower_bound| * log2(e)` bits. What is
    left of the 253 bits of fp32 and bf16 is for small elements; an implementation that anchors once per chunk must
    refuse a bound whose margin is below what its operands need.
    """
    return EXPONENT_BITS - chunk * abs(lower_bound) * LOG2E


def cuda_header() -> str:
    """`kda/numerics.h` of the CUDA kernels: every number of this module under its name, in namespace `kda`."""
    lines = []
    for name, value in globals().items():
        if name.isupper() and isinstance(value, (int, float)):
            kind, text = ("int", str(value)) if isinstance(value, int) else ("float", f"{value!r}f")
            lines.append(f"inline constexpr {kind} {name} = {text};")
    start = "// Generated from kda/numerics.py, the one home of these numbers."
    return "\n".join([start, "#pragma once", "", "namespace kda {", *lines, "}  // namespace kda", ""])
