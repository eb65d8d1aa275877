"""Suites of `python -m kda bench`: what pools and checkpoints cost (serving), and what a call costs the host (host)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from kda import api, dispatch
from kda.cli.bench import SHAPES, inputs, time_on_cpu, time_on_gpu, title
from kda.problem import Output
from kda.testing.cases import Case, arguments
from kda.testing.judge import facts_of

#: Tokens from one checkpoint to the next.
EVERY = 512
#: How many of the shapes of the time suite.
FIRST = {"cuda": 7, "cpu": 2}
#: Calls in a row, and how often: few enough that they never wait for the device.
CALLS, ROUNDS = 400, 15


def _ways(call: dict[str, Any], lengths: tuple[int, ...], impl: str) -> dict[str, Callable[[], Output]]:
    """The same sequences with tensors of their own, with checkpoints besides, and in slots of a pool."""
    states, device = call["initial_state"], call["q"].device
    N, columns = len(lengths), max(max(lengths) // EVERY, 1)
    out, final = torch.empty_like(call["v"]), torch.empty_like(states)
    own = {**call, "out": out, "final_state": final}
    kept = {
        "checkpoints": states.new_empty(N * columns, *states.shape[1:]),
        "checkpoint_indices": torch.arange(N * columns, device=device).reshape(N, columns),
        "checkpoint_every": EVERY,
    }
    pool = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}
    pool |= {"out": out, "state_pool": states.repeat_interleave(2, 0)}
    pool["state_indices"] = torch.arange(N, device=device) * 2
    ways = {"own": own, f"own, a checkpoint in {EVERY} tokens": {**own, **kept}, "pool": pool}
    return {name: partial(api.fwd, **way, impl=impl) for name, way in ways.items()}


def times(console: Console, names: list[str], device: str) -> tuple[list[list[str]], bool]:
    """A heading and a row per shape, implementation and way. The second value: whether o is the same in all ways."""
    rows = [["lengths", "H", "implementation", "states", "ms (quartiles)", "times own"]]
    agreed = True
    shapes = SHAPES[device][: FIRST[device]]
    with Progress(console=console) as progress:
        task = progress.add_task("serving", total=len(shapes))
        for case in shapes:
            call = inputs(case, device)
            reasons = dispatch.explain_facts(facts_of(Case(lengths=(1,), H=case.H, K=128, V=128), device)).reasons
            for impl in (name for name in names if not reasons[name]):
                ways = _ways(call, case.lengths, impl)
                states = ways["pool"].keywords["state_pool"]  # type: ignore[attr-defined]
                start = states.clone()
                results = []
                for run in ways.values():
                    states.copy_(start)
                    results.append(run().o.clone())
                agreed &= all(torch.equal(results[0], other) for other in results[1:])
                timed = (time_on_gpu if device == "cuda" else time_on_cpu)(ways, 30 if device == "cuda" else 5)
                for name, timing in timed.items():
                    ratio = f"{timing.median / timed['own'].median:.3f}"
                    rows.append([title(case), str(case.H), impl, name, str(timing), ratio])
            progress.advance(task)
    return rows, agreed


def _microseconds(call: Callable[[], object]) -> str:
    """Of host time a call, median and least of some rounds."""
    call()
    call()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return f"{statistics.median(rounds):.1f} ({min(rounds):.1f})"


def host(names: list[str]) -> list[list[str]]:
    """Host time of repeated calls so small that the device never has to be waited for. Needs a GPU.

    Written out as callers do: a `partial` with all arguments by name costs a microsecond itself.
    """
    call = inputs(Case(lengths=(64,), H=1, K=128, V=128), "cuda")
    q, k, v, g, beta, A_log, dt_bias = (call[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))
    initial, bound = call["initial_state"], call["lower_bound"]
    out, final, pool = torch.empty_like(v), torch.empty_like(initial), initial.clone()
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    token = arguments(Case(lengths=(1,), packed=False, H=1, K=128, V=128), "cuda")
    q1, k1, v1, g1, b1, state = (token[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    one = torch.empty_like(v1)
    calls: dict[str, Callable[[str], object]] = {
        "fwd, buffers": lambda impl: api.fwd(
            q, k, v, g, beta, None, out, A_log, dt_bias, bound, initial, final, impl=impl
        ),
        "fwd, new results": lambda impl: api.fwd(
            q, k, v, g, beta, None, None, A_log, dt_bias, bound, initial, output_final_state=True, impl=impl
        ),
        "fwd on a pool": lambda impl: api.fwd(
            q, k, v, g, beta, None, out, A_log, dt_bias, bound, state_pool=pool, state_indices=slot, impl=impl
        ),
        "step": lambda impl: api.step(
            q1, k1, v1, g1, b1, state, None, one, A_log, dt_bias, bound, state_indices=slot, impl=impl
        ),
        "step, new result": lambda impl: api.step(
            q1, k1, v1, g1, b1, state, None, None, A_log, dt_bias, bound, state_indices=slot, impl=impl
        ),
    }
    rows = [["call", "implementation", "us, median (least)"]]
    for name, run in calls.items():
        rows.extend([name, impl, _microseconds(partial(run, impl))] for impl in names)
    x = torch.zeros(1, device="cuda")
    rows.append(["torch.Tensor.add_", "", _microseconds(lambda: x.add_(1))])
    return rows
