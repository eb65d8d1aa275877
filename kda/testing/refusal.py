"""Judge malformed calls: refused by an error that names the argument, with nothing written, or right all the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
from torch import Tensor

from kda import api, validate
from kda.dispatch import Unsupported
from kda.problem import Output
from kda.testing import faults, pool
from kda.testing.cases import DTYPES, Case, PoolCase, Printed, StepCase, arguments, in_fp64
from kda.testing.judge import Finding, device_of, reproducer

Call = dict[str, Any]

#: An accepted call is compared with the specification in fp64 to this, relative to the largest number: what is looked
#: for is another meaning, not a rounding.
CLOSE = 0.05


@dataclass(frozen=True, repr=False)
class RefusalCase(Printed):
    """A good call with arguments spoiled. Its repr is the reproducer.

    call:   a Case or PoolCase of `fwd` and `explain`, or a StepCase of `step`.
    faults: (argument, fault of `kda.testing.faults`), in this order.
    buffers: `out`, and `final_state` where there is no pool, are given.
    warm:   the good call runs before, so that its plan is known.
    checked: KDA_CHECK=1.
    """

    call: Printed
    faults: tuple[tuple[str, str], ...]
    buffers: bool = False
    warm: bool = False
    checked: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.call, Case | PoolCase | StepCase):
            raise ValueError(f"call: expected a Case, PoolCase or StepCase, got {self.call!r}")
        if len({argument for argument, _ in self.faults}) < len(self.faults):
            raise ValueError(f"faults: expected each argument once, got {self.faults}")
        for argument, fault in self.faults:
            if fault not in faults.faults_of(argument):
                raise ValueError(f"faults: expected one of {faults.faults_of(argument)} of {argument}, got {fault!r}")


def good_call(case: RefusalCase, impl: str) -> Call:
    """The call before anything is spoiled."""
    device, spec = device_of(impl), case.call
    if isinstance(spec, Case):
        call = arguments(spec, device)
        if case.buffers:
            N, state = len(spec.lengths), call.get("initial_state")
            dtype = DTYPES["float64" if spec.dtype == "float64" else "float32"] if state is None else state.dtype
            call["final_state"] = torch.zeros(N, spec.HV, spec.V, spec.K, dtype=dtype, device=device)
    elif isinstance(spec, StepCase | PoolCase):
        call, states = pool.call_of(spec, device)
        call["state" if isinstance(spec, StepCase) else "state_pool"] = pool.pool_of(spec, states)
        if isinstance(spec, PoolCase) and spec.kept is not None:
            kept = call["state_pool"]
            call["checkpoints"] = torch.zeros_like(kept, dtype=DTYPES[spec.kept_dtype]) if spec.own else kept
    if case.buffers:
        call["out"] = torch.zeros_like(call["v"], memory_format=torch.contiguous_format)
    return {**call, "impl": impl}


def _spoiled(case: RefusalCase, call: Call) -> tuple[Call, list[tuple[str, str]]]:
    """The call with its faults, and those that changed it."""
    done: list[tuple[str, str]] = []
    for argument, fault in case.faults:
        value = faults.apply(call, argument, fault)
        left_out = argument in faults.FLAGS and argument not in call  # for which None is a fault
        if left_out or value is not call.get(argument):
            call, done = {**call, argument: value}, [*done, (argument, fault)]
    return call, done


@contextmanager
def _checking(case: RefusalCase) -> Iterator[None]:
    with patch.dict("os.environ", {"KDA_CHECK": "1" if case.checked else "0"}):
        yield


def _dense(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta


def _bytes(call: Call) -> dict[str, Tensor]:
    """All memory that the call's tensors lie in, gaps between them included."""
    there = {n: x for n, x in call.items() if _dense(x)}
    empty = {n: torch.empty(0, dtype=torch.uint8, device=x.device) for n, x in there.items()}
    return {n: empty[n].set_(x.detach().untyped_storage()).clone() for n, x in there.items()}


def _changed(before: dict[str, Tensor], call: Call) -> set[str]:
    return {name for name, x in _bytes(call).items() if not torch.equal(x, before[name])}


def _only_read(call: Call) -> Call:
    """The inputs, but for those in whose memory a buffer lies."""
    at = {name: x.untyped_storage().data_ptr() for name, x in call.items() if _dense(x)}
    written = {at[name] for name in faults.BUFFERS if name in at}
    return {name: call[name] for name in at if at[name] not in written}


def _meant(call: Call) -> Call:
    """The same call in fp64 on the CPU, in memory of its own."""
    copied = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    there = {name: x for name, x in copied.items() if not (isinstance(x, Tensor) and x.is_meta)}
    copied |= in_fp64(there) | {"impl": "recurrent"}
    pooled, kept = call.get("state_pool"), call.get("checkpoints")
    if _dense(pooled) and _dense(kept) and validate.same(pooled, kept):
        copied["checkpoints"] = copied["state_pool"]
    return copied


