"""One fuzzing process: replay the ledger, then draw cases at random and judge each, stop at the first finding.

`kda.cli.supervise` starts it, watches it and reports its death; what it is doing stands in its journal.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure
from rich.console import Console

from kda.cli.counts import Counts
from kda.cli.info import versions
from kda.cli.journal import Journal
from kda.testing import ledger
from kda.testing.cases import Printed
from kda.testing.judge import Finding, device_of, reproducer
from kda.testing.operations import OPERATIONS, Poisoned, check, reasons_against, targets
from kda.testing.strategies import drawn

#: Examples of one hypothesis run; a new seed follows until the time is up, so that no draw database grows.
ROUND = 200

#: Exit status of a process that was interrupted, as a shell's.
INTERRUPTED = 130


class _TimeUp(BaseException):
    """Ends a hypothesis run from inside; no Exception, so that it is not taken for a finding."""


@dataclass(frozen=True)
class Options:
    """What `python -m kda fuzz` was asked for.

    operation: of `OPERATIONS`, or "all".
    ledger:    replay it first.
    """

    seconds: float
    impl: str | None
    operation: str
    ledger: bool = True

    @property
    def operations(self) -> list[str]:
        return list(OPERATIONS) if self.operation == "all" else [self.operation]

    def targets(self) -> list[tuple[str, str]]:
        """Operations and implementations, those that run here."""
        return [(operation, name) for operation in self.operations for name in targets(self.impl, operation)]

    def why_none(self) -> str:
        """Why there is nothing to do."""
        if self.impl is None:
            return "nothing runs here"
        if not any(OPERATIONS[name].implementations for name in self.operations):
            return f"{self.operation} has no choice of implementations; leave --impl out"
        return f"{self.impl}: " + " ".join(reasons_against(self.impl, self.operations[0]))


@dataclass(frozen=True)
class _Run:
    """A process at work. seed: of its draws; parent: the process that watches it."""

    console: Console
    journal: Journal
    seed: int
    parent: int

    def counts(self, operation: str, impl: str) -> Counts:
        """A row that starts now."""
        on_gpu = device_of(impl) == "cuda" or (operation == "convert" and torch.cuda.is_available())
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        date = datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
        return Counts(operation, impl, self.seed, device=device, versions=versions(), date=date)

    def check(self, counts: Counts, case: Printed) -> float:
        """Sigma of a case that the journal names while it runs. Raises what `operations.check` raises."""
        if os.getppid() != self.parent:  # nobody watches any more
            raise _TimeUp
        self.journal.write(counts, repr(case))
        try:
            return check(case, counts.impl)
        except Poisoned as error:
            self.journal.write(counts, repr(case), str(error).splitlines()[0])
            raise

    def report(self, counts: Counts, title: str, text: object) -> None:
        """A finding, which is counted and printed."""
        counts.findings += 1
        self.journal.keep(counts)
        self.console.print(f"[red]{title}")
        self.console.print(str(text), markup=False, highlight=False, soft_wrap=True)


def _round(run: _Run, counts: Counts, start: int, began: float, deadline: float) -> None:
    """One hypothesis run. Raises Finding with the smallest case it shrank to."""
    found: list[Printed] = []

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
    @given(drawn(counts.operation, counts.impl, device_of(counts.impl)))
    def attack(case: Printed) -> None:
        if time.monotonic() > deadline and not found:
            raise _TimeUp
        counts.seconds = time.monotonic() - began
        try:
            counts.add(run.check(counts, case), repr(case))
        except Finding:
            if ledger.known(case, counts.impl) is not None:
                counts.known += 1
                return
            found.append(case)
            raise

    try:
        attack()
    except FlakyFailure as error:  # it failed, and did not when repeated: a race looks like this
        name = counts.impl or counts.operation
        raise Finding(reproducer(found[-1], counts.impl, f"{name} fails now and then, not always: {error}")) from error


def _campaign(run: _Run, counts: Counts, seconds: float) -> bool:
    """Attack one operation of one implementation. Returns whether there was a finding."""
    began, offset = time.monotonic(), 0
    found: BaseException | None = None
    try:
        while time.monotonic() < began + seconds:
            _round(run, counts, counts.seed + offset, began, began + seconds)
            offset += 1
    except _TimeUp:
        pass
    except (Finding, Poisoned) as finding:
        found = finding
    counts.seconds = time.monotonic() - began
    if found is not None:
        run.report(counts, f"finding after {counts.cases} cases", found)
        return True
    run.journal.keep(counts)
    name = f"{counts.operation} {counts.impl}".strip()
    also = f", {counts.known} known failures" if counts.known else ""
    run.console.print(f"{name}: {counts.cases} cases, no finding{also}", highlight=False)
    if counts.worst:
        worst = f"worst {counts.worst:.2f} sigma: {counts.worst_case}"
        run.console.print(worst, markup=False, highlight=False, soft_wrap=True)
    return False


def _ledger(run: _Run, options: Options) -> bool:
    """Replay the entries of what is attacked. Returns whether one does not stand."""
    stood, skipped = 0, dict[str, list[str]]()
    wanted = [entry for entry in ledger.LEDGER if entry.operation in options.operations]
    if not wanted:
        return False
    for entry in wanted:
        for impl in entry.implementations:
            if options.impl not in (None, impl):
                continue
            if why := ledger.why_not(entry, impl):
                skipped.setdefault(impl, []).append(why)
                continue
            counts = run.counts(entry.operation, impl)
            try:
                wrong = ledger.stands(entry, impl, partial(run.check, counts))
            except Poisoned as error:
                wrong = str(error)
            if wrong:
                run.report(counts, "the ledger does not stand", wrong)
                return True
            stood += 1
    run.console.print(f"ledger: {stood} replayed, all as they should be", highlight=False)
    for impl, each in skipped.items():
        told = f"ledger: {len(each)} skipped on {impl}: {'; '.join(dict.fromkeys(each))}"
        run.console.print(told, markup=False, highlight=False, soft_wrap=True)
    return False


@contextmanager
def _dumping(folder: Path) -> Iterator[None]:
    """Where the process is, when it dies by a signal or is asked by SIGUSR1: a traceback in the folder."""
    with (folder / "traceback").open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()


def run(console: Console, options: Options, start: int, folder: Path) -> int:
    """Fuzz for `seconds`, shared among the operations and implementations, with a journal in `folder`.

    Returns 1 on a finding, 2 if nothing can run, INTERRUPTED after Ctrl-C.
    """
    names = options.targets()
    if not names:
        console.print(f"cannot fuzz {options.operation}: {options.why_none()}", style="red", markup=False)
        return 2
    console.print(f"seed {start}")
    # The interpreter computes both sides of a select in numpy.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    work = _Run(console, Journal(folder), start, os.getppid())
    try:
        with _dumping(folder):
            if options.ledger and _ledger(work, options):
                return 1
            for operation, impl in names:
                if _campaign(work, work.counts(operation, impl), options.seconds / len(names)):
                    return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except _TimeUp:  # orphaned
        return INTERRUPTED
    finally:
        work.journal.close()
    return 0
