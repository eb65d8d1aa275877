"""What every suite of the benchmark is given, and what it hands back: rows of plain values, and how they are shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from kda import dispatch
from kda.bench import measure
from kda.testing.cases import Case, arguments
from kda.testing.judge import facts_of

T = TypeVar("T")

#: What was measured, by name; every value goes into JSON as it is.
Row = dict[str, Any]

#: RMS difference over RMS reference above which something else was computed (bf16 gives 6e-3).
AGREEMENT = 2e-2


@dataclass(frozen=True)
class Column:
    """A heading, and the text below it for a row.

    aside: too long for a column of a terminal, where it follows the table, to be copied.
    """

    heading: str
    text: Callable[[Row], str]
    aside: bool = False


@dataclass(frozen=True)
class Table:
    """Rows as people read them. `about`: what they need to know beside the headings."""

    title: str
    about: str
    columns: tuple[Column, ...]

    def texts(self, rows: Iterable[Row]) -> list[list[str]]:
        """The headings, and a line per row."""
        return [[c.heading for c in self.columns], *([c.text(row) for c in self.columns] for row in rows)]


@dataclass
class Session:
    """One run of the benchmark: where, on what, and what was wrong so far.

    device: "cuda" or "cpu".
    names:  implementations to measure.
    peers:  other libraries beside them, by name.
    heads:  only shapes with these numbers of heads; None for all.
    wrong:  a sentence for everything of ours that is not as the specification says.
    faulty: implementations that left their tolerance in the accuracy suite, and are not timed.
    """

    console: Console
    device: str
    names: list[str]
    peers: list[str]
    heads: tuple[int, ...] | None = None
    wrong: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy in this run; 0 on a CPU."""
        return measure.copy_bandwidth() if self.device == "cuda" else 0.0

    @cached_property
    def rate(self) -> float:
        """Operations per second of a product in bf16 in this run; 0 on a CPU."""
        return measure.product_rate() if self.device == "cuda" else 0.0

    def over(self, what: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """The items, as they come, under a progress bar; `total` where their number is not known."""
        with Progress(console=self.console) as progress:
            task = progress.add_task(what, total=len(items) if isinstance(items, Sized) else total)
            for item in items:
                yield item
                progress.advance(task)

    def attempt(self, peer: str, where: str, call: Callable[[], T]) -> T | None:
        """What a peer's call returns; None, and a line that says why, if it raises: that is not our finding."""
        try:
            return call()
        except Exception as error:
            self.console.print(f"{peer} raised {type(error).__name__} at {where}: {error}", markup=False)
            return None

    def able(self, reasons: Mapping[str, tuple[str, ...]]) -> list[str]:
        """The implementations that nothing speaks against: no reason, and no error found before."""
        return [name for name in self.names if not reasons[name] and name not in self.faulty]

    def wanted(self, cases: Iterable[Case]) -> list[Case]:
        """Those with a number of heads that was asked for."""
        return [case for case in cases if self.heads is None or case.H in self.heads]


def runnable(device: str, names: list[str] | None) -> list[str]:
    """The implementations to measure on a device: those asked for, else every one that is fast there and runs.

    Raises ValueError for one that was asked for and cannot run.
    """
    facts = facts_of(Case(lengths=(1,), packed=False, K=128, V=128), device)
    reasons = dispatch.explain_facts(facts).reasons
    if names:
        for name in names:
            if reasons[name]:
                raise ValueError(f"--impl: expected one that runs here, got {name}: {' '.join(reasons[name])}")
        return list(dict.fromkeys(names))
    fast = [name for name in dispatch.AUTO[device] if name in dispatch.TABLE]
    return [name for name in [*fast, *(["recurrent"] if device == "cpu" else [])] if not reasons[name]]


def inputs(case: Case, device: str) -> dict[str, Any]:
    """The case's call, made on the device; a single sequence without cu_seqlens."""
    call = arguments(case, device, made_on=device)
    if len(case.lengths) == 1:
        call["cu_seqlens"] = None
    return call


def title(case: Case) -> str:
    """The lengths, and what is unusual about the inputs."""
    runs = [(length, len(list(same))) for length, same in itertools.groupby(case.lengths)]
    lengths = ", ".join(f"{n} x {length}" if n > 1 else str(length) for length, n in runs)
    unusual = {"decay": {"slow": "slow channels"}, "keys": {"close": "correlated keys"}}
    names = (known[getattr(case, field)] for field, known in unusual.items() if getattr(case, field) in known)
    return "; ".join([lengths, *names])


def where(case: Case) -> str:
    """The shape, for people."""
    return f"{title(case)}, H = {case.H}"


def difference(reference: Tensor, other: Tensor) -> float:
    """RMS difference over the RMS reference."""
    a, b = reference.to(torch.float32), other.to(torch.float32)
    return float((a - b).square().mean().sqrt() / a.square().mean().sqrt())


def plain(name: str) -> Callable[[Row], str]:
    """A value as it is."""
    return lambda row: str(row[name])


def spread(name: str, digits: int) -> Callable[[Row], str]:
    """Median and quartiles."""
    return lambda row: "{1:.{d}f} ({0:.{d}f} to {2:.{d}f})".format(*row[name], d=digits)


def ratio(digits: int) -> Callable[[Row], str]:
    """Median and quartiles of a ratio; that to itself is 1."""
    of = spread("ratio", digits)
    return lambda row: "1" if tuple(row["ratio"]) == (1, 1, 1) else of(row)


def share(floor_ms: Callable[[Row], float]) -> Callable[[Row], str]:
    """Of the time, what is the floor's; nothing where there is none."""
    return lambda row: f"{floor_ms(row) / row['ms'][1]:.3f}" if floor_ms(row) else ""


def code(name: str) -> Callable[[Row], str]:
    """A name of a program: as code where it is one of ours."""
    return lambda row: f"`{row[name]}`" if row[name] in dispatch.TABLE else str(row[name])
