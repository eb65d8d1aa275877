"""A call's layout, validated and dispatched once: what is remembered of it, so that the next such call costs little.

Facts decide everything, so a call with the same shapes, strides, dtypes, devices and flags differs from an earlier one
in addresses and contents alone. Of these only two matter: whether a buffer lies on another tensor, and what
`validate.contents` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kda import validate
from kda.problem import TENSORS, VECTOR, Facts, Implementation, Layout, Output, Problem

#: Kinds of call that are remembered; then all are forgotten.
MOST = 1024

_OUT, _INITIAL, _FINAL, _OFFSETS = (
    TENSORS.index(name) for name in ("out", "initial_state", "final_state", "cu_seqlens")
)
_BUFFERS = (_OUT, _FINAL)
_PARAMETERS = (TENSORS.index("A_log"), TENSORS.index("dt_bias"))
#: Those whose rows are asked to be of whole vectors; see `problem.aligned`.
_ROWS = frozenset(TENSORS.index(name) for name in ("q", "k", "v", "g", "out", "initial_state", "final_state"))

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Plan:
    """impl:  name of the implementation.
    fields: of the problem, but for the tensors.
    extents: index and bytes of every tensor that is there, and whether its rows are asked to be of whole vectors.
    views:  shapes of A_log and dt_bias in the problem, where the caller's are others.
    """

    impl: str
    fields: dict[str, Any]
    extents: tuple[tuple[int, int, bool], ...]
    views: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def facts(self) -> Facts:
        return cast(Facts, self.fields["facts"])

    def addresses(self, tensors: Tensors) -> list[int] | None:
        """Of a call with the plan's signature, 0 for what is not there; None if they need a closer look."""
        addresses = [0] * len(tensors)
        spans = []
        bits = 0
        for i, size, row in self.extents:
            start = addresses[i] = tensors[i].data_ptr()  # type: ignore[union-attr]
            if row:
                bits |= start
            spans.append((i, start, start + size))
        if bits % VECTOR:
            return None
        for buffer, own_start, own_stop in spans:  # `validate.meet` in line: 20 calls of it are 1 us
            if buffer in _BUFFERS:
                for i, start, stop in spans:
                    if start < own_stop and own_start < stop and i != buffer and not _in_place(i, buffer, tensors):
                        return None
        return addresses

    def run(
        self,
        implementation: Implementation,
        tensors: Tensors,
        addresses: list[int],
        fallback: Callable[[Implementation, Problem], Output],
    ) -> Output:
        """The call, by the implementation's own short cut if it has one; `fallback` runs it as any other."""
        facts, again = self.facts, implementation.again
        validate.contents(tensors[0], tensors[3], facts.gate, tensors[_OFFSETS])  # type: ignore[arg-type]
        result = None if again is None else again(facts, self.fields["memo"], tensors, addresses)
        return fallback(implementation, self.problem(tensors)) if result is None else result

    def problem(self, tensors: Tensors) -> Problem:
        """The problem of a call with the plan's signature."""
        problem = object.__new__(Problem)  # as its constructor would, in a tenth of the time
        fields = problem.__dict__
        fields.update(self.fields)
        fields.update(zip(TENSORS, tensors, strict=True))
        for name, shape in self.views:
            fields[name] = fields[name].view(shape)
        offsets = fields.pop("cu_seqlens")
        if offsets is not None:
            layout = self.fields["layout"]
            fields["layout"] = Layout(layout.batch, layout.tokens, offsets)
        return problem


def _in_place(i: int, buffer: int, tensors: Tensors) -> bool:
    """Whether a buffer that lies on another tensor is the state, updated where it is."""
    initial, final = tensors[_INITIAL], tensors[_FINAL]
    return buffer == _FINAL and i == _INITIAL and final is not None and validate.same(initial, final)


def signature(tensors: Tensors, *rest: Hashable) -> Hashable | None:
    """What two calls share that one plan serves; None for a call that must always be looked at.

    It may hold what cannot be hashed: then the arguments are wrong, and validation says how.
    """
    parts: list[Hashable] = [torch.is_inference_mode_enabled(), *rest, *map(type, rest)]
    grad = torch.is_grad_enabled()
    try:
        for x in tensors:
            if x is None:
                parts.append(None)
            elif x.is_neg() or (grad and x.requires_grad):
                return None
            else:
                parts += (x.shape, x.stride(), x.dtype, x.device)
        for buffer in (tensors[_OUT], tensors[_FINAL]):
            parts.append(buffer is not None and buffer.is_inference())
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or none that has strides: validation says what
        return None
    return tuple(parts)


def find(plans: Mapping[Hashable, Plan], key: Hashable | None) -> Plan | None:
    """The plan of a signature, if there is one."""
    try:
        return plans.get(key)
    except TypeError:  # not hashable
        return None


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
    fields["layout"] = Layout(problem.layout.batch, problem.layout.tokens, None)
    extents = []
    for i, x in enumerate(tensors):
        if x is not None:
            start, stop = validate.extent(x)
            extents.append((i, stop - start, i in _ROWS))
    return Plan(impl, fields, tuple(extents), tuple(views))
