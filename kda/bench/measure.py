"""How the benchmark times, and what nothing can be faster than.

Calls that are compared run in turn, forwards and backwards (A B C, C B A, ...), so that drift of the clock hits all
alike; a ratio is taken within a round. On a GPU times are by events with the L2 flushed before each call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kda.numerics import SM90_TOKENS
from kda.testing.cases import DTYPES, Case

Call = Callable[[], object]

#: Of a GPU; on a CPU fewer, for a call takes long there.
ROUNDS = {"cuda": 30, "cpu": 5}
#: A call on the CPU that takes longer than this runs once.
LONG_MS = 1e3


@dataclass(frozen=True)
class Timed:
    """ms and the ratio to the first call of the same round: lower quartile, median, upper quartile of each."""

    ms: tuple[float, float, float]
    ratio: tuple[float, float, float]

    @property
    def median(self) -> float:
        return self.ms[1]


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, median, high = statistics.quantiles(samples, n=4)
    return low, median, high


def _timed(samples: Mapping[str, list[float]]) -> dict[str, Timed]:
    first = next(iter(samples.values()))

    def ratios(x: list[float]) -> list[float]:
        if len(x) == len(first):
            return [a / b for a, b in zip(x, first, strict=True)]
        return [statistics.median(x) / statistics.median(first)]  # one of them ran once

    return {name: Timed(quartiles(x), quartiles(ratios(x))) for name, x in samples.items()}


def _order(calls: Mapping[str, Call], round: int) -> list[tuple[str, Call]]:
    items = list(calls.items())
    return items[::-1] if round % 2 else items


def on_gpu(calls: Mapping[str, Call], rounds: int) -> dict[str, Timed]:
    """Time calls on the GPU. The first call of each, where peers tune themselves, is not counted."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(rounds):
        for name, call in _order(calls, i):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return _timed({name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()})


def on_cpu(calls: Mapping[str, Call], rounds: int) -> dict[str, Timed]:
    """Time calls by the wall clock, after a round that is not counted; one that takes seconds runs once."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in _order(calls, i):
            if samples[name] and samples[name][0] > LONG_MS:
                continue
            start = time.perf_counter()
            call()
            elapsed = (time.perf_counter() - start) * 1e3
            if i or elapsed > LONG_MS:
                samples[name].append(elapsed)
    return _timed(samples)


def timed(calls: Mapping[str, Call], device: str) -> dict[str, Timed]:
    """Time calls where they run."""
    return (on_gpu if device == "cuda" else on_cpu)(calls, ROUNDS[device])


@dataclass(frozen=True)
class Captured:
    """A call as the replay of a CUDA graph, which is how a server decodes.

    It keeps the call, and so its tensors: the graph has their addresses alone, and a later capture gives memory that
    nobody holds back to the device.
    """

    graph: torch.cuda.CUDAGraph
    call: Call

    def __call__(self) -> None:
        self.graph.replay()


def captured(call: Call) -> Captured:
    """Capture a call, after one that is not captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Captured(graph, call)


def peak_bytes(call: Call) -> int:
    """The most memory that a call holds on the GPU beyond what was there before, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the GPU, read plus written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / on_gpu({"copy": lambda: target.copy_(source)}, 20)["copy"].median * 1e3


def product_rate() -> float:
    """Operations per second of a large product of bf16 matrices on the GPU, by torch."""
    n = 8192
    a, b = torch.randn(2, n, n, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    return 2 * n**3 / on_gpu({"product": lambda: torch.mm(a, b, out=out)}, 20)["product"].median * 1e3


def bytes_of(case: Case) -> int:
    """What any implementation must move: q, k, v, g in, o out, beta, and the fp32 states in and out, once."""
    element = torch.finfo(DTYPES[case.dtype]).bits // 8
    token = element * (2 * case.H * case.K + case.HV * (2 * case.V + case.K + 1))
    states = 2 * len(case.lengths) * case.HV * case.K * case.V * 4
    return sum(case.lengths) * token + states


def operations_of(case: Case, chunk: int = SM90_TOKENS) -> int:
    """What the chunked algorithm multiplies and adds, 2 operations a pair, with dense chunks of that many tokens.

    Per token and head: Kd S, Qd S and Ak^T R (6 K V); L, M, Ab^T Kr (6 K C) and Aq R (2 V C); the inverse, and M Ab
    (6 C^2).
    """
    K, V = case.K, case.V
    return sum(case.lengths) * case.HV * (6 * K * V + (6 * K + 2 * V) * chunk + 6 * chunk**2)
