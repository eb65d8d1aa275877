"""`python -m kda bench`: measure what was asked for, correctness first, and show it as tables, files and figures.

Peers run live in the same process, and only ratios of one process are claims. Without a GPU the implementations in
PyTorch are timed, at small sizes, and it says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from kda.bench import SUITES, accuracy, decode, forward, host, peers, report, serving
from kda.bench.session import Row, Session, of_session
from kda.bench.session import Table as Described
from kda.cli.info import versions

MEASURE: dict[str, Callable[[Session], dict[str, list[Row]]]] = {
    "accuracy": accuracy.rows,
    **{suite: partial(forward.rows, suite=suite) for suite in forward.SUITES},
    "decode": decode.rows,
    "serving": serving.rows,
    "host": host.rows,
}
#: On a CPU the suites of the forward would be one and the same, and the host computes.
ON_A_CPU = ("accuracy", "headline", "decode", "serving")


def _print(console: Console, table: Described, rows: list[Row]) -> None:
    texts = [[cell.replace("`", "") for cell in line] for line in table.texts(rows)]
    shown = Table(*texts[0], title=table.title, caption=table.about.replace("`", ""))
    for line in texts[1:]:
        shown.add_row(*line)
    console.print(shown)


def show(console: Console, results: report.Results, markdown: str | None, plot: str | None) -> int:
    """Print results, and write them as Markdown and figures."""
    for name, table in results.items():
        _print(console, report.TABLES[name], table["rows"])
    if markdown:
        report.write(results, markdown)
    if plot:
        from kda.bench import plots

        console.print(f"figures in {plot}: {', '.join(plots.write(results, plot)) or 'none'}", markup=False)
    return 0


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
    if plot and importlib.util.find_spec("matplotlib") is None:
        console.print("--plot needs matplotlib: pip install matplotlib", style="red")
        return 2
    if files:
        try:
            kept = report.load(files)
        except ValueError as error:
            console.print(str(error), style="red", markup=False)
            return 2
        if json:
            report.save(kept, json)
        return show(console, kept, markdown, plot)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    possible = [*SUITES] if device == "cuda" else ON_A_CPU
    chosen = [suite for suite in SUITES if suite in (suites or possible)]
    missing = [suite for suite in chosen if suite not in possible]
    if missing:
        console.print(f"{', '.join(missing)}: needs a GPU. On a CPU there are {', '.join(ON_A_CPU)}.", style="red")
        return 2
    session = Session(console, device, *of_session(device, names, with_peers), tuple(heads) if heads else None)
    where = ", ".join(filter(None, [versions(), report.driver(), peers.versions() if session.peers else ""]))
    console.print(where, markup=False)
    if device == "cpu":
        console.print("No GPU here: these are the PyTorch implementations on the CPU, at small sizes.")
    results: report.Results = {}
    for suite in chosen:
        found = MEASURE[suite](session)
        run_of = report.run_of(session, where, note)
        results |= {name: {"run": run_of, "rows": rows} for name, rows in found.items()}
        if json:  # after every suite: what is measured is kept, whatever comes
            report.save(results, json)
    show(console, results, markdown, plot)
    for sentence in session.wrong:
        console.print(sentence, style="red", markup=False)
    return 1 if session.wrong else 0
