"""The one table of tiles. No autotuning: the same device, shape and dtype always run the same code."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda.numerics import CHUNK, LOG2E, exponent_margin
from kda.problem import Facts, GateKind

#: Tokens of one program of the first kernel, and of its chunks.
BLOCK = CHUNK
TOKENS = CHUNK // 2


@dataclass(frozen=True)
class Tiles:
    """block_k, prepare_warps: of the first kernel; the rest: of the second."""

    block_k: int
    prepare_warps: int
    block_v: int
    recur_warps: int
    recur_stages: int


#: (architecture, products in bf16, K rounded up to a power of two) -> tiles. `hopper` was tuned on an H200 and may use
#: 227 KB of shared memory; `any` fits into the 99 KB of consumer GPUs.
TABLE = {
    ("hopper", True, 16): Tiles(16, 4, 64, 4, 3),
    ("hopper", True, 32): Tiles(32, 4, 64, 4, 3),
    ("hopper", True, 64): Tiles(64, 4, 64, 4, 3),
    ("hopper", True, 128): Tiles(64, 4, 64, 4, 3),
    ("hopper", True, 256): Tiles(64, 4, 64, 8, 2),
    ("hopper", False, 16): Tiles(16, 4, 32, 4, 1),
    ("hopper", False, 32): Tiles(32, 4, 32, 4, 1),
    ("hopper", False, 64): Tiles(32, 4, 32, 4, 1),
    ("hopper", False, 128): Tiles(32, 4, 32, 4, 1),
    ("hopper", False, 256): Tiles(32, 4, 16, 8, 1),
    ("any", True, 16): Tiles(16, 4, 32, 4, 1),
    ("any", True, 32): Tiles(32, 4, 32, 4, 1),
    ("any", True, 64): Tiles(32, 4, 32, 4, 1),
    ("any", True, 128): Tiles(32, 4, 32, 4, 1),
    ("any", True, 256): Tiles(32, 4, 32, 4, 1),
    ("any", False, 16): Tiles(16, 4, 32, 4, 1),
    ("any", False, 32): Tiles(32, 4, 32, 4, 1),
    ("any", False, 64): Tiles(32, 4, 32, 4, 1),
    ("any", False, 128): Tiles(32, 4, 16, 4, 1),
    ("any", False, 256): Tiles(32, 4, 16, 8, 1),
}

#: Shared memory of one program, bytes, that an architecture's rows may use.
SHARED_MEMORY = {"hopper": 232448, "any": 101376}


def architecture(capability: tuple[int, int] | None) -> str:
    """The part of the table for a CUDA compute capability; ROCm and the interpreter have none."""
    return "hopper" if capability is not None and capability[0] == 9 else "any"


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and at least 16, the smallest side of a dot."""
    return max(16, 1 << (n - 1).bit_length())


def tiles(facts: Facts) -> Tiles:
    """The row of the table for a call: its device, q's dtype and K."""
    arch = "any" if facts.rocm else architecture(facts.capability)
    return TABLE[arch, facts.dtype == torch.bfloat16, power_of_two(facts.K)]


#: What operands in fp16 are multiplied by, and the size below which one is lost: half of fp16's smallest number.
FP16_SCALE = 4096.0
FP16_LOST = 2.0**-25 / FP16_SCALE

#: Bits of exponent that a chunk of a bounded gate must leave for its operands to be anchored by constants.
ANCHORED_MARGIN = 20.0

#: The most channels at a time of a triangle that is anchored.
ANCHORED_K = 128


def anchor(facts: Facts) -> int | None:
    """log2 of what rows of the second half of a chunk are anchored by; None where the gate could leave the exponent."""
    if facts.gate is not GateKind.BOUNDED or facts.dtype != torch.bfloat16:  # fp32 would lose digits to what is masked
        return None
    bound = facts.lower_bound or 0.0
    if exponent_margin(TOKENS, bound) < ANCHORED_MARGIN:
        return None
    return round(TOKENS // 2 * abs(bound) * LOG2E)


#: Of the merge: elements of Phi at a time, rows of the state, warps.
MERGE_TILE = 128 * 128
MERGE_V = 16
MERGE_WARPS = 8
