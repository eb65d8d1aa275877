"""The segments suite: what it brings to cut sequences into segments, over a grid of shapes; it must cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kda import api, dispatch
from kda.bench import forward, measure
from kda.bench.session import AGREEMENT, Column, Row, Session, Table, code, inputs, plain, title, where
from kda.testing.cases import Case
from kda.testing.judge import facts_of

HEADS = (1, 4, 8, 16, 32, 64)
#: The grid: sequences of one length.
TOKENS = (512, 1024, 2048, 8192, 32768, 131072)
SEQUENCES = (1, 4, 16)
#: And batches whose sequences differ.
MIXED = (forward.PROMPTS, (8192, *(64,) * 32), (16384, *(300,) * 20), (32768, 0, 1024, 1, 1024))


def _of(H: int) -> Callable[[Row], str]:
    """The time of a number of heads, and what of it the same call takes that is not cut."""

    def text(row: Row) -> str:
        found = row["of"].get(str(H))
        return "" if found is None else f"{found['ms']:.3f} ({found['ratio']:.2f})"

    return text


TABLE = Table(
    "Forward: cut into segments where that pays",
    "ms, and in brackets the ratio to the same call with `batch_invariant=True`, which is never cut; medians of "
    "replays of a CUDA graph, the two in turn. A ratio below 1 is a gain. Several sequences are packed, so that `cuda` "
    "finds where to cut them on the device.",
    (
        Column("lengths", plain("shape")),
        Column("implementation", code("implementation")),
        *(Column(f"H = {H}", _of(H)) for H in HEADS),
    ),
)


def _shapes() -> list[tuple[int, ...]]:
    grid = [(T // N,) * N for T in TOKENS for N in SEQUENCES if T // N >= 64]
    return [*grid, *MIXED]


def _measured(session: Session, case: Case, impl: str) -> dict[str, float] | None:
    """Time and ratio of one shape; None, and a sentence in the session, if results disagree."""
    call = inputs(case, session.device)
    ways = {
        name: partial(api.fwd, **call, batch_invariant=name == "whole", impl=impl) for name in ("whole", "as it pays")
    }
    results = [run() for run in ways.values()]
    if not forward.apart(*results) < AGREEMENT:  # nor NaN
        session.wrong.append(f"{impl} at {where(case)}: another result where sequences are cut")
        return None
    timed = measure.timed({name: measure.captured(run) for name, run in ways.items()}, session.device)
    return {"ms": timed["as it pays"].median, "ratio": timed["as it pays"].ratio[1]}


def rows(session: Session) -> dict[str, list[Row]]:
    """Measure the grid, on a GPU."""
    found: list[Row] = []
    for lengths in session.over("segments", _shapes()):
        cases = session.wanted(Case(lengths=lengths, H=H, K=128, V=128) for H in HEADS if H * sum(lengths) <= 1 << 22)
        small = Case(lengths=(1,), K=128, V=128)
        for impl in session.able(dispatch.explain_facts(facts_of(small, session.device)).reasons):
            of = {str(case.H): one for case in cases if (one := _measured(session, case, impl)) is not None}
            torch.cuda.empty_cache()
            if of:
                found.append({"shape": title(Case(lengths=lengths)), "implementation": impl, "of": of})
    return {"segments": found}
