"""Suites of the forward: the rows that everyone quotes (headline), time against heads, length, and shape of batch.

Before a shape is timed, results are compared with `chunked` in fp64 (on two heads and the first tokens) and with one
another (everywhere), states too. Ours that differ by more than bf16 explains are reported and not timed; a peer's error
stands beside its time.
"""

from __future__ import annotations

import itertools
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
    share,
    spread,
    title,
    where,
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
    """The larger of two estimates: moving the bytes, and multiplying as the chunked algorithm does."""
    return max(row["byte_floor_ms"], row["product_floor_ms"])


def table(suite: str) -> Table:
    """How a suite's rows are shown."""
    columns = (
        Column("lengths", plain("shape")),
        Column("H", plain("H")),
        Column("implementation", code("implementation")),
        Column("ms (quartiles)", spread("ms", 3)),
        Column("ratio", ratio(2)),
        Column("floor / time", share(floor_ms)),
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


def exact_part(case: Case, call: dict[str, Any], device: str) -> Callable[[Output], tuple[float, float]]:
    """The errors of a result, against `chunked` in fp64 on a part of it: of o, and of the states of whole sequences."""
    small, tokens, heads = part(case, call)
    exact = in_fp64(small)
    exact = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in exact.items()}
    right = api.fwd(**exact, impl="chunked")
    ends = list(itertools.accumulate(case.lengths))
    whole = [n for n, end in enumerate(ends) if end <= tokens]

    def errors_of(result: Output) -> tuple[float, float]:
        o = difference(right.o, result.o[:, :tokens, heads])
        if not whole or result.final_state is None or right.final_state is None:
            return o, 0.0
        return o, difference(right.final_state[whole], result.final_state[whole][:, heads])

    return errors_of


def apart(a: Output, b: Output) -> float:
    """How far two results are from one another, o or states."""
    states = 0.0
    if a.final_state is not None and b.final_state is not None:
        states = difference(a.final_state, b.final_state)
    return max(difference(a.o, b.o), states)


def callables(session: Session, case: Case, call: dict[str, Any]) -> dict[str, Callable[[], Output]]:
    """The implementations that accept the case, with buffers in place, and the peers that can be made to."""
    explanation = dispatch.explain_facts(facts_of(replace(case, lengths=(0,) * len(case.lengths)), session.device))
    buffers = {"out": torch.empty_like(call["v"]), "final_state": torch.empty_like(call["initial_state"])}
    calls: dict[str, Callable[[], Output]] = {
        name: partial(api.fwd, **{**call, **buffers}, impl=name) for name in session.able(explanation.reasons)
    }
    for peer in session.peers:
        made = session.attempt(peer, title(case), partial(PEERS[peer][2], call))
        if made is not None:
            calls[peer] = made
    return calls


def _checked(
    session: Session, case: Case, call: dict[str, Any]
) -> tuple[dict[str, Callable[[], Output]], dict[str, float]]:
    """The calls to time and the error of each. Ours that are wrong are left out; peers are timed as they are."""
    errors_of = exact_part(case, call, session.device)
    calls: dict[str, Callable[[], Output]] = {}
    errors: dict[str, float] = {}
    first: Output | None = None
    for name, run in callables(session, case, call).items():
        ours = name in dispatch.TABLE
        result = run() if ours else session.attempt(name, where(case), run)
        if result is None:
            continue
        errors[name], state = errors_of(result)
        between = 0.0 if first is None else apart(first, result)
        if not all(error < AGREEMENT for error in (errors[name], state, between)):  # nor NaN
            sizes = f"error {errors[name]:.1e}, of states {state:.1e}, from the first {between:.1e}"
            sentence = f"{name} at {where(case)}: {sizes}"
            if ours:
                session.wrong.append(f"{sentence}; not timed")
                continue
            session.console.print(sentence, markup=False)
        calls[name] = run
        if first is None:
            first = Output(result.o.clone(), None if result.final_state is None else result.final_state.clone())
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
        try:
            found.extend(rows_of(session, case))
        except torch.OutOfMemoryError as error:
            session.console.print(f"{where(case)}: {error}", markup=False)
            torch.cuda.empty_cache()
    return {suite: found}
