"""What fuzzing counted: a row for each process, operation and implementation; as JSON lines and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass
class Counts:
    """Of one process, operation and implementation.

    impl:     empty where there is no choice.
    seconds:  that were spent.
    known:    cases that failed as an open entry of the ledger says.
    worst, worst_case: the largest deviation that was accepted, in standard deviations, and the text of its case.
    """

    operation: str
    impl: str
    seed: int
    seconds: float = 0.0
    cases: int = 0
    known: int = 0
    worst: float = 0.0
    worst_case: str = ""
    findings: int = 0
    device: str = ""
    versions: str = ""
    date: str = ""

    def add(self, sigma: float, case: str) -> None:
        """One more case that was accepted."""
        self.cases += 1
        if sigma > self.worst or not self.worst_case:
            self.worst, self.worst_case = sigma, case

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Counts:
        """From a JSON line. Raises ValueError for anything else."""
        given = json.loads(text)
        unknown = set(given) - {f.name for f in fields(cls)} if isinstance(given, dict) else {"no object"}
        if unknown:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        try:
            row = cls(**given)
        except TypeError as error:
            raise ValueError(str(error)) from error
        if not all(isinstance(x, int | float) for x in (row.seconds, row.cases, row.worst, row.findings)):
            raise ValueError("expected numbers")
        return row


def read(path: Path) -> list[Counts]:
    """The rows of a file of JSON lines. Raises ValueError with the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(Counts.parse(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected the counts of a campaign: {error}") from error
    return rows


def append(path: Path, rows: Iterable[Counts]) -> None:
    """Add rows to a file of JSON lines, in one write, so that several processes may."""
    with path.open("a") as file:
        file.write("".join(row.text() + "\n" for row in rows))


def show(console: Console, rows: list[Counts]) -> None:
    """One table, the rows of each operation and implementation summed up, and the worst case of each below it."""
    headings = ("operation", "impl", "processes", "minutes", "cases", "worst sigma", "known", "findings")
    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # narrow enough for a log
    kinds = dict.fromkeys((row.operation, row.impl) for row in rows)
    worst = []
    for operation, impl in kinds:
        mine = [row for row in rows if (row.operation, row.impl) == (operation, impl)]
        most = max(mine, key=lambda row: row.worst)
        findings, known = (sum(getattr(row, name) for row in mine) for name in ("findings", "known"))
        counts = (len(mine), f"{sum(row.seconds for row in mine) / 60:.1f}", f"{sum(row.cases for row in mine):,}")
        table.add_row(
            *(operation, impl or "-", *map(str, counts), f"{most.worst:.2f}", str(known), str(findings)),
            style="red" if findings else None,
        )
        if most.worst:
            on = f" on {impl}" if impl else ""
            worst.append(f"worst of {operation}{on}, {most.worst:.2f} sigma: {most.worst_case}")
    console.print(table)
    for line in worst:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summarise(console: Console, paths: Iterable[Path]) -> int:
    """Print the table of files that `--json` wrote. Returns 1 if they tell of a finding, 2 if one is no such file."""
    try:
        rows = [row for path in paths for row in read(path)]
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    show(console, rows)
    return 1 if any(row.findings for row in rows) else 0
