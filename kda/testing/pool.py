"""Run a call on a pool and judge it: o and final states against the oracle, the rest of the pool to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda import api, dispatch
from kda.problem import Facts, Output, Span
from kda.ref.error import SIGMAS, Deviation, deviation, expect
from kda.testing.cases import DTYPES, TOKENS, PoolCase, StepCase, arguments, in_fp64
from kda.testing.judge import Finding, device_of, facts_of, reproducer

#: How far from the oracle, what else is wrong, and where the sequences lie.
Judged = tuple[Deviation, list[str], list[Span]]


def call_of(case: StepCase | PoolCase, device: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments of the call but for pool and checkpoints, and the states [N, HV, V, K] that its rows begin with."""
    call = arguments(case.case, device)
    del call["output_final_state"]
    states = call.pop("initial_state")
    N, dtype = len(states), getattr(torch, case.index_dtype)
    indices: dict[str, tuple[Any, tuple[int, ...]]] = {
        "state_indices": (case.reads, (N,)),
        "write_indices": (case.writes, (N,)),
    }
    if isinstance(case, StepCase):
        indices["token_indices"] = case.tokens, tuple(call["q"].shape[:2])
    elif case.kept is not None:
        indices["checkpoint_indices"] = case.kept, (N, len(case.kept[0]) if case.kept else 0)
        call["checkpoint_every"] = case.every
    for name, (values, shape) in indices.items():
        if values is not None:
            call[name] = torch.tensor(values, dtype=dtype, device=device).reshape(shape)
    if case.fresh is not None:
        call["fresh"] = torch.tensor(case.fresh, dtype=torch.bool, device=device)
    return call, states


def pool_of(case: StepCase | PoolCase, states: Tensor) -> Tensor:
    """NaN, but for the states of the rows that are neither padding nor fresh."""
    pool = states.new_full((case.slots, *states.shape[1:]), torch.nan)
    for n, slot in enumerate(reads(case)):
        if slot >= 0 and not (case.fresh and case.fresh[n]):
            pool[slot] = states[n]
    return pool


def reads(case: StepCase | PoolCase) -> tuple[int, ...]:
    """The slot that each row reads."""
    return tuple(range(len(case.case.lengths))) if case.reads is None else case.reads


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def _rows(case: StepCase | PoolCase) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Rows that are no padding, rows that are, and the slot that each row's final state goes to."""
    live = [n for n, slot in enumerate(reads(case)) if slot >= 0]
    padding = [n for n, slot in enumerate(reads(case)) if slot < 0]
    return live, padding, reads(case) if case.writes is None else case.writes


def _against_oracle(case: StepCase | PoolCase, impl: str, facts: Facts, o: Tensor, pool: Tensor) -> Judged:
    """How far o and the states in the pool are from the oracle, whether padding is zero, and where the sequences lie.

    The oracle has all rows; of those that leave no state in the pool it is asked for the output alone.
    """
    live, padding, writes = _rows(case)
    full = arguments(case.case)
    if case.fresh is not None:
        full["initial_state"][torch.tensor(case.fresh, dtype=torch.bool)] = 0
    problem = api.gather(**in_fp64(full))[0]
    spans = problem.layout.spans()
    exact = expect(problem, dispatch.implementation(impl).rounding(facts))
    final, shown = exact.final_state.to(pool.dtype), exact.o.to(o.dtype)
    for n in live:
        row, start, stop = spans[n]
        shown[row, start:stop] = o[row, start:stop].cpu()
        if writes[n] >= 0:
            final[n] = pool[writes[n]].cpu()
    answered = any(bool(o[row, start:stop].any()) for row, start, stop in (spans[n] for n in padding))
    wrong = ["a padding row's output is not zero"] if answered else []
    return deviation(Output(shown, final), exact), wrong, spans


def judge_step(case: StepCase, impl: str) -> tuple[Deviation, str]:
    """How far rows are from the oracle, and what is wrong with the pool: an empty text if nothing is."""
    call, states = call_of(case, device_of(impl))
    live, _, writes = _rows(case)
    pool = pool_of(case, states)
    before = pool.clone()
    o = api.step(**call, state=pool, impl=impl)

    d, wrong, _ = _against_oracle(case, impl, replace(facts_of(case.case), operation="step"), o, pool)
    named = {writes[n] for n in live} | {slot for n in live for slot in (case.tokens[n] if case.tokens else ())}
    others = [slot for slot in range(case.slots) if slot not in named]
    if not same(pool[others], before[others]):
        wrong.append("a slot that nothing writes has changed")
    if case.tokens is not None:
        for t in range(case.case.lengths[0] if live else 0):
            prefix = {name: x[:, : t + 1] if name in TOKENS else x for name, x in call.items() if "indices" not in name}
            rows = states.clone()
            api.step(**prefix, state=rows, impl=impl)
            if any(case.tokens[n][t] >= 0 and not same(pool[case.tokens[n][t]], rows[n]) for n in live):
                wrong.append(f"the state after token {t} is not that of a call with {t + 1} tokens")
    return d, "; ".join(wrong)


