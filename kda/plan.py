"""A call's layout, validated and dispatched once: what is remembered of it, so that the next such call costs little.

Facts decide everything, so a call with the same shapes, strides, dtypes, devices and flags differs from an earlier one
in addresses and contents alone. Of these three matter: whether a buffer lies on another tensor, whether rows are
aligned, and what validation reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kda import validate
from kda.problem import (
    ABSENT,
    STEP_TENSORS,
    TENSORS,
    VECTOR,
    Facts,
    GateKind,
    Implementation,
    Layout,
    Mark,
    Output,
    Problem,
    StepProblem,
    mark,
)

#: Calls that are remembered; then all are forgotten.
MOST = 1024

_OFFSETS, _READS = TENSORS.index("cu_seqlens"), TENSORS.index("state_indices")
_OUT, _INITIAL, _FINAL, _POOL, _KEPT = (
    TENSORS.index(name) for name in ("out", "initial_state", "final_state", "state_pool", "checkpoints")
)
_STEP_STATE, _STEP_OUT = STEP_TENSORS.index("state"), STEP_TENSORS.index("out")
_STEP_INDICES = slice(STEP_TENSORS.index("state_indices"), STEP_TENSORS.index("fresh") + 1)
#: Those whose rows are asked to be of whole vectors; see `problem.aligned`.
_rows = itemgetter(*(TENSORS.index(name) for name in validate.ROWS if name in TENSORS))
_step_rows = itemgetter(*(STEP_TENSORS.index(name) for name in validate.ROWS if name in STEP_TENSORS))
_address = Tensor.data_ptr
_is_nested = attrgetter("is_nested")

Tensors = tuple[Tensor | None, ...]
Views = tuple[tuple[str, tuple[int, ...]], ...]
P = TypeVar("P", "Plan", "StepPlan")


@dataclass(frozen=True)
class _Remembered:
    """impl:  name of the implementation.
    alike:  whether other tensors have what decides in common with the plan's; `ABSENT` for what is not there.
    fields: of the problem, but for the tensors.
    sizes:  bytes from the first to the last of every tensor, 0 for what is not there.
    views:  shapes of A_log and dt_bias in the problem, where the caller's are others.
    """

    impl: str
    alike: Callable[..., bool]
    fields: dict[str, Any]
    sizes: tuple[int, ...]
    views: Views


@dataclass(frozen=True)
class Plan(_Remembered):
    """Of a forward.

    facts: of the problem.
    reads: whether validation has contents to look at.
    """

    facts: Facts
    reads: bool

    def run(
        self,
        implementation: Implementation,
        tensors: list[Tensor],
        fallback: Callable[[Implementation, Problem], Output],
    ) -> Output | None:
        """A call that the plan serves: by the implementation's short cut if it has one, else by `fallback`.

        None if it needs a closer look.
        """
        facts = self.facts
        if self.reads:
            offsets = tensors[_OFFSETS] if facts.varlen else None
            slots = None if type(tensors[_READS]) is Mark else tensors[_READS]
            validate.contents(tensors[0], tensors[3], facts.gate, offsets, slots)
            if (facts.pool or facts.checkpoint_dtype is not None) and validate.looks_at_contents(tensors[0]):
                validate.state_contents(self.problem(tensors))
        if implementation.again is not None:
            done = implementation.again(facts, self.fields["memo"], tensors, self.apart)
            if done is not None:
                return done
        return fallback(implementation, self.problem(tensors)) if self.apart(tensors) else None

    def apart(self, tensors: list[Tensor]) -> bool:
        """Whether all is aligned, and no buffer lies on another tensor unless it is one that it may be exactly."""
        addresses = [*map(_address, tensors)]
        if reduce(or_, _rows(addresses)) % VECTOR:
            return False
        sizes = [*self.sizes]
        if validate.same(tensors[_INITIAL], tensors[_FINAL]):
            sizes[_INITIAL] = 0
        if validate.same(tensors[_POOL], tensors[_KEPT]):
            sizes[_KEPT] = 0
        return all(_alone(buffer, addresses, sizes) for buffer in (_OUT, _FINAL, _POOL, _KEPT))

    def problem(self, tensors: list[Tensor]) -> Problem:
        """The problem of a call that the plan serves."""
        problem = object.__new__(Problem)  # as its constructor would, in a tenth of the time
        fields = problem.__dict__
        _fill(fields, self.fields, TENSORS, tensors, self.views)
        offsets = fields.pop("cu_seqlens")
        if offsets is not None:
            layout = self.fields["layout"]
            fields["layout"] = Layout(layout.batch, layout.tokens, offsets)
        return problem


@dataclass(frozen=True)
class StepPlan(_Remembered):
    """Of a step."""

    def run(
        self,
        implementation: Implementation,
        tensors: list[Tensor],
        run: Callable[[Implementation, StepProblem], Tensor],
    ) -> Tensor | None:
        """A call that the plan serves, by `run`; None if it needs a closer look."""
        if validate.looks_at_contents(tensors[0]):
            indices = (None if type(x) is Mark else x for x in all_of_step(tensors)[_STEP_INDICES])
            validate.pool_contents(len(tensors[0]), len(tensors[_STEP_STATE]), *indices)
        if implementation.step_again is not None:
            done = implementation.step_again(self.fields["facts"], self.fields["memo"], tensors, self.apart)
            if done is not None:
                return done
        if not self.apart(tensors):
            return None
        problem = object.__new__(StepProblem)
        _fill(problem.__dict__, self.fields, STEP_TENSORS, all_of_step(tensors), self.views)
        return run(implementation, problem)

    def apart(self, tensors: list[Tensor]) -> bool:
        """Whether rows are aligned, and no buffer lies on another tensor."""
        addresses = [*map(_address, tensors)]
        if reduce(or_, _step_rows(addresses)) % VECTOR:
            return False
        return _alone(_STEP_STATE, addresses, self.sizes) and _alone(_STEP_OUT, addresses, self.sizes)


def _alone(buffer: int, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a buffer, or none, lies on none of the other tensors, going by first and last bytes."""
    start = addresses[buffer]
    end = start + sizes[buffer]
    met = 0
    for other, size in zip(addresses, sizes):  # noqa: B905 (0.1 us)
        if other < end and start < other + size:
            met += 1
    return met <= 1  # itself


