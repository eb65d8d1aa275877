"""Which implementations a test is run on."""

from __future__ import annotations

import pytest
import torch

GPU = torch.cuda.is_available()

#: Implementations that are kernels, tested on a GPU where there is one, else interpreted.
KERNELS = ("triton",)
PYTORCH = ("recurrent", "chunked")


def kernels() -> list:
    """Parameters for the kernels."""
    return [pytest.param(name, marks=[pytest.mark.gpu] if GPU else []) for name in KERNELS]


def implementations() -> list:
    """Parameters for every implementation."""
    return [*PYTORCH, *kernels()]


def device(impl: str) -> str:
    """Where the tests put an implementation's tensors."""
    return "cuda" if impl in KERNELS and GPU else "cpu"


def interpreted(impl: str) -> bool:
    return impl in KERNELS and not GPU
