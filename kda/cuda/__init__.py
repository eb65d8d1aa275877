"""The fastest path on Hopper, for bf16 and K = V = 128: one fused CUTLASS kernel with the bounded gate, and decode.

`csrc` and `include` hold the kernels, `build` and `toolchain` compile them, `library` opens what they make, `fwd` and
`step` call it. Nothing of that is imported before it is needed.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kda.numerics import (
    SM90_CARRIED,
    SM90_CHANNELS,
    SM90_FP16_BITS,
    SM90_TOKENS,
    Rounding,
    exponent_margin,
    unit_roundoff,
)
from kda.problem import Facts, GateKind, Implementation, Output, Problem, StepProblem

#: Bits of exponent that the operands of a chunk need beside the gate's.
OPERAND_BITS = 20.0
#: Tokens and (sequence, head) pairs are counted in 32 bits.
MOST = 2**31 - 2**16
#: Rows of a step: the second dimension of its grid.
MOST_ROWS = 65535


def _unavailable() -> str | None:
    from kda.cuda import build

    return build.unavailable()


def _build(*, force: bool = False, verbose: bool = False) -> Path:
    from kda.cuda import build

    return build.build(force=force, verbose=verbose)


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
    gates = (torch.bfloat16, torch.float32) if facts.operation == "step" else (torch.bfloat16,)
    if facts.g_dtype not in gates:
        takes = " or ".join(map(str, gates))
        reasons.append(f"g is {facts.g_dtype}; the kernel takes {takes}.".replace("torch.", ""))
    if facts.beta_dtype not in (torch.bfloat16, torch.float32):
        reasons.append(f"beta is {facts.beta_dtype}; the kernel takes bfloat16 or float32.".replace("torch.", ""))
    for name in ("K", "V"):
        if getattr(facts, name) != SM90_CHANNELS:
            reasons.append(f"{name} is {getattr(facts, name)}; the kernel takes {SM90_CHANNELS}.")
    if facts.operation == "step":
        if facts.unaligned:
            names = ", ".join(facts.unaligned)
            reasons.append(f"{names}: rows must be contiguous and start at multiples of 16 bytes.")
        if facts.B > MOST_ROWS:
            reasons.append(f"N is {facts.B}; the kernel takes {MOST_ROWS} rows.")
        return reasons
    if facts.gate is not GateKind.BOUNDED:
        reasons.append(f"the gate is {facts.gate.value}; the kernel's exponents need lower_bound.")
    elif exponent_margin(SM90_TOKENS, facts.lower_bound or 0.0) < OPERAND_BITS:
        reasons.append(f"lower_bound is {facts.lower_bound}; the kernel's exponent budget ends just below -5.")
    if max(facts.T, facts.N * facts.HV) > MOST:
        reasons.append(f"T is {facts.T} and N * HV is {facts.N * facts.HV}; the kernel counts up to {MOST}.")
    for name in ("state_pool", "checkpoints"):
        if name in facts.unaligned:
            reasons.append(f"{name} cannot be copied, and its rows are not contiguous or not at multiples of 16 bytes.")
    if facts.requires_grad:
        reasons.append(f"{', '.join(facts.requires_grad)} requires grad; there is no backward here.")
    return reasons


def _rounding(facts: Facts) -> Rounding:
    if facts.operation == "step":
        return Rounding.uniform(torch.float32, output=facts.dtype, stored_state=facts.state_dtype, chunk=1)
    bf16 = unit_roundoff(torch.bfloat16)
    fp16 = facts.use_qk_l2norm and facts.use_beta_sigmoid  # of the inverse, the scores and Kr: see prepare.cuh
    flushed = float(torch.finfo(torch.float32).tiny) * 2.0**SM90_CARRIED
    return Rounding(
        operand=bf16,
        inverse=unit_roundoff(torch.float16) if fp16 else bf16,
        gate=2.0**-21,  # exp2 and the reciprocal of the device, and a sum of 32 log decays in fp32
        state=unit_roundoff(torch.float32),
        output=unit_roundoff(facts.dtype),
        stored_state=unit_roundoff(facts.state_dtype),
        chunk=SM90_TOKENS,
        lost=2.0 ** (-25 - SM90_FP16_BITS) if fp16 else flushed,  # Ak carries 2^-SM90_CARRIED as the state does
        flushed=flushed,
    )


def _notes(facts: Facts) -> list[str]:
    if not facts.unaligned or facts.operation == "step":
        return []
    return [f"copies {', '.join(facts.unaligned)}: rows must be contiguous and start at multiples of 16 bytes."]


@functools.cache
def _host(call: str) -> ModuleType:
    return importlib.import_module(f"kda.cuda.{call}")


def _fwd(problem: Problem) -> Output:
    return _host("fwd").fwd(problem)


def _again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor], _: object) -> Output | None:
    return _host("fwd").again(facts, memo, tensors)


def _step(problem: StepProblem) -> Tensor:
    return _host("step").step(problem)


def _step_again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor], _: object) -> Tensor | None:
    return _host("step").again(facts, memo, tensors)


IMPL = Implementation(
    name="cuda",
    summary="one fused CUTLASS kernel for Hopper, and decode; bf16, K = V = 128, the bounded gate (decode: every gate)",
    reasons=_reasons,
    rounding=_rounding,
    fwd=_fwd,
    again=_again,
    step=_step,
    step_again=_step_again,
    unavailable=_unavailable,
    build=_build,
    notes=_notes,
)