def _prefix(case: PoolCase, call: dict[str, Any], states: Tensor, n: int, span: Span, tokens: int, impl: str) -> Tensor:
    """The final state of a call on the first tokens of sequence n alone."""
    elsewhere = ("state_indices", "write_indices", "fresh", "checkpoints", "checkpoint_indices", "checkpoint_every")
    own = {name: x for name, x in call.items() if name not in (*elsewhere, "cu_seqlens")}
    for name in TOKENS:
        own[name] = call[name][span.row : span.row + 1, span.start : span.start + tokens]
    begin = states[n : n + 1].float()  # the same values, and a final state that is not rounded
    if case.fresh and case.fresh[n]:
        begin = torch.zeros_like(begin)
    final = api.fwd(**own, initial_state=begin, output_final_state=True, impl=impl).final_state
    return final[0].to(DTYPES[case.kept_dtype] if case.own else states.dtype)  # type: ignore[index]


def judge_pool(case: PoolCase, impl: str) -> tuple[Deviation, str]:
    """How far o and final states are from the oracle, and what is wrong with pool and checkpoints."""
    call, states = call_of(case, device_of(impl))
    live, _, writes = _rows(case)
    pool = pool_of(case, states)
    kept, kept_before = pool, pool.clone()
    if case.kept is not None:
        if case.own:
            kept = torch.full_like(pool, torch.nan, dtype=DTYPES[case.kept_dtype])
            kept_before = kept.clone()
        call["checkpoints"] = kept
    before = pool.clone()
    o = api.fwd(**call, state_pool=pool, impl=impl).o

    d, wrong, spans = _against_oracle(case, impl, facts_of(case.case), o, pool)
    if case.case.packed and bool(o[0, sum(case.case.lengths) :].any()):
        wrong.append("a row after the last sequence is not zero")
    due = [(n, m) for n in live for m in range(case.case.lengths[n] // case.every)] if case.kept is not None else []
    into = {}
    for n, m in due:
        if m < len(case.kept[n]) and case.kept[n][m] >= 0:  # type: ignore[index]
            into[case.kept[n][m]] = (n, (m + 1) * case.every)  # type: ignore[index]
    named = {writes[n] for n in live} | (set() if case.own else set(into))
    others = [slot for slot in range(case.slots) if slot not in named]
    if not same(pool[others], before[others]):
        wrong.append("a slot that nothing writes has changed")
    others = [slot for slot in range(case.slots) if slot not in into]
    if kept is not pool and not same(kept[others], kept_before[others]):
        wrong.append("a slot for no checkpoint has changed")
    bitwise = impl != "chunked"  # whose products are torch's, of other shapes then
    for slot, (n, tokens) in into.items():
        alone = _prefix(case, call, states, n, spans[n], tokens, impl)
        close = same(kept[slot], alone)
        if not bitwise and not close:
            size = float(alone.float().abs().max()) if alone.numel() else 0.0
            error = float((kept[slot].float() - alone.float()).abs().max())
            close = error <= 2 * torch.finfo(kept.dtype).eps * size + 1e-5 * size
        if not close:
            wrong.append(f"the checkpoint of sequence {n} after {tokens} tokens is not the call's on those")
    return d, "; ".join(wrong)


def judge(case: StepCase | PoolCase, impl: str) -> tuple[Deviation, str]:
    """How far o and states are from the oracle, and what is wrong with the slots: an empty text if nothing is."""
    return judge_step(case, impl) if isinstance(case, StepCase) else judge_pool(case, impl)


def check(case: StepCase | PoolCase, impl: str) -> Deviation:
    """`judge`, raising `Finding` with the reproducer when anything is wrong."""
    d, wrong = judge(case, impl)
    if not d.accepted:
        wrong = "; ".join(filter(None, [wrong, f"{d.sigma:.3g} standard deviations (accepted: {SIGMAS:g})"]))
    if wrong:
        call = "step" if isinstance(case, StepCase) else "fwd on a pool"
        raise Finding(reproducer(case, impl, f"{impl}, {call}: {wrong}"))
    return d
