"""A call's layout, validated and dispatched once: what is remembered of it, so that the next such call costs little.

Facts decide everything, so a call with the same shapes, strides, dtypes, devices and flags differs from an earlier one
in addresses and contents alone. Of these only two matter: whether a buffer lies on another tensor, and what
`validate.contents` reads.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kda import validate
from kda.problem import VECTOR, Layout, Problem

#: Kinds of call that are remembered; then all are forgotten.
MOST = 1024

#: The tensors of a call, in `kda.fwd`'s order, and those of them that are written.
TENSORS = (
    *("q", "k", "v", "g", "beta", "out", "A_log", "dt_bias"),
    *("initial_state", "final_state", "cu_seqlens"),
)
_OUT, _FINAL = TENSORS.index("out"), TENSORS.index("final_state")
_INITIAL = TENSORS.index("initial_state")
_PARAMETERS = (TENSORS.index("A_log"), TENSORS.index("dt_bias"))
#: What rows of vectors are asked of; see `problem.aligned`.
_ROWS = tuple(TENSORS.index(name) for name in ("q", "k", "v", "g", "out", "initial_state", "final_state"))

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Plan:
    """impl: name of the implementation. fields: of the problem, but for the tensors. bytes: each tensor's extent.

    views: shapes of A_log and dt_bias in the problem, where the caller's are others.
    """

    impl: str
    fields: dict[str, Any]
    bytes: tuple[int, ...]
    views: tuple[tuple[str, tuple[int, ...]], ...]

    def problem(self, tensors: Tensors) -> Problem | None:
        """The problem of a call with the plan's signature; None if its addresses need a closer look."""
        starts = [0 if x is None else x.data_ptr() for x in tensors]
        for i in _ROWS:
            if starts[i] % VECTOR:
                return None
        sizes = self.bytes
        for buffer in (_OUT, _FINAL):
            start, stop = starts[buffer], starts[buffer] + sizes[buffer]
            if start == stop:
                continue
            for other, at in enumerate(starts):
                if other != buffer and at < stop and start < at + sizes[other]:
                    in_place = buffer + other == _INITIAL + _FINAL and start == at
                    if not in_place or tensors[_INITIAL].stride() != tensors[_FINAL].stride():  # type: ignore[union-attr]
                        return None
        problem = object.__new__(Problem)  # as its constructor would, in a tenth of the time
        fields = problem.__dict__
        fields.update(self.fields)
        fields.update(zip(TENSORS, tensors, strict=True))
        for name, shape in self.views:
            fields[name] = fields[name].view(shape)
        offsets = fields.pop("cu_seqlens")
        if offsets is not None:
            fields["layout"] = replace(self.fields["layout"], cu_seqlens=offsets)
        validate.contents(fields["q"], fields["g"], self.fields["facts"].gate, offsets)
        return problem


def signature(tensors: Tensors, *rest: Hashable) -> Hashable | None:
    """What two calls share that one plan serves; None for a call that must always be looked at."""
    try:
        parts: list[Hashable] = [torch.is_inference_mode_enabled(), *rest, *map(type, rest)]
        grad = torch.is_grad_enabled()
        for x in tensors:
            if x is None:
                parts.append(None)
                continue
            if x.is_neg() or (grad and x.requires_grad) or x.layout != torch.strided:
                return None
            parts.append((x.shape, x.stride(), x.dtype, x.device, x.is_inference()))
        key = tuple(parts)
        hash(key)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no tensors, or not of the kind that has strides: validation says
        return None
    return key


def plan_of(impl: str, problem: Problem, tensors: Tensors) -> Plan | None:
    """What is remembered of a validated call; None where validation had to copy something or addresses are odd."""
    views = []
    for i in _PARAMETERS:
        given, used = tensors[i], getattr(problem, TENSORS[i])
        if given is not None and given.shape != used.shape:
            views.append((TENSORS[i], tuple(used.shape)))
        if given is not None and (given.data_ptr() != used.data_ptr() or not given.is_contiguous()):
            return None
    if problem.facts.unaligned:
        return None
    fields = {name: value for name, value in problem.__dict__.items() if name not in TENSORS}
    extents = [(0, 0) if x is None else validate.extent(x) for x in tensors]
    fields["layout"] = Layout(problem.layout.batch, problem.layout.tokens, None)
    return Plan(impl, fields, tuple(stop - start for start, stop in extents), tuple(views))
