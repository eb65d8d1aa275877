"""The benchmark's figures: time against length and heads, ratios to peers, error against position. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from kda.bench import forward, style
from kda.bench.accuracy import BLOCK
from kda.bench.report import Results
from kda.bench.session import Row

#: Families whose errors are drawn along the sequence: the usual inputs and the hardest.
SHOWN = ("usual", "slow channels", "strong correlation", "one key repeated")

#: How names are written in a legend.
NAMES = {"fla": "flash-linear-attention", "flash_kda": "FlashKDA"}


def _name(implementation: str) -> str:
    return NAMES.get(implementation, implementation)


def _lines(axes: Axes, rows: list[Row], x: str) -> None:
    """A line per implementation, and the floor."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row[x]):
        lines[row["implementation"]].append(row)
    for name, points in lines.items():
        at = [row[x] for row in points]
        axes.plot(at, [row["ms"][1] for row in points], "o-", ms=3.5, color=style.COLOURS.get(name), label=_name(name))
    longest = max(lines.values(), key=len)
    if all(map(forward.floor_ms, longest)):
        floors = [forward.floor_ms(row) for row in longest]
        axes.plot(
            [row[x] for row in longest], floors, "--", lw=1.2, color=style.LINE, label="floor (bytes or products)"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _count(n: float) -> str:
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def _ticks(axes: Axes, values: set[int], apart: float) -> None:
    """Of the values those that are as many times apart."""
    shown: list[int] = []
    for value in sorted(values):
        if not shown or value >= apart * shown[-1]:
            shown.append(value)
    axes.set_xticks(shown, [_count(value) for value in shown])


def length(rows: list[Row]) -> Figure:
    """Time against length, a panel for each number of heads."""
    by_heads: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_heads[row["H"]].append(row)
    heads = sorted(by_heads)
    figure, panels = plt.subplots(1, len(heads), figsize=(2.8 * len(heads) + 1, 3.5), sharey=True, squeeze=False)
    for axes, H in zip(panels[0], heads, strict=True):
        _lines(axes, by_heads[H], "tokens")
        _ticks(axes, {row["tokens"] for row in by_heads[H]}, apart=3)
        axes.set_title(f"{H} heads")
        axes.set_xlabel("tokens of one sequence")
    panels[0][0].set_ylabel("ms")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def heads(rows: list[Row]) -> Figure:
    """Time against the number of heads."""
    figure, axes = plt.subplots()
    _lines(axes, rows, "H")
    _ticks(axes, {row["H"] for row in rows}, apart=1)
    axes.set_title("one sequence of 8192 tokens")
    axes.set_xlabel("heads")
    axes.set_ylabel("ms")
    axes.legend()
    return figure


def ratio(rows: list[Row]) -> Figure:
    """Bars: how many times as long as the first implementation the others take."""
    first = rows[0]["implementation"]
    others = [name for name in dict.fromkeys(row["implementation"] for row in rows) if name != first]
    found = {(row["shape"], row["H"], row["implementation"]): row["ms"][1] for row in rows}
    shapes = [shape for shape in dict.fromkeys((row["shape"], row["H"]) for row in rows) if (*shape, first) in found]
    figure, axes = plt.subplots(figsize=(7.0, 1.0 + 0.27 * len(shapes)))
    width = 0.8 / max(len(others), 1)
    for i, name in enumerate(others):
        both = [(n, (*shape, name), (*shape, first)) for n, shape in enumerate(shapes) if (*shape, name) in found]
        here = [(n, found[a] / found[b]) for n, a, b in both]
        at = [n + (i - (len(others) - 1) / 2) * width for n, _ in here]
        medians = [x for _, x in here]
        colour = style.COLOURS.get(name)
        axes.barh(at, [x - 1 for x in medians], left=1, height=width, color=colour, label=_name(name))
        for y, x in zip(at, medians, strict=True):
            side = "left" if x >= 1 else "right"
            axes.annotate(
                f"{x:.1f}",
                (x, y),
                (3 if x >= 1 else -3, 0),
                textcoords="offset points",
                fontsize=6.5,
                ha=side,
                va="center",
            )
    axes.axvline(1, color=style.LINE, lw=1.0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 1) / 1.25, high * 1.25)
    axes.set_yticks(range(len(shapes)), [f"{shape}   H = {H}" for shape, H in shapes], fontsize=8)
    axes.set_ylim(len(shapes) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"time / time of {_name(first)}, log scale")
    axes.legend(loc="center right")
    return figure


def position(rows: list[Row]) -> Figure:
    """RMS error and worst sigma against the token's position, for the usual inputs and the hardest."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    shown = [family for family in SHOWN if family in families]
    figure, panels = plt.subplots(
        2, len(shown), figsize=(2.4 * len(shown) + 1.0, 5.2), sharex=True, sharey="row", squeeze=False
    )
    for column, family in enumerate(shown):
        above, below = panels[:, column]
        for row in (row for row in rows if row["family"] == family):
            at = (np.arange(len(row["error2"])) + 0.5) * BLOCK
            colour, name = style.COLOURS.get(row["implementation"]), _name(row["implementation"])
            above.plot(
                at,
                100 * np.sqrt(np.array(row["error2"]) / np.array(row["reference2"])),
                color=colour,
                lw=1.4,
                label=name,
            )
            below.plot(at, row["sigma"], "-" if row["ours"] else ":", color=colour, lw=1.4)
        above.set_title(family)
        below.set_xlabel("position of the token")
    panels[0, 0].set_ylabel("RMS error of o / RMS, %")
    panels[0, 0].set_yscale("log")
    panels[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0, 0].yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    panels[0, 0].yaxis.set_minor_locator(NullLocator())
    panels[1, 0].set_ylabel("worst error of o, sigma")
    panels[1, 0].set_ylim(0)
    lines, names = panels[0, 0].get_legend_handles_labels()
    lines.append(Line2D([], [], ls=":", color=style.LINE))
    names.append("a peer, in our roundings")
    figure.legend(lines, names, loc="outside lower center", ncols=5)
    return figure


#: Name -> the table it is made of, how it is drawn, and of how many implementations at least.
FIGURES: dict[str, tuple[str, Callable[[list[Row]], Figure], int]] = {
    "time-length": ("length", length, 1),
    "time-heads": ("heads", heads, 1),
    "ratio": ("headline", ratio, 2),
    "error-position": ("rms by position", position, 1),
}


def write(results: Results, directory: str) -> list[str]:
    """Draw what there are results for, as PNG files in a directory. Returns their names.

    Raises ValueError for rows that lack something.
    """
    style.use()
    Path(directory).mkdir(parents=True, exist_ok=True)
    written = []
    for name, (table, draw, least) in FIGURES.items():
        rows = results.get(table, {}).get("rows")
        if rows and len({row["implementation"] for row in rows}) >= least:
            try:
                figure = draw(rows)
            except KeyError as error:
                raise ValueError(f"--plot: the rows of {table!r} have no {error}, which its figure needs") from error
            figure.savefig(Path(directory) / f"{name}.png", metadata={"Software": None})
            plt.close(figure)
            written.append(f"{name}.png")
    return written
