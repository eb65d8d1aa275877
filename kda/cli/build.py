"""`python -m kda build`: compile the Hopper kernels, with what was found, how far it is, and what the kernels take."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kda import dispatch
from kda.cuda import toolchain
from kda.cuda.build import MANIFEST, RESOURCES, BuildFailed, build
from kda.cuda.resources import Resources, read
from kda.problem import Missing


def _found(console: Console) -> None:
    """The tools a build here would use; nothing where one is missing, which `build` may not need."""
    try:
        pieces = toolchain.find()
        versions = toolchain.versions(pieces)
    except Missing:
        return
    rows = {
        f"nvcc {versions.nvcc}": pieces.nvcc,
        f"CUTLASS {versions.cutlass}": pieces.cutlass,
        "ninja": pieces.ninja,
        "C++ compiler": pieces.cxx,
    }
    for what, where in rows.items():
        console.print(f"{what}: {where}", markup=False, highlight=False, soft_wrap=True)


def table(rows: list[Resources]) -> Table:
    """The kernels' resources: registers per thread, bytes per thread and block."""
    columns = ("registers", "stack", "spill stores", "spill loads", "static shared", "barriers")
    result = Table("kernel", *columns)
    for row in rows:
        figures = (row.registers, row.stack, row.spill_stores, row.spill_loads, row.shared, row.barriers)
        result.add_row(escape(row.kernel), *map(str, figures))
    return result


def _compile(console: Console, force: bool, verbose: bool) -> Path:
    """`build` behind a progress line."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    live = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        task = progress.add_task("looking", total=None)

        def tell(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total or None, description=what)
            if not live:
                console.print(f"[{done}/{total}] {what}", markup=False, highlight=False, soft_wrap=True)

        return build(force=force, verbose=verbose, progress=tell)


def run(console: Console, force: bool, verbose: bool) -> int:
    """Build, and print the table. Returns 1 if a piece is missing or the build failed."""
    _found(console)
    start = time.monotonic()
    try:
        path = _compile(console, force, verbose)
    except (Missing, BuildFailed) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    finally:
        dispatch.forget()
    rows = read(path.parent / RESOURCES)
    if rows:
        console.print(table(rows))
    manifest = json.loads((path.parent / MANIFEST).read_text())
    console.print(
        f"built in {manifest['seconds']:g} s with nvcc {manifest['nvcc']}, CUTLASS {manifest['cutlass']}; "
        f"ready after {time.monotonic() - start:.1f} s"
    )
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0
