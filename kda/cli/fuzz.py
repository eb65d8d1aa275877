"""`python -m kda fuzz`: draw cases at random, judge each against the specification, stop at the first finding."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kda import dispatch
from kda.testing import pool
from kda.testing.cases import DTYPES, AnyCase, Case, StepCase, fitted, fitted_step, within_hopper
from kda.testing.judge import Finding, check, device_of, facts_of, reproducer
from kda.testing.strategies import CHANNELS, cases, pools, steps

#: Examples of one hypothesis run; a new seed follows until the time is up, so that no draw database grows.
ROUND = 200


class _TimeUp(BaseException):
    """Ends a hypothesis run from inside; no Exception, so that it is not taken for a finding."""


class _Poisoned(BaseException):
    """A CUDA error: nothing more can run in this process, so the case is reported as drawn, not shrunk."""


Judged = tuple[float, AnyCase]


def _sigma(judged: Judged) -> float:
    return judged[0]


def _strategy(impl: str, device: str) -> st.SearchStrategy[Case]:
    dtypes = tuple(name for name in DTYPES if name != "float64" or impl in ("recurrent", "chunked"))
    if impl == "triton" and device == "cuda":
        return cases(dtypes, max_tokens=600, channels=(*CHANNELS, 100, 128, 200, 256))
    if impl == "cuda":
        return cases(("bfloat16",), max_tokens=600, channels=(128,)).map(within_hopper)
    if impl == "triton":  # interpreted
        return cases(dtypes, max_tokens=130, channels=(1, 8, 16, 17, 33))
    return cases(dtypes)


def _drawn(impl: str, operation: str, device: str) -> st.SearchStrategy[AnyCase]:
    """Cases of an operation; on a pool with the sequences of the forward's."""
    sequences = _strategy(impl, device)
    if operation == "step":
        if impl == "cuda":  # of any gate
            sequences = cases(("bfloat16",), channels=(128,))

        def fit(case: StepCase) -> StepCase:
            return replace(case, case=fitted_step(case.case, impl))

        return steps(sequences).map(fit)
    return pools(sequences) if operation == "pool" else sequences


def _check(case: AnyCase, impl: str) -> float:
    """Sigma of a case. Raises Finding."""
    return (check(case, impl) if isinstance(case, Case) else pool.check(case, impl)).sigma


def _small(impl: str) -> Case:
    return fitted(Case(lengths=(3,)), impl)


def reasons_against(impl: str, operation: str) -> tuple[str, ...]:
    """Why a small case of the operation does not run here; empty if it does."""
    facts = facts_of(_small(impl), device_of(impl))
    facts = replace(facts, pool=True) if operation == "pool" else replace(facts, operation=operation)
    return dispatch.explain_facts(facts, impl).reasons[impl]


def targets(impl: str | None, operation: str) -> list[str]:
    """The implementations to attack: the one asked for, else every one that runs a small case here."""
    names = [impl] if impl else list(dispatch.TABLE)
    return [name for name in names if not reasons_against(name, operation)]


def _round(impl: str, operation: str, start: int, deadline: float, judged: list[Judged], progress: Progress) -> None:
    """One hypothesis run. Raises Finding with the smallest case it shrank to."""
    task = progress.task_ids[0]
    strategy = _drawn(impl, operation, progress.tasks[0].fields["device"])

    @seed(start)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(strategy)
    def attack(case: AnyCase) -> None:
        if time.monotonic() > deadline and not found:
            raise _TimeUp
        try:
            judged.append((_check(case, impl), case))
        except torch.AcceleratorError as error:
            raise _Poisoned(reproducer(case, impl, f"{impl} failed on the device: {error}")) from error
        except Finding:
            found.append(case)
            raise
        except Exception as error:
            found.append(case)
            raise Finding(reproducer(case, impl, f"{impl} raised {type(error).__name__}: {error}")) from error
        left = max(deadline - time.monotonic(), 0)
        progress.update(
            task,
            completed=(progress.tasks[0].total or 0) - left,
            description=f"{impl}: {len(judged)} cases, worst {max(judged, key=_sigma)[0]:.2f} sigma",
        )

    found: list[AnyCase] = []
    try:
        attack()
    except FlakyFailure as error:  # it failed, and did not when repeated: a race looks like this
        raise Finding(reproducer(found[-1], impl, f"{impl} fails now and then, not always: {error}")) from error


def run(console: Console, seconds: float, impl: str | None, start: int | None, operation: str = "fwd") -> int:
    """Fuzz for `seconds`, shared among the implementations. Returns 1 on a finding, 2 if nothing can run."""
    names = targets(impl, operation)
    if not names:
        why = " ".join(reasons_against(impl, operation)) if impl else "nothing runs here"
        console.print(f"cannot fuzz {impl or ''}: {why}", style="red", markup=False)
        return 2
    start = secrets.randbelow(2**31) if start is None else start
    console.print(f"seed {start}")
    for name in names:
        judged: list[Judged] = []
        share = seconds / len(names)
        deadline = time.monotonic() + share
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            progress.add_task(name, total=share, device=device_of(name))
            offset = 0
            try:
                while time.monotonic() < deadline:
                    _round(name, operation, start + offset, deadline, judged, progress)
                    offset += 1
            except _TimeUp:
                pass
            except (Finding, _Poisoned) as finding:
                progress.stop()
                console.print(f"[red]finding after {len(judged)} cases")
                console.print(str(finding), markup=False, highlight=False, soft_wrap=True)
                return 1
        console.print(f"{name}: {len(judged)} cases, no finding")
        if judged:
            sigma, case = max(judged, key=_sigma)
            console.print(f"worst {sigma:.2f} sigma: {case!r}", markup=False, highlight=False, soft_wrap=True)
    return 0
