"""Metamorphic laws: what must hold between two calls, to the bit where the implementation claims it.

They see what no tolerance can: a rounding that depends on the future, a result that depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from targets import device, implementations, interpreted, kernels
from torch import Tensor

import kda
from kda import Output
from kda.numerics import CHUNK
from kda.testing.cases import Case, arguments, fitted

#: Batched products of PyTorch may round by the number of matrices, so `chunked` keeps these laws to its own precision.
ROUNDS_BY_BATCH = ("chunked",)

REGIMES = {
    "bounded": Case(H=2, decay="slow"),
    "close keys": Case(keys="close", beta="strong", decay="slow"),
    "softplus": Case(gate="softplus", decay="mixed"),
    "resets": Case(gate="given", decay="resets"),
    "fp32": Case(dtype="float32", decay="slow"),
}


def regimes() -> list:
    return [pytest.param(case, id=name) for name, case in REGIMES.items()]


def call(case: Case, impl: str, **changes: Any) -> dict[str, Any]:
    """The arguments of the case's call, on the implementation's device."""
    return {**arguments(fitted(case, impl), device(impl)), "impl": impl, **changes}


def assert_equal(a: Tensor, b: Tensor) -> None:
    """Equal bit for bit; NaN equals NaN."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_same(a: Tensor, b: Tensor, impl: str) -> None:
    """Equal bit for bit, or to fp32's precision where the implementation claims no more."""
    if impl in ROUNDS_BY_BATCH:
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-5)
    else:
        assert_equal(a, b)


def state_of(result: Output) -> Tensor:
    assert result.final_state is not None
    return result.final_state


TOKENS = ("q", "k", "v", "g", "beta")


# ---- causality


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("case", regimes())
def test_prefix_causality(impl: str, case: Case) -> None:
    """Changing everything from position P on, or cutting it off, moves no bit of the outputs before P."""
    case = replace(case, lengths=(150,))
    full = call(case, impl)
    o = kda.fwd(**full).o
    other = call(replace(case, seed=1, decay="strong", keys="random", beta="random"), impl)
    for P in (1, 16, 17, 40, 63, 65, 130) if not interpreted(impl) else (17, 40, 65):
        mixed = dict(full)
        for name in TOKENS:
            mixed[name] = torch.cat([full[name][:, :P], other[name][:, P:]], 1)
        assert_equal(kda.fwd(**mixed).o[:, :P], o[:, :P])
        cut = dict(full, cu_seqlens=full["cu_seqlens"].clamp(max=P))
        for name in TOKENS:
            cut[name] = full[name][:, :P]
        assert_equal(kda.fwd(**cut).o, o[:, :P])


@pytest.mark.parametrize("impl", implementations())
def test_a_later_key_that_overflows_reaches_no_earlier_token(impl: str) -> None:
    """Raw keys of any size: the recurrence may grow without bound after one, not before it."""
    args = call(Case(lengths=(60,), use_qk_l2norm=False, keys="close", decay="none"), impl)
    large = dict(args, k=args["k"].clone())
    large["k"][:, 50] *= 10
    assert_equal(kda.fwd(**large).o[:, :50], kda.fwd(**args).o[:, :50])


# ---- layout


@pytest.mark.parametrize("impl", implementations())
def test_batch_is_varlen(impl: str) -> None:
    case = Case(lengths=(70, 70, 70), packed=False, H=2)
    batch = call(case, impl)
    packed = dict(batch, cu_seqlens=torch.arange(4, device=device(impl)) * 70)
    for name in TOKENS:
        packed[name] = batch[name].flatten(0, 1)[None]
    a, b = kda.fwd(**batch), kda.fwd(**packed)
    assert_same(a.o.flatten(0, 1), b.o[0], impl)
    assert_same(state_of(a), state_of(b), impl)


@pytest.mark.parametrize("impl", implementations())
def test_sequences_do_not_see_each_other(impl: str) -> None:
    """Reordering a batch reorders the result; so a sequence's result does not depend on what else is in the batch."""
    case = Case(lengths=(65, 0, 17, 40), H=2)
    args = call(case, impl, batch_invariant=True)
    bounds = args["cu_seqlens"].tolist()
    order = [2, 0, 3, 1]
    rows = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in order]).to(device(impl))
    shuffled = dict(args, initial_state=args["initial_state"][order])
    shuffled["cu_seqlens"] = torch.tensor([0, *(case.lengths[n] for n in order)], device=device(impl)).cumsum(0)
    for name in TOKENS:
        shuffled[name] = args[name][:, rows]
    a, b = kda.fwd(**args), kda.fwd(**shuffled)
    assert_same(a.o[:, rows], b.o, impl)
    assert_same(state_of(a)[order], state_of(b), impl)


