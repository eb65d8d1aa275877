"""What can be attacked: the operations, the kind of case that each has, and one judgement for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda import dispatch
from kda.testing import convert, gradient, judge, pool, refusal
from kda.testing.cases import KINDS, Case, PoolCase, Printed, StepCase, fitted, fitted_step
from kda.testing.judge import Finding, device_of, facts_of, reproducer


class Poisoned(BaseException):
    """A CUDA error: nothing more can run in this process. The text says of which case, and how to repeat it.

    No Exception, so that it is not shrunk like a finding.
    """


@dataclass(frozen=True)
class Operation:
    """kind: of its cases.
    check:   sigma of a case on an implementation; raises `Finding`.
    implementations: whether there is a choice of them; else `check` is given "".
    """

    kind: type[Printed]
    check: Callable[[Any, str], float]
    implementations: bool = True


OPERATIONS = {
    "fwd": Operation(Case, lambda case, impl: judge.check(case, impl).sigma),
    "step": Operation(StepCase, lambda case, impl: pool.check(case, impl).sigma),
    "pool": Operation(PoolCase, lambda case, impl: pool.check(case, impl).sigma),
    "refusal": Operation(refusal.RefusalCase, refusal.check),
    "gradient": Operation(gradient.GradientCase, gradient.check, implementations=False),
    "convert": Operation(convert.ConvertCase, convert.check, implementations=False),
}


def operation_of(case: Printed) -> str:
    """The name of the operation that a case is one of."""
    return next(name for name, operation in OPERATIONS.items() if type(case) is operation.kind)


def parse(text: str) -> Printed:
    """The case of any kind whose repr is `text`. Raises ValueError for anything else."""
    return KINDS.get(text.split("(")[0].strip(), Case).parse(text)


def fitted_to(case: Printed, impl: str) -> Printed:
    """The case as `impl` can take it."""
    if isinstance(case, Case):
        return fitted(case, impl)
    if isinstance(case, StepCase):
        return replace(case, case=fitted_step(case.case, impl))
    if isinstance(case, PoolCase):
        return replace(case, case=fitted(case.case, impl))
    if isinstance(case, refusal.RefusalCase):
        return replace(case, call=fitted_to(case.call, impl))
    return case


def reasons(case: Printed, impl: str) -> tuple[str, ...]:
    """Why `impl` cannot run the case here; empty if it can, and where there is no choice."""
    if isinstance(case, refusal.RefusalCase):
        return reasons(case.call, impl)
    if not isinstance(case, Case | StepCase | PoolCase):
        return ()
    call = case if isinstance(case, Case) else case.case
    facts = facts_of(call, device_of(impl))
    if not isinstance(case, Case):
        facts = replace(facts, pool=True) if isinstance(case, PoolCase) else replace(facts, operation="step")
    return dispatch.explain_facts(facts, impl).reasons[impl]


def _small(operation: str) -> Printed:
    """A case that every implementation of the operation runs, once it is fitted."""
    case = Case(lengths=(3,), packed=False)
    return {"step": StepCase(case, 1), "pool": PoolCase(case, 1)}.get(operation, case)


def reasons_against(impl: str, operation: str) -> tuple[str, ...]:
    """Why a small case of the operation does not run here; empty if it does."""
    return reasons(fitted_to(_small(operation), impl), impl)


def targets(impl: str | None, operation: str) -> list[str]:
    """The implementations to attack: the one asked for, else every one that runs a small case here."""
    if not OPERATIONS[operation].implementations:
        return [""] if impl is None else []
    names = [impl] if impl else list(dispatch.TABLE)
    return [name for name in names if not reasons_against(name, operation)]


def _lost(error: Exception) -> bool:
    """Whether the device is lost: after an access out of bounds, every call fails."""
    if isinstance(error, torch.AcceleratorError):
        return True
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def check(case: Printed, impl: str) -> float:
    """Sigma of a case. Raises `Finding` for whatever is wrong, and `Poisoned` where nothing more can run."""
    name = operation_of(case)
    try:
        return OPERATIONS[name].check(case, impl)
    except Finding:
        raise
    except Exception as error:
        if _lost(error):
            raise Poisoned(reproducer(case, impl, f"{impl or name} failed on the device: {error}")) from error
        what = f"{impl or name} raised {type(error).__name__}: {error}"
        raise Finding(reproducer(case, impl, what)) from error