def _close(actual: Tensor, exact: Tensor) -> bool:
    """Whether numbers are close and NaN where they have to be; NaN may reach back within its chunk."""
    actual, exact = actual.detach().double().cpu(), exact.detach().double()
    if actual.shape == exact.shape and bool(exact.isnan().any()):
        exact = torch.where(actual.isnan(), actual, exact)
    size = float(exact.nan_to_num(0, 0, 0).abs().max()) if exact.numel() else 0.0
    return actual.shape == exact.shape and torch.allclose(
        actual, exact, rtol=0, atol=CLOSE * size + 1e-6, equal_nan=True
    )


def _results(call: Call, result: Output | Tensor) -> dict[str, Tensor]:
    named = {"o": result} if isinstance(result, Tensor) else {"o": result.o, "final state": result.final_state}
    named |= {name: call.get(name) for name in ("state", "state_pool", "checkpoints")}
    return {name: x for name, x in named.items() if x is not None}


def _right(
    case: RefusalCase, done: list[tuple[str, str]], call: Call, meant: Call, result: Output | Tensor
) -> list[str]:
    """What is wrong with a call that was accepted."""
    wrong = [f"accepted {argument} with the fault {fault!r}" for argument, fault in done
             if faults.must_be_refused(argument, fault)]  # fmt: skip
    kinds = {fault for _, fault in done}
    trusted = not case.checked and (
        kinds & {*faults.COLLISIONS} or (kinds & {*faults.CONTENTS} and not call["q"].is_cpu)
    )
    if wrong or trusted:  # the result of contents that are trusted is not defined
        return wrong
    try:
        exact = (api.step if isinstance(case.call, StepCase) else api.fwd)(**meant)
    except (TypeError, ValueError) as error:
        # Another dtype may turn indices into others: -1 is 255 without a sign.
        if not case.checked and not call["q"].is_cpu and any(argument in faults.INTEGERS for argument, _ in done):
            return []
        return [f"accepted what the specification refuses in fp64: {error}"]
    expected = _results(meant, exact)
    actual = _results(call, result)
    return [f"accepted, but {name} is not what the call means" for name, x in expected.items()
            if name not in actual or not _close(actual[name], x)]  # fmt: skip


def _explained(call: Call, error: Exception | None) -> list[str]:
    """Whether `explain` says what `fwd` did."""
    try:
        chosen = api.explain(**call).chosen
    except (TypeError, ValueError) as raised:
        if type(raised) is not type(error):
            return [f"explain raised {type(raised).__name__}: {raised}; fwd {error and type(error).__name__}"]
        return []
    if error is None and (chosen is None or call["impl"] not in ("auto", chosen)):
        return [f"explain chose {chosen}, but fwd ran"]
    if isinstance(error, Unsupported) and chosen is not None:
        return [f"explain chose {chosen}, but fwd says nothing can run it"]
    if error is not None and not isinstance(error, Unsupported):
        return [f"explain chose {chosen}, but fwd raised {type(error).__name__}"]
    return []


def _named(done: list[tuple[str, str]], error: Exception) -> bool:
    """Whether a refusal is about something that was spoiled."""
    if isinstance(error, Unsupported):
        return True
    words = set(re.findall(r"\w+", str(error)))
    others = any(argument in faults.SIZES or fault == "None" for argument, fault in done)  # may not fit any more
    fits = others and re.match(r"\w+(, \w+)*: expected ", str(error)) is not None
    return fits or bool(words & {argument for argument, _ in done})


def judge(case: RefusalCase, impl: str) -> str:
    """What is wrong: an empty text if nothing is."""
    function = api.step if isinstance(case.call, StepCase) else api.fwd
    with _checking(case):
        if case.warm:
            function(**good_call(case, impl))
        call, done = _spoiled(case, good_call(case, impl))
        before, meant = _bytes(call), _meant(call)
        wrong: list[str] = []
        try:
            result, refused = function(**call), None
        except (TypeError, ValueError, Unsupported) as error:
            result, refused = None, error
            if changed := _changed(before, call):
                wrong.append(f"refused, but {', '.join(sorted(changed))} changed")
            if not done:
                wrong.append("refused a good call")
            elif not _named(done, error):
                wrong.append(f"the refusal names none of {[argument for argument, _ in done]}")
        if result is not None:
            wrong += _right(case, done, call, meant, result)
            if changed := _changed(before, _only_read(call)):
                wrong.append(f"accepted, but {', '.join(sorted(changed))} changed")
        if function is api.fwd:
            wrong += _explained(call, refused)
    told = f" ({type(refused).__name__}: {refused})" if refused is not None and wrong else ""
    return "; ".join(wrong) + told


def check(case: RefusalCase, impl: str) -> float:
    """0: what is refused is not rounded. Raises `Finding` with the reproducer when anything is wrong."""
    if wrong := judge(case, impl):
        raise Finding(reproducer(case, impl, f"{impl}, malformed call: {wrong}"))
    return 0.0
