"""The decode suite: one token for each of N sequences, the states updated in a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kda import api, dispatch
from kda.bench import measure
from kda.bench.peers import STEPS
from kda.bench.session import AGREEMENT, Column, Row, Session, Table, code, difference, plain, ratio, share, spread
from kda.testing.cases import TOKENS, Case, arguments

#: Sequences and heads: bf16, K = V = 128, bounded gate of -5, fp32 states.
SHAPES = {
    "cuda": [(1, 32), (32, 32), (128, 32), (256, 32), (256, 96), (512, 96)],
    "cpu": [(1, 4), (4, 4)],
}

TABLE = Table(
    "Decode: one token a sequence",
    "K = V = 128, bf16, bounded gate of -5, states in fp32. On a GPU replays of a CUDA graph with the L2 flushed "
    "before each. The floor reads and writes every state once. Error: RMS difference of the first and last row "
    "to `recurrent`; 0 where all its bits are the same.",
    (
        Column("N", plain("N")),
        Column("H", plain("H")),
        Column("implementation", code("implementation")),
        Column("ms (quartiles)", spread("ms", 3)),
        Column("ratio", ratio(2)),
        Column("floor / time", share(itemgetter("byte_floor_ms"))),
        Column("error", lambda row: f"{row['error']:.1e}"),
    ),
)


def bytes_of(call: dict[str, Any], pool: Tensor) -> int:
    """What must be moved: the states in and out, and all else once."""
    inputs = sum(call[name].numel() * call[name].element_size() for name in ("q", "k", "v", "v", "g", "beta"))
    return 2 * pool.numel() * pool.element_size() + inputs


def _peer(peer: str, call: dict[str, Any], states: Tensor) -> tuple[measure.Captured, Tensor]:
    run = STEPS[peer](call, states.clone())
    return measure.captured(run), run().o.reshape(call["v"].shape)


def _rows_of(session: Session, N: int, H: int) -> list[Row]:
    gpu = session.device == "cuda"
    call = arguments(Case(lengths=(1,) * N, packed=False, H=H, K=128, V=128), session.device, made_on=session.device)
    states = call.pop("initial_state")
    del call["output_final_state"]
    reasons = dispatch.explain_facts(api.step_facts(**call, state=states)).reasons
    ends = [0, N - 1]
    rows = {name: x[ends] if name in TOKENS else x for name, x in call.items()}
    exact = api.step(**rows, state=states[ends].clone(), impl="recurrent")
    calls: dict[str, Callable[[], object]] = {}
    errors = {}
    for name in session.able(reasons):
        run = partial(api.step, **call, state=states.clone(), out=torch.empty_like(call["v"]), impl=name)
        errors[name] = difference(exact, run()[ends])
        if errors[name] < AGREEMENT:
            calls[name] = measure.captured(run) if gpu else run
        else:
            session.wrong.append(f"step of {name}, N = {N}, H = {H}: error {errors[name]:.1e}")
    for peer in (peer for peer in session.peers if peer in STEPS):
        made = session.attempt(peer, f"N = {N}, H = {H}", partial(_peer, peer, call, states))
        if made is not None:
            calls[peer], o = made
            errors[peer] = difference(exact, o[ends])
    floor = bytes_of(call, states) / session.bandwidth * 1e3 if gpu else 0.0
    return [
        {"N": N, "H": H, "implementation": name, "ms": timed.ms, "ratio": timed.ratio, "byte_floor_ms": floor}
        | {"error": errors[name]}
        for name, timed in (measure.timed(calls, session.device) if calls else {}).items()
    ]


def rows(session: Session) -> dict[str, list[Row]]:
    """Measure every shape."""
    shapes = [(N, H) for N, H in SHAPES[session.device] if session.heads is None or H in session.heads]
    return {"decode": [row for N, H in session.over("decode", shapes) for row in _rows_of(session, N, H)]}
