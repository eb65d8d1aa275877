"""The serving suite: what it costs where states lie, in tensors of their own, in a pool, and with checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kda import api, dispatch
from kda.bench import forward, measure
from kda.bench.session import Column, Row, Session, Table, code, inputs, plain, ratio, spread, title, where
from kda.problem import Output
from kda.testing.cases import Case
from kda.testing.judge import facts_of

#: Tokens from one checkpoint to the next.
EVERY = 512
#: How many of the headline's shapes, and one of many short sequences.
FIRST = 6
SHORT = Case(lengths=(16,) * 512, H=32, K=128, V=128)

TABLE = Table(
    "Where states lie: tensors of their own, a pool, checkpoints",
    f"Ratio: to the same call with initial and final states of its own. o is the same to the bit in all ways. "
    f"Sequences shorter than {EVERY} tokens keep no checkpoint: what their rows show are the lookups.",
    (
        Column("lengths", plain("shape")),
        Column("H", plain("H")),
        Column("implementation", code("implementation")),
        Column("states", plain("states")),
        Column("ms (quartiles)", spread("ms", 3)),
        Column("ratio", ratio(3)),
    ),
)


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


def _rows_of(session: Session, case: Case) -> list[Row]:
    call = inputs(case, session.device)
    reasons = dispatch.explain_facts(facts_of(Case(lengths=(1,), H=case.H, K=128, V=128), session.device)).reasons
    found: list[Row] = []
    for impl in session.able(reasons):
        ways = _ways(call, case.lengths, impl)
        states = ways["pool"].keywords["state_pool"]  # type: ignore[attr-defined]
        start = states.clone()
        results = []
        for run in ways.values():
            states.copy_(start)
            results.append(run().o.clone())
        if not all(torch.equal(results[0], other) for other in results[1:]):
            session.wrong.append(f"{impl} at {where(case)}: o depends on where states lie")
            continue
        found.extend(
            {"shape": title(case), "H": case.H, "implementation": impl, "states": name}
            | {"ms": timed.ms, "ratio": timed.ratio}
            for name, timed in measure.timed(ways, session.device).items()
        )
    return found


def rows(session: Session) -> dict[str, list[Row]]:
    """Measure every shape."""
    shapes = [*forward.SUITES["headline"][:FIRST], SHORT] if session.device == "cuda" else forward.ON_A_CPU
    return {
        "serving": [row for case in session.over("serving", session.wanted(shapes)) for row in _rows_of(session, case)]
    }
