"""`python -m kda bench`: measure what was asked for, correctness first, and show it as tables, files and figures.

Peers run live in the same process, and only ratios of one process are claims. Without a GPU the implementations in
PyTorch are timed, at small sizes, and it says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kda.bench import SUITES, accuracy, decode, forward, host, peers, report, segments, serving
from kda.bench.session import Row, Session, runnable
from kda.bench.session import Table as Described
from kda.cli.info import versions

MEASURE: dict[str, Callable[[Session], dict[str, list[Row]]]] = {
    "accuracy": accuracy.rows,
    **{suite: partial(forward.rows, suite=suite) for suite in forward.SUITES},
    "segments": segments.rows,
    "decode": decode.rows,
    "serving": serving.rows,
    "host": host.rows,
}
#: On a CPU the suites of the forward would be one and the same, and the host computes.
ON_A_CPU = ("accuracy", "headline", "decode", "serving")


def _print(console: Console, table: Described, data: Mapping[str, Any]) -> None:
    rows = data["rows"]
    headings, *lines = [[cell.replace("`", "") for cell in line] for line in table.texts(rows)]
    inside = [i for i, column in enumerate(table.columns) if not column.aside]
    shown = Table(title=table.title, caption=table.about.replace("`", ""), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for i in inside:
        # A narrow terminal breaks headings and between words, never a number.
        longest = max((len(word) for line in lines for word in line[i].split()), default=0)
        shown.add_column(headings[i], overflow="fold", min_width=longest)
    for line in lines:
        shown.add_row(*(line[i] for i in inside))
    console.print(report.describe(data["run"]), markup=False, highlight=False)
    console.print(shown)
    for line in lines:
        for i in set(range(len(headings))) - {*inside}:  # in one piece, to be copied
            console.print(f"{line[0]}: {line[i]}", markup=False, highlight=False, soft_wrap=True)


def _write(console: Console, results: report.Results, json: str | None, markdown: str | None, plot: str | None) -> None:
    """Results as files. Raises ValueError for what has no place there."""
    if json:
        report.save(results, json)
    if markdown:
        report.write(results, markdown)
    if plot:
        from kda.bench import plots

        console.print(f"figures in {plot}: {', '.join(plots.write(results, plot)) or 'none'}", markup=False)


def _checked(json: str | None, markdown: str | None, plot: str | None) -> None:
    """That files can be written, before anything is measured. Raises ValueError for one that cannot."""
    for option, path in (("--json", json), ("--markdown", markdown)):
        if path and not (Path(path).absolute().parent.is_dir() and not Path(path).is_dir()):
            raise ValueError(f"{option}: expected a file in a directory that exists, got {path}")
    if markdown:
        report.place(markdown)
    if plot and Path(plot).exists() and not Path(plot).is_dir():
        raise ValueError(f"--plot: expected a directory, got the file {plot}")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: expected matplotlib to be installed, which it is not: pip install matplotlib")


def _session(
    console: Console,
    device: str,
    suites: Sequence[str],
    names: list[str] | None,
    heads: Sequence[int] | None,
    with_peers: bool,
) -> Session:
    """What is to be measured on a device. Raises ValueError for what cannot be."""
    if device == "cpu" and (missing := [suite for suite in suites if suite not in ON_A_CPU]):
        raise ValueError(f"--suite: expected some of {', '.join(ON_A_CPU)} without a GPU, got {', '.join(missing)}")
    session = Session(
        console,
        device,
        runnable(device, names),
        peers.installed() if with_peers and device == "cuda" else [],
        tuple(heads) if heads else None,
    )
    if heads:
        shapes = forward.ON_A_CPU if device == "cpu" else [case for each in forward.SUITES.values() for case in each]
        there = sorted({case.H for case in shapes} | {H for _, H in decode.SHAPES[device]})
        if not set(heads) & set(there):
            raise ValueError(
                f"--heads: expected some of {', '.join(map(str, there))}, got {', '.join(map(str, heads))}"
            )
    return session


def show(console: Console, files: Sequence[str], json: str | None, markdown: str | None, plot: str | None) -> None:
    """Results that were measured before. Raises ValueError for files that hold none."""
    results = report.load(files)
    for name, data in results.items():
        _print(console, report.TABLES[name], data)
    _write(console, results, json, markdown, plot)


def _measure(session: Session, suites: Sequence[str], where: str, note: str | None, json: str | None) -> report.Results:
    """Every suite, shown and kept as soon as it is done: what is measured is there, whatever comes."""
    results: report.Results = {}
    for suite in suites:
        found = MEASURE[suite](session)
        run_of = report.run_of(session, where, note)
        if not any(found.values()):
            session.console.print(f"{suite}: nothing that {', '.join(session.names)} can run here", markup=False)
            continue
        for name, rows in found.items():
            results[name] = {"run": run_of, "rows": rows}
            _print(session.console, report.TABLES[name], results[name])
        if json:
            report.save(results, json)
    return results


def run(
    console: Console,
    suites: Sequence[str] | None = None,
    names: list[str] | None = None,
    heads: Sequence[int] | None = None,
    with_peers: bool = True,
    files: Sequence[str] | None = None,
    json: str | None = None,
    markdown: str | None = None,
    plot: str | None = None,
    note: str | None = None,
) -> int:
    """Measure, or read what was measured, and show it. Returns 1 if anything is not as specified, 2 for a bad call."""
    try:
        _checked(json, markdown, plot)
        if files:
            if suites or names or heads or note:
                raise ValueError("--from: expected no other choice beside it, for nothing is measured; leave it out")
            show(console, files, json, markdown, plot)
            return 0
        device = "cuda" if torch.cuda.is_available() else "cpu"
        possible = SUITES if device == "cuda" else ON_A_CPU
        chosen = [suite for suite in SUITES if suite in (suites or possible)]
        session = _session(console, device, chosen, names, heads, with_peers)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    where = ", ".join(filter(None, [versions(), report.driver(), peers.versions() if session.peers else ""]))
    if device == "cpu":
        console.print("No GPU here: these are the PyTorch implementations on the CPU, in fp32, at small sizes.")
    results: report.Results = {}
    try:
        results = _measure(session, chosen, where, note, json)
        _write(console, results, None, markdown, plot)
    finally:
        for sentence in session.wrong:
            console.print(sentence, style="red", markup=False, soft_wrap=True)
    return 1 if session.wrong else 0 if results else 2
