"""Run a `StepCase` on an implementation and judge it: the rows against the oracle, the pool to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda import api, dispatch
from kda.problem import Output
from kda.ref.error import SIGMAS, Deviation, deviation, expect
from kda.testing.cases import TOKENS, StepCase, arguments, in_fp64
from kda.testing.judge import Finding, device_of, facts_of, reproducer


def call_of(case: StepCase, device: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of `kda.step` but for the pool, and the states [N, HV, V, K] that its rows begin with."""
    call = arguments(case.case, device)
    del call["output_final_state"]
    states = call.pop("initial_state")
    dtype = getattr(torch, case.index_dtype)
    for name, values in (
        ("state_indices", case.reads),
        ("write_indices", case.writes),
        ("token_indices", case.tokens),
    ):
        if values is not None:
            shape = states.shape[:1] if name != "token_indices" else call["q"].shape[:2]
            call[name] = torch.tensor(values, dtype=dtype, device=device).reshape(shape)
    if case.fresh is not None:
        call["fresh"] = torch.tensor(case.fresh, dtype=torch.bool, device=device)
    return call, states


def pool_of(case: StepCase, states: Tensor) -> Tensor:
    """NaN, but for the states of the rows that are neither padding nor fresh."""
    pool = states.new_full((case.slots, *states.shape[1:]), torch.nan)
    for n, slot in enumerate(reads(case)):
        if slot >= 0 and not (case.fresh and case.fresh[n]):
            pool[slot] = states[n]
    return pool


def reads(case: StepCase) -> tuple[int, ...]:
    """The slot that each row reads."""
    return tuple(range(len(case.case.lengths))) if case.reads is None else case.reads


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def judge(case: StepCase, impl: str) -> tuple[Deviation, str]:
    """How far rows are from the oracle, and what is wrong with the pool: an empty text if nothing is."""
    call, states = call_of(case, device_of(impl))
    N, live = len(case.case.lengths), [n for n, slot in enumerate(reads(case)) if slot >= 0]
    writes = reads(case) if case.writes is None else case.writes
    pool = pool_of(case, states)
    before = pool.clone()
    o = api.step(**call, state=pool, impl=impl)

    # The oracle has all rows; of those that leave no state in the pool it is asked for the output alone.
    full = arguments(case.case)
    if case.fresh is not None:
        full["initial_state"][torch.tensor(case.fresh, dtype=torch.bool)] = 0
    facts = replace(facts_of(case.case), operation="step")
    exact = expect(api.gather(**in_fp64(full))[0], dispatch.implementation(impl).rounding(facts))
    final = exact.final_state.to(pool.dtype)
    shown = exact.o.to(o.dtype)
    for n in live:
        shown[n] = o[n].cpu()
        if writes[n] >= 0:
            final[n] = pool[writes[n]].cpu()
    d = deviation(Output(shown, final), exact)

    wrong = []
    padding = [n for n in range(N) if n not in live]
    if bool(o[padding].any()):
        wrong.append("a padding row's output is not zero")
    named = {writes[n] for n in live} | {slot for n in live for slot in (case.tokens[n] if case.tokens else ())}
    others = [slot for slot in range(case.slots) if slot not in named]
    if not same(pool[others], before[others]):
        wrong.append("a slot that nothing writes has changed")
    if case.tokens is not None:
        for t in range(case.case.lengths[0] if N else 0):
            prefix = {name: x[:, : t + 1] if name in TOKENS else x for name, x in call.items() if "indices" not in name}
            rows = states.clone()
            api.step(**prefix, state=rows, impl=impl)
            if any(case.tokens[n][t] >= 0 and not same(pool[case.tokens[n][t]], rows[n]) for n in live):
                wrong.append(f"the state after token {t} is not that of a call with {t + 1} tokens")
    return d, "; ".join(wrong)


def check(case: StepCase, impl: str) -> Deviation:
    """`judge`, raising `Finding` with the reproducer when anything is wrong."""
    d, wrong = judge(case, impl)
    if not d.accepted:
        wrong = "; ".join(filter(None, [wrong, f"{d.sigma:.3g} standard deviations (accepted: {SIGMAS:g})"]))
    if wrong:
        raise Finding(reproducer(case, impl, f"{impl}, step: {wrong}"))
    return d
