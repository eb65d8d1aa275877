"""The tolerance itself: the declared roundings, emulated, stay inside; eight times as much does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kda import api
from kda.numerics import CHUNK, Rounding, unit_roundoff
from kda.ref import chunked
from kda.ref.error import SIGMAS, Deviation, deviation, expect
from kda.testing.cases import Case, arguments, in_fp64

BF16 = Rounding(
    operand=unit_roundoff(torch.bfloat16),
    inverse=unit_roundoff(torch.float16),
    gate=2.0**-20,
    state=unit_roundoff(torch.float32),
    output=unit_roundoff(torch.bfloat16),
    stored_state=unit_roundoff(torch.float32),
    chunk=CHUNK,
)


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def to_fp16(x: Tensor) -> Tensor:
    return x.half().to(x.dtype)


def to_few_bits(x: Tensor) -> Tensor:
    """Rounding to 5 bits of significand: eight times bf16's unit."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 32).round() / 32, exponent)


def emulated(case: Case, operand: chunked.Operand, inverse: chunked.Operand) -> Deviation:
    """The chunked algorithm in fp32 with operands rounded as given, judged by BF16."""
    problem, _ = api.gather(**arguments(case))
    oracle, _ = api.gather(**in_fp64(arguments(case)))
    return deviation(chunked.fwd(problem, operand, inverse), expect(oracle, BF16))


BASE = Case(lengths=(200,), H=2, K=48, V=40)
REGIMES = {
    "usual": BASE,
    "slow": replace(BASE, decay="slow"),
    "strong": replace(BASE, decay="strong"),
    "mild keys": replace(BASE, keys="mild", beta="firm", decay="bias -5"),
    "close keys": replace(BASE, keys="close", beta="strong", decay="bias -8"),
    "one key": replace(BASE, keys="repeated", beta="full", decay="raw -12"),
    "two keys": replace(BASE, keys="alternating", beta="firm", decay="bias -8"),
    "one-hot keys": replace(BASE, keys="one-hot", decay="slow"),
    "softplus": replace(BASE, gate="softplus", decay="mixed"),
    "resets": replace(BASE, gate="given", decay="resets"),
    "negative eigenvalues": replace(BASE, allow_neg_eigval=True, beta="full", decay="bias -8"),
    "weak beta": replace(BASE, beta="weak", decay="bias -8"),
}


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in REGIMES.items()])
def test_declared_roundings_stay_inside(case: Case) -> None:
    worst = max(emulated(replace(case, seed=seed), to_bf16, to_fp16).sigma for seed in range(3))
    assert worst <= 0.5 * SIGMAS  # there is room for what an emulation leaves out


@pytest.mark.parametrize("name", ["usual", "slow", "strong", "mild keys", "softplus", "resets"])
def test_more_than_declared_does_not(name: str) -> None:
    assert emulated(REGIMES[name], to_few_bits, to_few_bits).sigma > SIGMAS


def test_identical_tokens_need_the_coherent_term() -> None:
    """The same key, value and gate over and over: errors grow in amplitude with the length; the bound grows along."""

    def constant(length: int) -> dict:
        call = arguments(Case(lengths=(length,), K=48, V=8, keys="repeated", decay="bias -8", beta="weak"))
        for name in ("q", "v", "g", "beta"):
            call[name] = call[name][:, :1].expand_as(call[name]).contiguous()
        return call

    for length in (64, 1024):
        call = constant(length)
        oracle = expect(api.gather(**in_fp64(call))[0], BF16)
        assert deviation(chunked.fwd(api.gather(**call)[0], to_bf16, to_fp16), oracle).sigma <= 0.5 * SIGMAS


def test_columns_are_judged_in_their_own_unit() -> None:
    """A small V column beside a large one is not hidden by it."""
    call = arguments(Case(lengths=(70,), V=2, dtype="float32"))
    call["v"] = call["v"] * torch.tensor([2.0**30, 1.0])
    call["initial_state"] = call["initial_state"] * torch.tensor([2.0**30, 1.0])[:, None]
    oracle = expect(api.gather(**in_fp64(call))[0], Rounding.uniform(torch.float32, torch.float32, torch.float32, 64))
    result = chunked.fwd(api.gather(**call)[0])
    assert deviation(result, oracle).accepted
    result.o[..., 1] *= 1.01
    assert not deviation(result, oracle).accepted


@pytest.mark.parametrize("broken", ["nan", "padding", "state"])
def test_what_is_not_finite_is_refused(broken: str) -> None:
    case = Case(lengths=(30,), padding=4, dtype="float32")
    oracle = expect(api.gather(**in_fp64(arguments(case)))[0], BF16)
    result = chunked.fwd(api.gather(**arguments(case))[0])
    assert deviation(result, oracle).accepted
    if broken == "nan":
        result.o[0, 3, 0, 0] = torch.nan
    elif broken == "padding":
        result.o[0, 31, 0, 0] = 1e-30
    else:
        result.final_state[0, 0, 0, 0] = torch.inf  # type: ignore[index]
    assert deviation(result, oracle).sigma == torch.inf


def test_overflow_of_the_result_is_no_error() -> None:
    """Where the exact output is beyond fp16, infinity is the right answer, and a finite number is not."""
    call = arguments(Case(lengths=(20,), dtype="float16", exponent=8))
    call["scale"] = 2000.0
    oracle = expect(api.gather(**in_fp64(call))[0], Rounding.uniform(torch.float32, torch.float16, torch.float32, 64))
    result = chunked.fwd(api.gather(**call)[0])
    assert result.o.isinf().any()
    assert deviation(result, oracle).accepted
    result.o[result.o.isinf()] = 65504.0
    assert not deviation(result, oracle).accepted
