"""The portable fast path: a chunked forward in Triton, for every gate and shape up to 256 channels.

`math` holds the device helpers, `prepare` and `recur` the two kernels (the stages of `kda.ref.chunked`), `config` the
one table of tiles, `forward` the host side; `split` says where a few long chains are cut into segments, whose states
`merge` joins; `step` is the decode step. Triton itself is imported with the first call.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from kda.numerics import Rounding, unit_roundoff
from kda.problem import Apart, Facts, Implementation, Output, Problem, StepProblem
from kda.triton.config import FP16_LOST, TOKENS

MAX_CHANNELS = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; `pip install triton` (Linux only)."
    return None


def _reasons(facts: Facts) -> list[str]:
    reasons = []
    if facts.device != "cuda" and not (facts.device == "cpu" and facts.triton_interpreter):
        reasons.append(f"q is on a {facts.device} device; Triton runs on CUDA and ROCm GPUs.")
    if facts.device == "cuda" and not facts.rocm and facts.capability is not None and facts.capability < (8, 0):
        major, minor = facts.capability
        reasons.append(f"the GPU has compute capability {major}.{minor}; the kernels need 8.0 or newer.")
    if facts.dtype not in DTYPES:
        reasons.append(f"q is {facts.dtype}; the kernels take bfloat16, float16 and float32.".replace("torch.", ""))
    for name in ("K", "V"):
        size = getattr(facts, name)
        if size > MAX_CHANNELS:
            reasons.append(f"{name} is {size}; the kernels keep a state of at most {MAX_CHANNELS} x {MAX_CHANNELS}.")
    if facts.requires_grad:
        reasons.append(f"{', '.join(facts.requires_grad)} requires grad; there is no backward here yet.")
    return reasons


def _rounding(facts: Facts) -> Rounding:
    if facts.operation == "step":  # no product of the tensor cores, and no chunk
        return Rounding.uniform(torch.float32, output=facts.dtype, stored_state=facts.state_dtype, chunk=1)
    bf16 = facts.dtype == torch.bfloat16
    fp32 = unit_roundoff(torch.float32)
    return Rounding(
        operand=unit_roundoff(torch.bfloat16) if bf16 else 8 * fp32,  # fp16 and fp32: 3xTF32
        inverse=unit_roundoff(torch.float16) if bf16 else 8 * fp32,
        gate=2.0**-21,  # exp and log of the device, and the rounding of a cumulative sum
        state=fp32,
        output=unit_roundoff(facts.dtype),
        stored_state=unit_roundoff(facts.state_dtype),
        chunk=TOKENS,
        lost=FP16_LOST if bf16 else 0.0,
    )


def _fwd(problem: Problem) -> Output:
    from kda.triton.forward import fwd

    return fwd(problem)


def _step(problem: StepProblem) -> Tensor:
    from kda.triton.step import step

    return step(problem)


def _again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor], apart: Apart) -> Output | None:
    if "triton" not in memo:
        return None
    from kda.triton.forward import again

    return again(facts, memo, tensors, apart)


def _step_again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor], apart: Apart) -> Tensor | None:
    if "triton" not in memo:
        return None
    from kda.triton.step import again

    return again(memo, tensors, apart)


IMPL = Implementation(
    name="triton",
    summary="chunked Triton kernels and the decode step; every gate, bf16/fp16/fp32, K and V up to 256",
    reasons=_reasons,
    rounding=_rounding,
    fwd=_fwd,
    unavailable=_unavailable,
    again=_again,
    step=_step,
    step_again=_step_again,
)
