"""`python -m kda`: which implementations run here, and why the rest does not."""

from __future__ import annotations

import importlib.util
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kda import __version__, dispatch
from kda.testing.cases import Case
from kda.testing.judge import facts_of


def versions() -> str:
    """One line: kda, Python, torch, Triton and the device."""
    triton = "no Triton"
    if importlib.util.find_spec("triton") is not None:
        import triton as installed

        triton = f"Triton {installed.__version__}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {platform.machine()} CPU"
    return f"kda {__version__}, Python {platform.python_version()}, torch {torch.__version__}, {triton}, {device}"


def run(console: Console) -> int:
    """Print the table. The reasons are those for the main job: bf16, K = V = 128, the bounded gate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = facts_of(Case(lengths=(128,), K=128, V=128), device)
    explanation = dispatch.explain_facts(facts)
    console.print(versions())
    console.print(f"For bf16, K = V = 128, the bounded gate, on {device}:")
    table = Table("implementation", "here", "what it is")
    for row in dispatch.implementations():
        reasons = explanation.reasons[row.name]
        if row.name == explanation.chosen:
            status = "[green]chosen by auto"
        elif reasons:
            status = "[red]" + escape(" ".join(reasons))
        else:
            status = "runs; by name"
        table.add_row(row.name, status, row.summary)
    console.print(table)
    return 0
