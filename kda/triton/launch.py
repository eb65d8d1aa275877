"""Launches that are made again with tensors of the same kind elsewhere.

Triton finds the compiled kernel by looking at some seventy arguments, which takes longer than all else in a short call.
What it found is kept, and given addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

#: Triton compiles for pointers that are multiples of this, and for others.
ALIGNMENT = 16


def aligned(addresses: Sequence[int]) -> bool:
    """Whether a kernel compiled for aligned pointers may be given these. 0 stands for what is not there."""
    return not reduce(or_, addresses) % ALIGNMENT


class Launch:
    """A compiled kernel with all its arguments but the tensors, which come first."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...]) -> None:
        """kernel: what Triton's launch returned; rest: its arguments after the tensors, constants included."""
        self._launch, self._rest = kernel[grid], rest

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        self._launch(*addresses, *self._rest, stream=stream)


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor | None],
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    **options: Any,
) -> Launch | None:
    """Launch `kernel`; None where it cannot be launched again by addresses: interpreted, or for odd pointers."""
    grid = (programs, 1, 1)
    compiled = kernel[grid](*tensors, *numbers, **constants, **options)
    if constants["INTERPRET"] or not aligned([0 if x is None else x.data_ptr() for x in tensors]):
        return None
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    return Launch(compiled, grid, (*numbers, *(constants[name] for name in names)))
