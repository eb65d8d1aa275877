"""The host suite: what a repeated call costs the host, when the device never has to be waited for. Needs a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from kda import api
from kda.bench.session import Column, Row, Session, Table, code, inputs, plain
from kda.testing.cases import Case, arguments

#: Calls in a row, and how often; so few that none waits for room in the device's queue.
CALLS, ROUNDS = 400, 15

TABLE = Table(
    "Host time of a repeated call",
    f"Microseconds, median and least of {ROUNDS} rounds of {CALLS} calls, all kinds of call in turn after one round "
    "that is not counted.",
    (
        Column("call", plain("call")),
        Column("implementation", code("implementation")),
        Column("us, median (least)", lambda row: f"{row['us'][1]:.1f} ({row['us'][0]:.1f})"),
    ),
)


def _round(call: Callable[[], object]) -> float:
    """Microseconds of a call, the device idle at the start."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def _calls() -> dict[str, Callable[[str], object]]:
    """Written out as callers do: a `partial` with all arguments by name costs a microsecond itself."""
    call = inputs(Case(lengths=(64,), H=1, K=128, V=128), "cuda")
    q, k, v, g, beta, A_log, dt_bias = (call[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))
    initial, bound = call["initial_state"], call["lower_bound"]
    out, final, pool = torch.empty_like(v), torch.empty_like(initial), initial.clone()
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    token = arguments(Case(lengths=(1,), packed=False, H=1, K=128, V=128), "cuda")
    q1, k1, v1, g1, b1, state = (token[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    one = torch.empty_like(v1)
    return {
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


def rows(session: Session) -> dict[str, list[Row]]:
    """Measure every kind of call, and one of torch's for comparison."""
    kinds: dict[tuple[str, str], Callable[[], object]]
    kinds = {(name, impl): partial(run, impl) for name, run in _calls().items() for impl in session.names}
    x = torch.zeros(1, device="cuda")
    kinds["torch.Tensor.add_", ""] = lambda: x.add_(1)
    samples: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for i in session.over("host", range(ROUNDS + 1)):
        for kind, call in kinds.items():
            elapsed = _round(call)
            if i:
                samples[kind].append(elapsed)
    torch.cuda.synchronize()
    return {
        "host": [
            {"call": name, "implementation": impl, "us": (min(us), statistics.median(us))}
            for (name, impl), us in samples.items()
        ]
    }
