"""Where tensors lie, and whether a buffer may be written there."""

from __future__ import annotations

import torch
from torch import Tensor


def _axes(x: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of every axis that moves, smallest stride first, in elements."""
    return sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)


def _reach(axes: list[tuple[int, int]]) -> int:
    """Offset of the last element."""
    return sum(stride * (size - 1) for stride, size in axes)


def extent(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of x and of the one after its last; the same twice where there is nothing."""
    start = 0 if x.is_meta else x.data_ptr()
    if x.is_meta or x.numel() == 0:
        return start, start
    last = 0
    for stride, size in zip(x.stride(), x.shape, strict=True):
        last += stride * (size - 1)
    return start, start + (last + 1) * x.element_size()


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two extents have a byte in common."""
    return a[0] < b[1] and b[0] < a[1] and a[0] < a[1] and b[0] < b[1]


def _repeats_itself(x: Tensor) -> bool:
    """Whether two indices may share an element: an axis that does not step over all the smaller ones."""
    axes = _axes(x)
    return any(stride <= _reach(axes[:n]) for n, (stride, _) in enumerate(axes))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose extents meet may share memory. Exact for views side by side in rows of one tensor."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    (a_axes, a_size), (b_axes, b_size) = (
        ([(stride * x.element_size(), n) for stride, n in _axes(x)], x.element_size()) for x in (a, b)
    )
    for row in {stride for stride, _ in a_axes + b_axes if stride > 0}:
        # Seen modulo a common row length, each is an interval, unless an axis cuts across the rows.
        intervals = []
        for start, axes, size in ((a_start, a_axes, a_size), (b_start, b_axes, b_size)):
            inner = [axis for axis in axes if axis[0] % row]
            first = (start - a_start) % row
            intervals.append((first, first + _reach(inner) + size))
        (a_first, a_last), (b_first, b_last) = intervals
        if max(a_last, b_last) <= row and (a_last <= b_first or b_last <= a_first):
            return False
    return True


def same(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if a is None or a.data_ptr() != b.data_ptr() or a.dtype != b.dtype:
        return False
    return a.shape == b.shape and a.stride() == b.stride()


def require_writable(
    name: str, buffer: Tensor, readers: dict[str, Tensor], extents: dict[str, tuple[int, int]]
) -> None:
    """A buffer may be strided, but must not hold an element twice nor lie on a tensor that is still to be read."""
    if buffer.is_neg():
        raise ValueError(f"{name}: expected a plain buffer, got a negated view; pass the tensor it is a view of")
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: expected a normal tensor, got one made in inference mode; call inside inference mode"
        )
    if _repeats_itself(buffer):
        raise ValueError(
            f"{name}: expected a buffer with one element per index, got an expanded or overlapping view; clone() it"
        )
    for other, tensor in readers.items():
        if meet(extents[name], extents[other]) and _overlap(buffer, tensor):
            raise ValueError(f"{name}: expected memory of its own, got some of {other}'s; pass a buffer elsewhere")


def require_buffers(tensors: dict[str, Tensor], written: dict[str, str]) -> None:
    """Every tensor that is written lies on none of the others, unless it is exactly the one that `written` names."""
    there = [name for name in written if name in tensors]
    extents = {name: extent(x) for name, x in tensors.items()} if there else {}
    for n, name in enumerate(there):
        others = {other: x for other, x in tensors.items() if other not in there[n:]}  # each pair once
        if same(others.get(written[name]), tensors[name]):
            others.pop(written[name])
        require_writable(name, tensors[name], others, extents)
