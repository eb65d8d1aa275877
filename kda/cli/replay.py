"""`python -m kda replay 'Case(...)'`: one case again, judged."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kda import dispatch
from kda.dispatch import Unsupported
from kda.ref.error import SIGMAS
from kda.testing import pool
from kda.testing.cases import Case, PoolCase, Printed, StepCase
from kda.testing.judge import Finding, judge
from kda.testing.operations import OPERATIONS, check, operation_of, parse, reasons, targets


def _on_a_pool(console: Console, case: StepCase | PoolCase, impl: str | None) -> int:
    """Judge a call on a pool. Returns 1 if any implementation leaves the tolerance or harms the pool."""
    table = Table("implementation", "sigma o", "sigma state", "pool")
    status = 2
    for name in [impl] if impl else list(dispatch.TABLE):
        try:
            d, wrong = pool.judge(case, name)
        except Unsupported as error:
            console.print(str(error), markup=False)
            continue
        good = d.accepted and not wrong
        status = max(0 if status == 2 else status, 0 if good else 1)
        table.add_row(name, f"{d.sigma_o:.3g}", f"{d.sigma_state:.3g}", wrong or "right", style=None if good else "red")
    console.print(repr(case), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    return status


def _other(console: Console, case: Printed, impl: str | None) -> int:
    """Judge a case of which there is only right and wrong to say. Returns 1 if it is wrong."""
    if impl and not OPERATIONS[operation_of(case)].implementations:
        console.print(f"{type(case).__name__} has no choice of implementations; leave --impl out", style="red")
        return 2
    status = 2
    for name in targets(impl, operation_of(case)):
        if why := reasons(case, name):
            console.print(f"{name} cannot run it: {' '.join(why)}", markup=False)
            continue
        try:
            told, status = f"right, {check(case, name):.3g} sigma", status % 2
        except Finding as finding:
            told, status = str(finding), 1
        console.print(f"{name or operation_of(case)}: {told}", markup=False, highlight=False, soft_wrap=True)
    console.print(repr(case), markup=False, highlight=False, soft_wrap=True)
    return status


def run(console: Console, text: str, impl: str | None) -> int:
    """Judge the case on one implementation, or on every one that accepts it. Returns 1 if any leaves the tolerance."""
    try:
        case = parse(text)
    except ValueError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    if isinstance(case, StepCase | PoolCase):
        return _on_a_pool(console, case, impl)
    if not isinstance(case, Case):
        return _other(console, case, impl)
    table = Table("implementation", "sigma o", "sigma state", "RMS o", "RMS state", "worst o at", "worst state at")
    status = 2
    for name in [impl] if impl else list(dispatch.TABLE):
        why = reasons(case, name)
        if why:
            console.print(f"{name} cannot run it: {' '.join(why)}", markup=False)
            continue
        try:
            d = judge(case, name)
        except Exception as error:  # an implementation that raises is a finding like any other
            console.print(f"{name} raised {type(error).__name__}: {error}", style="red", markup=False)
            status = 1
            continue
        status = max(0 if status == 2 else status, 0 if d.accepted else 1)
        numbers = (f"{d.sigma_o:.3g}", f"{d.sigma_state:.3g}", f"{d.rms_o:.2e}", f"{d.rms_state:.2e}")
        table.add_row(name, *numbers, str(d.where_o), str(d.where_state), style=None if d.accepted else "red")
    console.print(repr(case), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"accepted: within {SIGMAS:g} standard deviations")
    return status
