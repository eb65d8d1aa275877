"""Which implementations a test is run on."""

from __future__ import annotations

import pytest
import torch

from kda import dispatch

GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)

#: Implementations that are kernels, tested on a GPU where there is one. Else Triton is interpreted, CUDA not run.
KERNELS = ("triton", "cuda") if HOPPER else ("triton",)
PYTORCH = ("recurrent", "chunked")


def parameter(name: str) -> object:
    missing = dispatch.implementation(name).unavailable()
    marks = [pytest.mark.gpu] if GPU else []
    return pytest.param(name, marks=[*marks, pytest.mark.skip(reason=missing)] if missing else marks)


def kernels(but: str = "") -> list:
    """Parameters for the kernels, without the one called `but`."""
    return [parameter(name) for name in KERNELS if name != but]


def implementations(but: str = "") -> list:
    """Parameters for every implementation, without the one called `but`."""
    return [*PYTORCH, *kernels(but)]


def device(impl: str) -> str:
    """Where the tests put an implementation's tensors."""
    return "cuda" if impl in KERNELS and GPU else "cpu"


def interpreted(impl: str) -> bool:
    return impl in KERNELS and not GPU
