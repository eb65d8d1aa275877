"""Suites of the forward: the rows that everyone quotes (headline), time against heads, length, and shape of batch.

Before a shape is timed, every implementation's output is compared with `chunked` in fp64 (on two heads and the first
tokens) and with the others (everywhere); what differs by more than bf16 explains is reported and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kda import api, dispatch
from kda.bench import measure
from kda.bench.peers import PEERS
from kda.bench.session import (
    AGREEMENT,
    Column,
    Row,
    Session,
    Table,
    code,
    difference,
    inputs,
    plain,
    ratio,
    spread,
    title,
)
from kda.problem import Output
from kda.testing.cases import TOKENS, Case, in_fp64
from kda.testing.judge import facts_of

#: A batch of prompts, with which FlashKDA is benchmarked.
PROMPTS = (1300, 547, 2048, 963, 271, 3063)
#: Tokens of a shape that are compared with fp64.
COMPARED = 4096


def _at(H: int, *lengths: int, **others: Any) -> Case:
    return Case(lengths=lengths, H=H, K=128, V=128, **others)


#: bf16, K = V = 128, bounded gate of -5, fp32 states in and out.
SUITES: dict[str, list[Case]] = {
    "headline": [
        *(_at(H, *x) for H in (96, 64) for x in ((8192,), PROMPTS, (1024,) * 8)),
        *(_at(H, 8192) for H in (32, 16, 8, 4)),
        *(_at(H, 32768) for H in (32, 8)),
        *(_at(H, 131072) for H in (32, 8, 4)),
        *(_at(32, *x) for x in ((2048,) * 16, (64,) * 128, (16,) * 512)),
        *(_at(*x) for x in ((64, 1024), (64, 512), (8, 1024), (32, 256))),
        _at(96, 8192, decay="slow"),
        _at(96, 8192, keys="close", beta="strong", decay="bias -8"),
    ],
    "heads": [_at(H, 8192) for H in (4, 8, 16, 32, 64, 96)],
    "length": [
        _at(H, T) for H in (4, 8, 16, 32, 96) for T in (512, 2048, 8192, 32768, 131072, 262144) if H * T < 1 << 24
    ],
    "ragged": [
        _at(32, *x)
        for x in (
            (8192,),
            PROMPTS,
            (4096, 2048, 1024, 512, 256, 128, 64, 64),
            (1024,) * 8,
            (256,) * 32,
            (65,) * 126,
            (64,) * 128,
            (16,) * 512,
            (6144, *(16,) * 128),
            (*(1,) * 64, 8128),
            (0, 4096, 0, 0, 4095, 1, 0),
        )
    ],
}
ON_A_CPU = [
    _at(4, 4096, dtype="float32"),
    _at(4, 300, 1, 0, 700, 64, dtype="float32"),
]
TITLES = {
    "headline": "Forward: the shapes that are quoted",
    "heads": "Forward: time against the number of heads",
    "length": "Forward: time against the length",
    "ragged": "Forward: shapes of batch, 8192 tokens in all",
}

_ABOUT = (
    "K = V = 128, bounded gate of -5, gate, norms and sigmoid in the kernel, states in fp32 in and out. Medians and "
    "quartiles of an eager call (where the device is done before the host has launched all, that is host time); ratio: "
    "to the first implementation in the same round. Floor: to move q, k, v, g, o, "
    "beta and the states once at this run's copy bandwidth, or to multiply what chunks of 32 tokens need at this run's "
    "rate of products, whichever is longer. Memory: at the peak of a call beyond its inputs, results included. Error: "
    "RMS difference to `chunked` in fp64 over its RMS, two heads of the first 4096 tokens."
)


def floor_ms(row: Row) -> float:
    """What no implementation can be faster than."""
    return max(row["byte_floor_ms"], row["product_floor_ms"])


def table(suite: str) -> Table:
    """How a suite's rows are shown."""
    columns = (
        Column("lengths", plain("shape")),
        Column("H", plain("H")),
        Column("implementation", code("implementation")),
        Column("ms (quartiles)", spread("ms", 3)),
        Column("ratio", ratio(2)),
        Column("floor / time", lambda row: f"{floor_ms(row) / row['ms'][1]:.3f}" if floor_ms(row) else ""),
        Column("memory, MB", lambda row: f"{row['peak_bytes'] / 1e6:.0f}" if row["peak_bytes"] else ""),
        Column("error", lambda row: f"{row['error']:.1e}"),
    )
    return Table(TITLES[suite], _ABOUT, columns)