@pytest.mark.parametrize("impl", implementations())
def test_heads_do_not_see_each_other(impl: str) -> None:
    args = call(Case(lengths=(70,), H=3), impl)
    order = torch.tensor([2, 0, 1], device=device(impl))
    shuffled = dict(args, A_log=args["A_log"][order], dt_bias=args["dt_bias"][order])
    shuffled["initial_state"] = args["initial_state"][:, order]
    for name in TOKENS:
        shuffled[name] = args[name][:, :, order]
    a, b = kda.fwd(**args), kda.fwd(**shuffled)
    assert_same(a.o[:, :, order], b.o, impl)
    assert_same(state_of(a)[:, order], state_of(b), impl)


@pytest.mark.parametrize("impl", implementations())
def test_grouped_heads_are_repeated_heads(impl: str) -> None:
    """Value head i reads query/key head i // (HV // H)."""
    args = call(Case(lengths=(70,), H=2, group=2), impl)
    repeated = dict(args, q=args["q"].repeat_interleave(2, 2), k=args["k"].repeat_interleave(2, 2))
    assert_same(kda.fwd(**args).o, kda.fwd(**repeated).o, impl)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("case", regimes())
def test_split_at_chunks_and_carry(impl: str, case: Case) -> None:
    """Prefill in pieces at multiples of 64 equals the one-shot call, on output and state, with fp32 states."""
    case = replace(case, lengths=(150,), K=16, V=24)
    args = call(case, impl, batch_invariant=True, cu_seqlens=None)
    whole = kda.fwd(**args)
    state, pieces = args["initial_state"], []
    for start, stop in ((0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 150)):
        piece = dict(args, initial_state=state)
        for name in TOKENS:
            piece[name] = args[name][:, start:stop]
        result = kda.fwd(**piece)
        state = state_of(result)
        pieces.append(result.o)
    assert_same(torch.cat(pieces, 1), whole.o, impl)
    assert_same(state, state_of(whole), impl)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_empty_sequences_keep_their_state(impl: str, state_dtype: str) -> None:
    args = call(Case(lengths=(0, 3, 0, 0, 65, 0), state_dtype=state_dtype), impl)
    empty = [0, 2, 3, 5]
    assert_equal(state_of(kda.fwd(**args))[empty], args["initial_state"][empty])
    assert not state_of(kda.fwd(**dict(args, initial_state=None)))[empty].any()


@pytest.mark.parametrize("impl", implementations())
def test_padding_is_zero_and_reaches_nothing(impl: str) -> None:
    padded = call(Case(lengths=(20, 50), padding=45), impl)  # padding rows hold NaN
    trimmed = dict(padded)
    for name in TOKENS:
        trimmed[name] = padded[name][:, :70]
    a, b = kda.fwd(**padded), kda.fwd(**trimmed)
    assert_same(a.o[:, :70], b.o, impl)
    assert_same(state_of(a), state_of(b), impl)
    assert not a.o[:, 70:].any()


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(impl: str, poison: float) -> None:
    """NaN in one sequence reaches no other, nor a token more than 64 before it."""
    args = call(Case(lengths=(40, 150, 40), decay="slow"), impl)
    clean = kda.fwd(**args)
    at = 40 + 100
    for name in TOKENS:
        poisoned = dict(args)
        poisoned[name] = args[name].clone()
        poisoned[name][:, at] = poison
        result = kda.fwd(**poisoned)
        if poison != poison:
            assert result.o[:, at].isnan().all(), f"NaN in {name} is not hidden either"
        untouched = torch.ones(230, dtype=torch.bool, device=device(impl))
        untouched[at - CHUNK : 190] = False
        assert_equal(result.o[:, untouched], clean.o[:, untouched])
        assert_equal(state_of(result)[[0, 2]], state_of(clean)[[0, 2]])


# ---- values


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("power", [10, -10])
def test_linear_in_value_and_state(impl: str, power: int) -> None:
    """Scaling v and the state by a power of two scales the result, exactly."""
    args = call(Case(lengths=(70,)), impl)
    scaled = dict(args, v=args["v"] * 2.0**power, initial_state=args["initial_state"] * 2.0**power)
    a, b = kda.fwd(**args), kda.fwd(**scaled)
    assert_equal(a.o * 2.0**power, b.o)
    assert_equal(state_of(a) * 2.0**power, state_of(b))


