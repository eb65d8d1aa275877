"""The SM90 path. So far a capability record: which calls it is for, and that it is not built yet."""

from __future__ import annotations

import torch

from kda.numerics import Rounding, exponent_margin
from kda.problem import Facts, GateKind, Implementation, Output, Problem

CHANNELS = 128
#: Tokens between two anchors of the bounded gate's exponent, and the bits its operands need beside the gate's.
ANCHORED = 32
OPERAND_BITS = 20.0


def _unavailable() -> str | None:
    return "not built yet."


def _reasons(facts: Facts) -> list[str]:
    reasons = []
    if facts.device != "cuda" or facts.rocm:
        where = "a ROCm GPU" if facts.rocm and facts.device == "cuda" else f"a {facts.device} device"
        reasons.append(f"q is on {where}; the kernel runs on NVIDIA Hopper GPUs.")
    elif facts.capability != (9, 0):
        major, minor = facts.capability or (0, 0)
        reasons.append(f"the GPU has compute capability {major}.{minor}; the kernel is built for 9.0 (H100, H200).")
    if facts.dtype != torch.bfloat16:
        reasons.append(f"q is {facts.dtype}; the kernel takes bfloat16.".replace("torch.", ""))
    if facts.g_dtype != torch.bfloat16:
        reasons.append(f"g is {facts.g_dtype}; the kernel takes bfloat16.".replace("torch.", ""))
    if facts.beta_dtype not in (torch.bfloat16, torch.float32):
        reasons.append(f"beta is {facts.beta_dtype}; the kernel takes bfloat16 or float32.".replace("torch.", ""))
    for name in ("K", "V"):
        if getattr(facts, name) != CHANNELS:
            reasons.append(f"{name} is {getattr(facts, name)}; the kernel takes {CHANNELS}.")
    if facts.gate is not GateKind.BOUNDED:
        reasons.append(f"the gate is {facts.gate.value}; the kernel's exponents need lower_bound.")
    elif exponent_margin(ANCHORED, facts.lower_bound or 0.0) < OPERAND_BITS:
        reasons.append(f"lower_bound is {facts.lower_bound}; the kernel's exponent budget ends just below -5.")
    if facts.requires_grad:
        reasons.append(f"{', '.join(facts.requires_grad)} requires grad; there is no backward here.")
    return reasons


def _rounding(facts: Facts) -> Rounding:
    return Rounding.uniform(torch.bfloat16, output=facts.dtype, stored_state=facts.state_dtype, chunk=ANCHORED)


def _fwd(problem: Problem) -> Output:
    raise RuntimeError("kda.cuda is not built yet; the dispatcher never chooses it")


IMPL = Implementation(
    name="cuda",
    summary="one fused CUTLASS kernel for Hopper; bounded gate, bf16, K = V = 128",
    reasons=_reasons,
    rounding=_rounding,
    fwd=_fwd,
    unavailable=_unavailable,
)