def _fill(
    problem: dict[str, Any], fields: dict[str, Any], names: tuple[str, ...], tensors: list[Tensor], views: Views
) -> None:
    """The fields of a problem: a plan's, and a call's tensors."""
    problem.update(fields)
    problem.update((name, None if type(x) is Mark else x) for name, x in zip(names, tensors, strict=True))
    for name, shape in views:
        problem[name] = problem[name].view(shape)


class Plans(Generic[P]):
    """Plans by what can be hashed of a call; the few that share it differ in what `alike` compares."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, list[P]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, key: Hashable, tensors: list[Tensor]) -> P | None:
        """The plan that serves a call, if there is one."""
        try:
            plans = self._plans.get(key)
            if plans is None or True in map(_is_nested, tensors):  # which torch's guards cannot look at
                return None
        except (AttributeError, TypeError):  # no tensors, or not hashable: validation says what is wrong
            return None
        for plan in plans:
            if plan.alike(*tensors):
                return plan
        return None

    def add(self, key: Hashable, plan: P) -> None:
        """Remember a validated call; the key can be hashed, as what was validated can."""
        if self._count >= MOST:
            self._plans, self._count = {}, 0
        self._plans.setdefault(key, []).append(plan)
        self._count += 1


def key_of(a: Tensor | None, b: Tensor | None, *rest: Hashable) -> Hashable:
    """What calls that one plan serves have in common beside what `alike` compares: shapes of two tensors, and the rest.

    Of types too: True equals 1.
    """
    try:
        shapes = a.shape, None if b is None else b.shape  # type: ignore[union-attr]
        return shapes, torch.is_grad_enabled(), rest, tuple(map(type, rest))
    except (AttributeError, RuntimeError):  # no tensors, or none that has a shape: validation says what
        return None


def filled(tensors: Tensors) -> list[Tensor]:
    """The tensors, with `ABSENT` for what is not there."""
    return [absent if x is None else x for x, absent in zip(tensors, ABSENT)]  # noqa: B905 (0.1 us)


def all_of_step(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of a step, with those that were left out at the end because none of them is there."""
    return [*tensors, *ABSENT[len(tensors) : len(STEP_TENSORS)]]