@pytest.mark.parametrize("impl", implementations())
def test_nothing_written_nothing_forgotten(impl: str) -> None:
    """beta = 0 and no decay: the state stays as it is, to the bit."""
    args = call(Case(lengths=(70, 3), beta="zero", decay="none"), impl)
    assert_equal(state_of(kda.fwd(**args)), args["initial_state"])


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("norm", [2.0**-7, 2.0**13])
def test_normalised_keys_have_no_scale(impl: str, norm: float) -> None:
    """With normalisation the result does not depend on the norm of q and k, beyond the epsilon."""
    args = call(Case(lengths=(70,), dtype="float32", K=64), impl)
    scaled = dict(args, q=args["q"] * norm, k=args["k"] * norm)
    a, b = kda.fwd(**scaled).o, kda.fwd(**args).o
    if a.dtype == torch.bfloat16:
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    else:
        torch.testing.assert_close(a, b, rtol=2e-4 if norm > 1 else 1e-3, atol=1e-4)


# ---- the interface


@pytest.mark.parametrize("impl", implementations())
def test_states_given_or_not_give_the_same_output(impl: str) -> None:
    args = call(Case(lengths=(70, 0, 5)), impl)
    zeros = torch.zeros_like(args["initial_state"])
    base = kda.fwd(**dict(args, initial_state=zeros))
    for initial in (zeros, None):
        for returned in (True, False):
            result = kda.fwd(**dict(args, initial_state=initial, output_final_state=returned))
            assert_equal(result.o, base.o)
            assert (result.final_state is not None) == returned
            if returned:
                assert_equal(state_of(result), state_of(base))


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("case", regimes())
def test_no_state_is_a_state_of_zeros(impl: str, case: Case) -> None:
    """To the bit: a prefill in pieces begins without one and goes on with one."""
    given = call(replace(case, lengths=(70, 0, 5), K=33, V=17), impl)
    states = given.pop("initial_state")
    absent, zeros = kda.fwd(**given), kda.fwd(**given, initial_state=torch.zeros_like(states))
    assert_equal(absent.o, zeros.o)
    assert_equal(state_of(absent), state_of(zeros).float())


@pytest.mark.parametrize("impl", implementations())
def test_buffers_are_written_and_returned(impl: str) -> None:
    args = call(Case(lengths=(70, 0, 5), H=2), impl)
    fresh = kda.fwd(**args)
    out = torch.full_like(args["v"], torch.nan)
    K = args["q"].shape[-1]
    wide = torch.full((*args["initial_state"].shape[:-1], K + 4), torch.nan, device=device(impl))
    final = wide[..., 2 : K + 2]  # a state with a row stride of its own
    result = kda.fwd(**dict(args, out=out, final_state=final))
    assert result.o is out
    assert result.final_state is final
    assert_equal(out, fresh.o)
    assert_equal(final, state_of(fresh))
    assert wide[..., :2].isnan().all()
    assert wide[..., K + 2 :].isnan().all()

    strided = torch.full_like(out.transpose(2, 3), torch.nan, memory_format=torch.contiguous_format).transpose(2, 3)
    assert_equal(kda.fwd(**dict(args, out=strided)).o, fresh.o)
    state = args["initial_state"].clone()
    inplace = kda.fwd(**dict(args, initial_state=state, final_state=state))
    assert inplace.final_state is state
    assert_equal(state, state_of(fresh))


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("strides", ["packed", "heads-first", "every-second"])
def test_strides_do_not_matter(impl: str, strides: str) -> None:
    case = Case(lengths=(70, 70), packed=False, H=2, group=2)
    a, b = kda.fwd(**call(case, impl)), kda.fwd(**call(replace(case, strides=strides), impl))
    assert_same(a.o, b.o, impl)
    assert_same(state_of(a), state_of(b), impl)


@pytest.mark.parametrize("impl", implementations())
def test_expanded_inputs(impl: str) -> None:
    """One key, query and gate for all heads, by stride 0."""
    args = call(Case(lengths=(70,), H=2), impl)
    expanded = {n: args[n][:, :, :1].expand_as(args[n]) for n in ("q", "k", "g")}
    copied = {n: x.contiguous() for n, x in expanded.items()}
    assert_same(kda.fwd(**dict(args, **expanded)).o, kda.fwd(**dict(args, **copied)).o, impl)


