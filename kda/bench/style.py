"""How the figures of benchmark and notebooks look: one colour for one thing, everywhere. Needs matplotlib."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.figure import Figure

#: A colour for each implementation and peer.
COLOURS = {
    "cuda": "#1b9e77",
    "triton": "#7570b3",
    "chunked": "#66a61e",
    "recurrent": "#444444",
    "fla": "#d95f02",
    "flash_kda": "#e7298a",
}
#: What has no name of its own, in order.
CYCLE = ["#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02"]
#: Floors and formulas, drawn over what was measured.
LINE = "#222222"
#: Environment variable: the directory that `save` writes to.
VARIABLE = "KDA_FIGURES"


def use() -> None:
    """Set matplotlib's defaults: thin grey grid, no box, room for the text."""
    plt.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "savefig.dpi": 90,
            "axes.prop_cycle": cycler(color=CYCLE),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e4e4e4",
            "grid.linewidth": 0.8,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 1.8,
            "image.cmap": "RdBu_r",
        }
    )


def save(figure: Figure, name: str) -> None:
    """Write NAME.png into the directory that KDA_FIGURES names; nothing where it is not set."""
    directory = os.environ.get(VARIABLE)
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(directory) / f"{name}.png", metadata={"Software": None})
