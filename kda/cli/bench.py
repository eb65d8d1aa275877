"""`python -m kda bench`: time the named shapes and measure the accuracy of the input families.

Correctness comes first: nothing is timed before the implementations have passed the accuracy families, and at the timed
shapes they must agree with one another. On a GPU times are medians of events with the L2 flushed between runs; on a CPU
they are wall-clock medians of the PyTorch implementations. Peers run live in the same process, and only ratios of one
process are claims.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from kda import api, dispatch
from kda.cli.info import versions
from kda.cli.peers import PEERS, installed
from kda.problem import Output
from kda.ref.error import deviation
from kda.testing.cases import FAMILIES, Case, arguments
from kda.testing.judge import expected, facts_of

#: RMS difference over RMS output above which two implementations do not compute the same thing (bf16 gives 6e-3).
AGREEMENT = 2e-2

RAGGED = (1300, 547, 2048, 963, 271, 3063)

#: Shapes that are timed: bf16, K = V = 128, bounded gate of -5, fp32 states in and out.
SHAPES = {
    "cuda": [
        *(Case(lengths=x, H=H, K=128, V=128) for H in (96, 64) for x in ((8192,), RAGGED, (1024,) * 8)),
        Case(lengths=(16,) * 512, H=32, K=128, V=128),
        Case(lengths=(8192,), H=8, K=128, V=128),
        Case(lengths=(8192,), H=96, K=128, V=128, decay="slow"),
        Case(lengths=(8192,), H=96, K=128, V=128, keys="close", beta="strong", decay="bias -8"),
    ],
    "cpu": [
        Case(lengths=(4096,), H=4, K=128, V=128, dtype="float32"),
        Case(lengths=(300, 1, 0, 700, 64), H=4, K=128, V=128, dtype="float32"),
    ],
}


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median, and the quarter and three-quarter marks."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def inputs(case: Case, device: str) -> dict[str, Any]:
    """The case's call, made on the device."""
    call = arguments(case, device, made_on=device)
    if len(case.lengths) == 1:
        call["cu_seqlens"] = None
    return call


def title(case: Case) -> str:
    """The lengths, and what is unusual about the inputs."""
    alike = len(set(case.lengths)) == 1 and len(case.lengths) > 1
    lengths = f"{len(case.lengths)} x {case.lengths[0]}" if alike else ", ".join(map(str, case.lengths))
    unusual = {"decay": {"slow": "slow channels"}, "keys": {"close": "correlated keys"}}
    names = (known[getattr(case, field)] for field, known in unusual.items() if getattr(case, field) in known)
    return "; ".join([lengths, *names])


def floor_ms(case: Case, bytes_per_second: float) -> float:
    """The time to move what must be moved: q, k, v, g in, o out, beta, and the fp32 states in and out, once."""
    element = torch.finfo(getattr(torch, case.dtype)).bits // 8
    token = element * (2 * case.H * case.K + case.HV * (2 * case.V + case.K + 1))
    states = 2 * len(case.lengths) * case.HV * case.K * case.V * 4
    return (sum(case.lengths) * token + states) / bytes_per_second * 1e3


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read plus written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_on_gpu({"copy": lambda: target.copy_(source)}, 20)["copy"].median * 1e3


