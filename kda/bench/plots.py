"""The benchmark's figures: time against length and heads, ratios to peers, error against position. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kda.bench import forward, style
from kda.bench.accuracy import BLOCK
from kda.bench.report import Results
from kda.bench.session import Row

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
    heads = heads if len(heads) <= 3 else [heads[1], heads[-2], heads[-1]]
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
    found = {(row["shape"], row["H"], row["implementation"]): row["ratio"] for row in rows}
    shapes = [shape for shape in dict.fromkeys((row["shape"], row["H"]) for row in rows) if (*shape, first) in found]
    figure, axes = plt.subplots(figsize=(7.0, 1.0 + 0.27 * len(shapes)))
    width = 0.8 / max(len(others), 1)
    for i, name in enumerate(others):
        here = [(n, found[*shape, name]) for n, shape in enumerate(shapes) if (*shape, name) in found]
        at = [n + (i - (len(others) - 1) / 2) * width for n, _ in here]
        medians = [x[1] for _, x in here]
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
    axes.legend(loc="upper right")
    return figure


def position(rows: list[Row]) -> Figure:
    """RMS error and worst sigma against the token's position, for the usual inputs and the hardest."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    shown = [family for family in ("usual", "slow channels", "strong correlation") if family in families]
    figure, panels = plt.subplots(
        2, len(shown), figsize=(3.1 * len(shown) + 0.6, 5.0), sharex=True, sharey="row", squeeze=False
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
            if row["ours"]:
                below.plot(at, row["sigma"], color=colour, lw=1.4, label=name)
        above.set_title(family)
        below.set_xlabel("position of the token")
    panels[0, 0].set_ylabel("RMS error of o, % of its RMS")
    panels[0, 0].set_ylim(0)
    panels[1, 0].set_ylabel("worst error, sigma\n(six accepted)")
    panels[1, 0].set_ylim(0)
    panels[0, 0].legend()
    return figure


FIGURES: dict[str, tuple[str, Callable[[list[Row]], Figure]]] = {
    "time-length": ("length", length),
    "time-heads": ("heads", heads),
    "ratio": ("headline", ratio),
    "error-position": ("rms by position", position),
}


def write(results: Results, directory: str) -> list[str]:
    """Draw what there are results for, as PNG files in a directory. Returns their names."""
    style.use()
    Path(directory).mkdir(parents=True, exist_ok=True)
    written = []
    for name, (table, draw) in FIGURES.items():
        if results.get(table, {}).get("rows"):
            figure = draw(results[table]["rows"])
            figure.savefig(Path(directory) / f"{name}.png", metadata={"Software": None})
            plt.close(figure)
            written.append(f"{name}.png")
    return written