_IN_PLACE, _IN_POOL = mark(1), mark(2)


def told_apart(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, with marks for what is the same as another: torch's guards refuse what comes twice."""
    if tensors[_INITIAL] is tensors[_FINAL] or tensors[_POOL] is tensors[_KEPT]:
        tensors = [*tensors]
        if tensors[_INITIAL] is tensors[_FINAL]:
            tensors[_FINAL] = _IN_PLACE
        if tensors[_POOL] is tensors[_KEPT]:
            tensors[_KEPT] = _IN_POOL
    return tensors


def _kind(x: Tensor) -> tuple[object, ...]:
    """What decides, of a tensor."""
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.is_inference(), x.requires_grad


def _alike_by_kind(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    known = (torch.is_inference_mode_enabled(), *map(_kind, tensors))

    def alike(*others: Tensor) -> bool:
        try:
            return (torch.is_inference_mode_enabled(), *map(_kind, others)) == known
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or none that has strides
            return False

    return alike


def alike_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether others have the same shapes, strides, dtypes, devices, dispatch and `requires_grad`.

    By the guards of torch.compile, one call for all tensors, where torch has them and they take these: the same by
    `_kind` takes ten times as long.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(x.shape) for x in tensors]
        strides: Any = [list(x.stride()) for x in tensors]
        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        if check(*tensors):  # not where a tensor comes twice
            return check
    except (ImportError, TypeError):  # not part of torch's public interface
        pass
    return _alike_by_kind(tensors)


def _views_of(problem: Problem | StepProblem, tensors: dict[str, Tensor]) -> Views | None:
    """How A_log and dt_bias were given another shape; None where validation had to copy them, or a view is negated."""
    views = []
    for name in ("A_log", "dt_bias"):
        given, used = tensors[name], getattr(problem, name)
        if used is None:
            continue
        if given.shape != used.shape:
            views.append((name, tuple(used.shape)))
        if given.data_ptr() != used.data_ptr() or not given.is_contiguous():
            return None
    return None if any(x.is_neg() for x in tensors.values()) else tuple(views)


def _sizes_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in map(validate.extent, tensors))


def plan_of(impl: str, problem: Problem, tensors: list[Tensor]) -> Plan | None:
    """What is remembered of a validated call; None where the next one must be looked at again.

    That is where validation had to copy something, addresses are odd, or a gradient is asked for.
    """
    facts, views = problem.facts, _views_of(problem, dict(zip(TENSORS, tensors, strict=True)))
    if views is None or facts.unaligned or facts.requires_grad:
        return None
    fields = {name: value for name, value in problem.__dict__.items() if name not in TENSORS}
    fields["layout"] = Layout(problem.layout.batch, problem.layout.tokens, None)
    reads = facts.varlen or facts.gate is GateKind.GIVEN or facts.pool or facts.checkpoint_dtype is not None
    return Plan(impl, alike_of(told_apart(tensors)), fields, _sizes_of(tensors), views, facts, reads)


def step_plan_of(impl: str, problem: StepProblem, tensors: list[Tensor]) -> StepPlan | None:
    """What is remembered of a validated step; None where validation had to copy something, or addresses are odd."""
    views = _views_of(problem, dict(zip(STEP_TENSORS, all_of_step(tensors), strict=True)))
    if views is None or problem.facts.unaligned:
        return None
    fields = {name: value for name, value in problem.__dict__.items() if name not in STEP_TENSORS}
    return StepPlan(impl, alike_of(tensors), fields, _sizes_of(tensors), views)
