"""What every suite of the benchmark is given, and what it hands back: rows of plain values, and how they are shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from kda.bench import measure, peers
from kda.testing.cases import Case, arguments

T = TypeVar("T")

#: What was measured, by name; every value goes into JSON as it is.
Row = dict[str, Any]

#: RMS difference over RMS reference above which something else was computed (bf16 gives 6e-3).
AGREEMENT = 2e-2


@dataclass(frozen=True)
class Column:
    """A heading, and the text below it for a row."""

    heading: str
    text: Callable[[Row], str]


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
    wrong:  a sentence for everything that is not as the specification says. Nothing that is wrong is timed.
    """

    console: Console
    device: str
    names: list[str]
    peers: list[str]
    heads: tuple[int, ...] | None = None
    wrong: list[str] = field(default_factory=list)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy in this run; 0 on a CPU."""
        return measure.copy_bandwidth() if self.device == "cuda" else 0.0

    @cached_property
    def rate(self) -> float:
        """Operations per second of a product in bf16 in this run; 0 on a CPU."""
        return measure.product_rate() if self.device == "cuda" else 0.0

    def over(self, what: str, items: Iterable[T]) -> Iterator[T]:
        """The items, under a progress bar."""
        items = list(items)
        with Progress(console=self.console) as progress:
            task = progress.add_task(what, total=len(items))
            for item in items:
                yield item
                progress.advance(task)

    def wanted(self, cases: Iterable[Case]) -> list[Case]:
        """Those with a number of heads that was asked for."""
        return [case for case in cases if self.heads is None or case.H in self.heads]


def of_session(device: str, names: list[str] | None, with_peers: bool) -> tuple[list[str], list[str]]:
    """The implementations and the peers to measure on a device: those asked for, else every one that is fast there."""
    from kda import dispatch

    chosen = names or [name for name in dispatch.AUTO[device] if name in dispatch.TABLE]
    if device == "cpu" and not names:
        chosen = [*chosen, "recurrent"]
    return chosen, peers.installed() if with_peers and device == "cuda" else []


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


def code(name: str) -> Callable[[Row], str]:
    """A name of a program: as code where it is one of ours."""
    from kda import dispatch

    return lambda row: f"`{row[name]}`" if row[name] in dispatch.TABLE else str(row[name])
