"""What a fuzzing process leaves for the one that watches it: the case that runs, and the counts so far.

One write before every case. A killed process leaves what it wrote: the file outlives it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from kda.cli.counts import Counts


@dataclass(frozen=True)
class Record:
    """What was written last.

    counts: of the operation and implementation at work.
    case:   the text of the case that runs; empty between cases.
    number: of writes, so that two runs of one case are told apart.
    error:  of the device, after which the process ended itself.
    """

    counts: Counts
    case: str
    number: int
    error: str = ""


class Journal:
    """The worker's end. Rows are kept when they are complete, the record is written over again and again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows = folder / "rows"
        self._record = os.open(folder / "record", os.O_CREAT | os.O_WRONLY)
        self._number, self._lost = 0, False

    def write(self, counts: Counts, case: str = "", error: str = "") -> None:
        """Before a case, or after the last."""
        self._number, self._lost = self._number + 1, bool(error)
        record = {"counts": asdict(counts), "case": case, "number": self._number, "error": error}
        os.pwrite(self._record, json.dumps(record).encode() + b"\n", 0)  # what a longer one left behind is not read

    def keep(self, counts: Counts) -> None:
        """An operation and implementation are done."""
        with self._rows.open("a") as file:
            file.write(counts.text() + "\n")
        if not self._lost:  # else the case that lost the device is what was written last
            self.write(counts)

    def close(self) -> None:
        os.close(self._record)


def last(folder: Path) -> Record | None:
    """What the worker wrote last; None if it has written nothing (complete) yet."""
    try:
        line = (folder / "record").read_bytes().split(b"\n")[0]
        found = json.loads(line)
    except (OSError, ValueError):
        return None
    return Record(Counts(**found["counts"]), found["case"], found["number"], found["error"])


def rows(folder: Path) -> list[Counts]:
    """The rows that are complete, and the one at work."""
    path = folder / "rows"
    kept = [Counts.parse(line) for line in path.read_text().splitlines()] if path.exists() else []
    record = last(folder)
    started = {(row.operation, row.impl) for row in kept}
    if record is not None and (record.counts.operation, record.counts.impl) not in started:
        kept.append(record.counts)
    return kept