def time_on_gpu(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Milliseconds of each call by events, L2 flushed before each, the calls interleaved so that drift hits all."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: _timing([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def time_on_cpu(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timing]:
    """Milliseconds of each call by the wall clock, interleaved; a call that takes seconds runs once."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 1):  # the first round is the warm-up
        for name, call in calls.items():
            if i and samples[name] and samples[name][0] > 1e3:
                continue
            start = time.perf_counter()
            call()
            elapsed = (time.perf_counter() - start) * 1e3
            if i or elapsed > 1e3:
                samples[name].append(elapsed)
    return {name: _timing(x) for name, x in samples.items()}


def _timing(samples: list[float]) -> Timing:
    if len(samples) < 2:
        return Timing(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high)


def _callables(
    case: Case, call: dict[str, Any], names: list[str], device: str, peers: bool = True
) -> dict[str, Callable[[], Output]]:
    """The implementations that accept the case, with buffers in place, and the peers on a GPU."""
    explanation = dispatch.explain_facts(facts_of(replace(case, lengths=(0,) * len(case.lengths)), device))
    buffers = {
        "out": torch.empty_like(call["v"]),
        "final_state": torch.empty_like(call["initial_state"]),
    }
    chosen = [name for name in names if not explanation.reasons[name]]
    result: dict[str, Callable[[], Output]] = {
        name: partial(api.fwd, **{**call, **buffers}, impl=name) for name in chosen
    }
    if device == "cuda" and peers:
        for peer in installed():
            result[peer] = PEERS[peer][2](call)
    return result


def difference(reference: Tensor, other: Tensor) -> float:
    """RMS difference over the RMS reference."""
    a, b = reference.float(), other.float()
    return float((a - b).square().mean().sqrt() / a.square().mean().sqrt())


def times(
    console: Console, names: list[str], device: str, heads: Sequence[int] | None = None
) -> tuple[list[list[str]], bool]:
    """Time every shape, or those with one of these numbers of heads: a heading and a row per implementation.

    The second value: whether ours agreed everywhere.
    """
    rows = [["lengths", "H", "implementation", "ms (quartiles)", "floor / time", "times the first", "RMS difference"]]
    bandwidth = copy_bandwidth() if device == "cuda" else 0.0
    agreed = True
    with Progress(console=console) as progress:
        shapes = [case for case in SHAPES[device] if heads is None or case.H in heads]
        task = progress.add_task("timing", total=len(shapes))
        for case in shapes:
            call = inputs(case, device)
            calls = _callables(case, call, names, device)
            results = {name: Output(run().o.clone(), None) for name, run in calls.items()}
            first = next(iter(results.values()))
            timed = (time_on_gpu if device == "cuda" else time_on_cpu)(calls, 30 if device == "cuda" else 5)
            base = next(iter(timed.values())).median
            for name, timing in timed.items():
                floor = f"{floor_ms(case, bandwidth) / timing.median:.3f}" if bandwidth else ""
                apart = difference(first.o, results[name].o)
                agreed &= apart < AGREEMENT or name not in dispatch.TABLE
                ratio = f"{timing.median / base:.2f}"
                rows.append([title(case), str(case.H), name, str(timing), floor, ratio, f"{apart:.1e}"])
            progress.advance(task)
    if bandwidth:
        console.print(f"copy bandwidth of this run: {bandwidth / 1e12:.2f} TB/s")
    return rows, agreed


def accuracy(console: Console, names: list[str], device: str, peers: bool = True) -> tuple[list[list[str]], bool]:
    """RMS error over RMS reference and worst sigma of every family. The second value: whether all were accepted."""
    rows = [["inputs", "implementation", "RMS o", "RMS state", "worst sigma"]]
    accepted = True
    with Progress(console=console) as progress:
        task = progress.add_task("accuracy", total=len(FAMILIES))
        for family, full in FAMILIES.items():
            case = full if device == "cuda" or len(full.lengths) > 1 else replace(full, lengths=(512,), H=1)
            call = arguments(case, device)
            calls = _callables(case, call, names, device, peers)
            facts = facts_of(case, device)
            for name, run in calls.items():
                result = run()
                state = result.final_state
                result = Output(result.o.cpu(), None if state is None else state.cpu())
                ours = name in dispatch.TABLE
                rounding = dispatch.implementation(name if ours else next(iter(calls))).rounding(facts)
                d = deviation(result, expected(case, rounding))
                accepted &= d.accepted or not ours
                sigma = f"{d.sigma:.2f}" if ours else ""
                rows.append([family, name, f"{d.rms_o:.2e}", f"{d.rms_state:.2e}", sigma])
            progress.advance(task)
    return rows, accepted


def _print(console: Console, title: str, rows: list[list[str]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def _markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _peer_versions() -> str:
    found = [f"{PEERS[name][1]} {importlib.metadata.version(PEERS[name][1])}" for name in installed()]
    return f", {', '.join(found)}" if found else ""


def run(
    console: Console, suite: str, impls: list[str] | None, markdown: str | None, heads: Sequence[int] | None = None
) -> int:
    """Measure and print. Returns 1 if an implementation is outside the tolerance; then nothing is timed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = impls or [n for n in dispatch.AUTO[device] if n in dispatch.TABLE] + (
        ["recurrent"] if device == "cpu" else []
    )
    console.print(versions() + _peer_versions())
    if device == "cpu":
        console.print("No GPU here: these are the PyTorch implementations on the CPU, at small sizes.")
    parts: list[tuple[str, list[list[str]]]] = []
    accepted = True
    if suite in ("all", "time", "accuracy"):
        rows, accepted = accuracy(console, names, device, peers=suite != "time")
        if suite != "time":
            parts.append(("Accuracy: RMS error / RMS reference against fp64", rows))
            _print(console, *parts[-1])
    if not accepted:
        console.print("[red]an implementation is outside the tolerance (see worst sigma): not timed")
        return 1
    if suite in ("all", "decode"):
        from kda.cli import decode

        rows, accepted = decode.times(console, impls, device)
        parts.append(("Decode: one token, K = V = 128, bounded gate of -5, states in fp32", rows))
        _print(console, *parts[-1])
        if not accepted:
            console.print("[red]a step is not what the specification does (see RMS difference)")
    if suite in ("all", "serving"):
        from kda.cli import serving

        rows, agreed = serving.times(console, names, device)
        accepted &= agreed
        parts.append(("Where states lie: in tensors of their own or a pool, with and without checkpoints", rows))
        _print(console, *parts[-1])
        if not agreed:
            console.print("[red]o depends on where states lie")
    if suite == "host" and device == "cpu":
        console.print("the host suite needs a GPU: on a CPU the host computes", style="red")
        return 2
    if suite in ("all", "host") and device == "cuda":
        from kda.cli import serving

        parts.append(("Host time of a repeated call", serving.host(names)))
        _print(console, *parts[-1])
    if suite in ("all", "time"):
        rows, agreed = times(console, names, device, heads)
        accepted &= agreed
        parts.append(("Forward: K = V = 128, bounded gate of -5, states in fp32", rows))
        _print(console, *parts[-1])
        if not agreed:
            console.print("[red]the implementations disagree at a timed shape (see RMS difference)")
    if markdown:
        head = f"{versions()}{_peer_versions()}, {datetime.date.today().isoformat()}"
        Path(markdown).write_text(
            f"{head}\n\n" + "\n\n".join(f"### {title}\n\n{_markdown(rows)}" for title, rows in parts) + "\n"
        )
    return 0 if accepted else 1