@pytest.mark.parametrize("impl", implementations())
def test_parameters_and_views_however_they_lie_in_memory(impl: str) -> None:
    """A_log and dt_bias strided or expanded, and a lazily negated view, are their values."""
    args = call(Case(lengths=(40,), H=4), impl)
    expected = kda.fwd(**args).o
    A, bias, v = args["A_log"], args["dt_bias"], args["v"]
    assert_equal(kda.fwd(**dict(args, A_log=torch.stack([A, -A], -1)[:, 0])).o, expected)
    assert_equal(kda.fwd(**dict(args, dt_bias=bias.T.contiguous().T)).o, expected)
    negated = torch.complex(v.float(), -v.float()).conj().imag
    assert negated.is_neg()
    if impl != "cuda":  # PyTorch has no complex numbers of bf16
        as_fp32 = {n: args[n].float() for n in ("q", "k", "v")}
        assert_equal(kda.fwd(**{**args, **as_fp32, "v": negated}).o, kda.fwd(**{**args, **as_fp32}).o)
    one = dict(args, A_log=A[:1].expand(4), dt_bias=bias[:1].expand(4, -1))
    copied = dict(args, A_log=A[:1].repeat(4), dt_bias=bias[:1].repeat(4, 1))
    assert_equal(kda.fwd(**one).o, kda.fwd(**copied).o)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_nan_parameters_are_not_hidden(impl: str, name: str) -> None:
    args = call(Case(lengths=(5,)), impl)
    assert kda.fwd(**dict(args, **{name: torch.full_like(args[name], torch.nan)})).o.isnan().all()


@pytest.mark.parametrize("impl", implementations())
def test_inputs_stay_and_results_are_fresh(impl: str) -> None:
    args = call(Case(lengths=(70, 5), H=2), impl)
    before = {n: x.clone() for n, x in args.items() if isinstance(x, Tensor)}
    first = kda.fwd(**args)
    kept = first.o.clone(), state_of(first).clone()
    second = kda.fwd(**dict(args, v=-args["v"]))
    for name, x in before.items():
        assert_equal(args[name], x)
    assert_equal(first.o, kept[0])
    assert_equal(state_of(first), kept[1])
    assert second.o.data_ptr() != first.o.data_ptr()


@pytest.mark.parametrize("impl", implementations())
def test_offsets_changed_in_place(impl: str) -> None:
    """cu_seqlens is read at every call: int32, int64, a slice of something else, changed between calls."""
    args = call(Case(lengths=(30, 40)), impl)
    store = torch.zeros(6, dtype=torch.int64, device=device(impl))
    sliced = store[::2]
    for bounds in ([0, 30, 70], [0, 70, 70], [0, 0, 12]):
        sliced.copy_(torch.tensor(bounds))
        a = kda.fwd(**dict(args, cu_seqlens=sliced))
        b = kda.fwd(**dict(args, cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device(impl))))
        assert_equal(a.o, b.o)
        assert_equal(state_of(a), state_of(b))


@pytest.mark.parametrize("impl", implementations(but="cuda"))
def test_dtypes_in_turn(impl: str) -> None:
    """No compile cache confuses two dtypes of one shape."""
    results = {}
    for dtype in ("bfloat16", "float16", "float32", "bfloat16"):
        o = kda.fwd(**call(Case(lengths=(70,), dtype=dtype), impl)).o
        if dtype in results:
            assert_equal(o, results[dtype])
        results[dtype] = o
    for dtype in ("bfloat16", "float16"):
        torch.testing.assert_close(results[dtype].float(), results["float32"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("impl", kernels(but="cuda"))
def test_launches_do_not_grow_with_sequences(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kda.triton import forward

    launches = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches.append(grid)
            return self.kernel[grid]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.kernel, name)

    monkeypatch.setattr(forward, "prepare_kernel", Counted(forward.prepare_kernel))
    monkeypatch.setattr(forward, "recur_kernel", Counted(forward.recur_kernel))
    kda.fwd(**call(Case(lengths=(1,) * 11), impl))  # of no other test, so that no plan launches past the kernels
    assert len(launches) == 2


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype set, and restored."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "default dtype fp64": lambda on: default_dtype(torch.float64),
    "default dtype fp16": lambda on: default_dtype(torch.float16),
    "default device": lambda on: torch.device("meta"),
    "autocast": lambda on: torch.autocast(on, dtype=torch.float16 if on == "cuda" else torch.bfloat16),
    "inference mode": lambda on: torch.inference_mode(),
    "no grad": lambda on: torch.no_grad(),
}


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_context_of_the_call(context: Callable[[str], AbstractContextManager[Any]], impl: str) -> None:
    """Inputs are taken as they come, whatever surrounds the call: twice, so that a repeated call is seen too."""
    args = call(Case(lengths=(20, 3), dtype="float32"), impl)
    expected = kda.fwd(**args)
    with context(device(impl)):
        for actual in (kda.fwd(**args), kda.fwd(**args)):
            for x, y in zip(actual, expected, strict=True):
                assert (x.dtype, x.device) == (y.dtype, y.device)
                assert torch.equal(x, y)