def part(case: Case, call: dict[str, Any]) -> tuple[dict[str, Any], int, list[int]]:
    """The call on the first tokens and on two heads, and how many tokens and which heads these are."""
    heads, tokens = sorted({0, case.H - 1}), min(sum(case.lengths), COMPARED)
    result = dict(call)
    for name in TOKENS:
        result[name] = call[name][:, :tokens, heads]
    for name in ("A_log", "dt_bias"):
        if call[name] is not None:
            result[name] = call[name][heads]
    result["initial_state"] = call["initial_state"][:, heads]
    if call["cu_seqlens"] is not None:
        result["cu_seqlens"] = call["cu_seqlens"].clamp(max=tokens)
    return result, tokens, heads


def exact_part(case: Case, call: dict[str, Any], device: str) -> Callable[[Tensor], float]:
    """The error of an output [1, T, H, V], against `chunked` in fp64 on a part of it."""
    small, tokens, heads = part(case, call)
    exact = in_fp64(small)
    exact = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in exact.items()}
    o = api.fwd(**exact, impl="chunked").o
    return lambda other: difference(o, other[:, :tokens, heads])


def callables(session: Session, case: Case, call: dict[str, Any]) -> dict[str, Callable[[], Output]]:
    """The implementations that accept the case, with buffers in place, and the peers."""
    explanation = dispatch.explain_facts(facts_of(replace(case, lengths=(0,) * len(case.lengths)), session.device))
    buffers = {"out": torch.empty_like(call["v"]), "final_state": torch.empty_like(call["initial_state"])}
    chosen = [name for name in session.names if not explanation.reasons[name]]
    result: dict[str, Callable[[], Output]] = {
        name: partial(api.fwd, **{**call, **buffers}, impl=name) for name in chosen
    }
    return result | {peer: PEERS[peer][2](call) for peer in session.peers}


def _checked(
    session: Session, case: Case, call: dict[str, Any]
) -> tuple[dict[str, Callable[[], Output]], dict[str, float]]:
    """The calls that compute the right thing, and the error of all; what is wrong with ours goes to the session."""
    calls = callables(session, case, call)
    error_of = exact_part(case, call, session.device)
    errors, first = {}, None
    for name, run in list(calls.items()):
        try:
            o = run().o
        except Exception as error:
            if name in dispatch.TABLE:
                raise
            session.console.print(f"{name} raised {type(error).__name__} at {title(case)}: {error}", markup=False)
            del calls[name]
            continue
        errors[name] = error_of(o)
        first = o.clone() if first is None else first
        apart = difference(first, o)
        if name in dispatch.TABLE and not (errors[name] < AGREEMENT and apart < AGREEMENT):
            session.wrong.append(
                f"{name} at {title(case)}, H = {case.H}: error {errors[name]:.1e}, apart from the first {apart:.1e}"
            )
            del calls[name]
    return calls, errors


def rows_of(session: Session, case: Case) -> list[Row]:
    """Measure one shape."""
    call = inputs(case, session.device)
    calls, errors = _checked(session, case, call)
    if not calls:
        return []
    gpu = session.device == "cuda"
    peaks = dict.fromkeys(calls, 0)
    if gpu:  # with results of their own, as peers have
        fresh = {name: partial(api.fwd, **call, impl=name) if name in dispatch.TABLE else calls[name] for name in calls}
        peaks = {name: measure.peak_bytes(run) for name, run in fresh.items()}
    return [
        {
            "case": repr(case),
            "shape": title(case),
            "tokens": sum(case.lengths),
            "H": case.H,
            "implementation": name,
            "ms": timed.ms,
            "ratio": timed.ratio,
            "byte_floor_ms": measure.bytes_of(case) / session.bandwidth * 1e3 if gpu else 0.0,
            "product_floor_ms": measure.operations_of(case) / session.rate * 1e3 if gpu else 0.0,
            "peak_bytes": peaks[name],
            "error": errors[name],
        }
        for name, timed in measure.timed(calls, session.device).items()
    ]


def rows(session: Session, suite: str) -> dict[str, list[Row]]:
    """Measure a suite: name of the table -> its rows."""
    cases: Iterable[Case] = SUITES[suite] if session.device == "cuda" else ON_A_CPU
    found: list[Row] = []
    for case in session.over(suite, session.wanted(cases)):
        found.extend(rows_of(session, case))
    return {suite: found}
