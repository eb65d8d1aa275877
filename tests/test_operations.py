"""Judgement of gradients, conversions and malformed calls: right as they are, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cli import reproducer
from test_fuzz import replay, worker

import kda
import kda.ref.chunked
import kda.ref.recurrent
from kda import convert, dispatch, validate
from kda.problem import Output, Problem
from kda.testing import faults, gradient, operations, refusal
from kda.testing.cases import Case, PoolCase, StepCase
from kda.testing.convert import ConvertCase
from kda.testing.gradient import GradientCase
from kda.testing.judge import Finding
from kda.testing.refusal import RefusalCase


@pytest.fixture(autouse=True)
def _fresh() -> object:
    """Nothing is remembered about planted implementations."""
    dispatch.forget()
    yield
    dispatch.forget()


# ---- gradients

DIFFERENTIATED = GradientCase(Case(lengths=(5, 0, 66), K=3, V=2, gate="softplus", allow_neg_eigval=True), seed=3)


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is a function of what comes in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Any) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.fault(grads[0]), None


def plant_gradient(monkeypatch: pytest.MonkeyPatch, impl: str, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = {"chunked": kda.ref.chunked, "recurrent": kda.ref.recurrent}[impl]
    good = module.IMPL

    def fwd(problem: Problem) -> Output:
        result = good.fwd(problem)
        return Output(_Backward.apply(result.o, fault), result.final_state)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(module, "IMPL", replace(good, fwd=fwd))


def test_gradients_agree() -> None:
    assert GradientCase.parse(repr(DIFFERENTIATED)) == DIFFERENTIATED
    worst, wrong = gradient.judge(DIFFERENTIATED)
    assert wrong == ""
    assert 0 < worst < 1


@pytest.mark.parametrize("impl", ["chunked", "recurrent"])
def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    """By a few units of fp64, and where they are not finite."""
    with monkeypatch.context() as patch:
        plant_gradient(patch, impl, lambda x: x * (1 + 1e-9))
        with pytest.raises(Finding, match=r"gradient: the gradient of q .* off .*\nrepeat with: .* replay 'Gradient"):
            gradient.check(DIFFERENTIATED)
    plant_gradient(monkeypatch, impl, lambda x: torch.full_like(x, torch.inf))
    assert f"not finite, though the result is: {impl}'s gradient of q" in gradient.judge(DIFFERENTIATED)[1]


def test_a_wrong_gradient_is_fuzzed_and_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant_gradient(monkeypatch, "chunked", lambda x: x * 1.001)
    status, text = worker(tmp_path, "--operation", "gradient", "--seconds", "20", "--seed", "0")
    assert status == 1
    command = reproducer(text)
    case = GradientCase.parse(command[-1])
    assert sum(case.case.lengths) <= 2, "shrunk"
    assert replay(*command[1:]) == 1
    assert replay("--impl", "chunked", command[-1]) == 2
    monkeypatch.undo()
    assert replay(*command[1:]) == 0


# ---- convert

RAGGED = ConvertCase(mask=("110", "101", "000"), trailing=(2,), state=(2, 3, 4), cut=2)

CONVERT_FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "offsets of int64": ("cu_seqlens", lambda good, mask: good(mask).long(), "cu_seqlens is"),
    "lengths": ("cu_seqlens", lambda good, mask: good(mask).diff(prepend=good(mask)[:1]), "cu_seqlens has other"),
    "packed by columns": ("pack", lambda good, x, mask: good(x.transpose(0, 1), mask.T), "pack has other elements"),
    "tokens reversed": ("pack", lambda good, x, mask: good(x, mask).flip(1), "pack has other elements"),
    "no gradient": ("pack", lambda good, x, mask: good(x, mask).detach(), "raised RuntimeError"),
    "ones elsewhere": ("unpack", lambda good, x, mask: good(x, mask) + (~mask)[..., None], "unpack"),
    "one token more": (
        "padding_mask",
        lambda good, x, T: torch.arange(T) <= x.diff()[:, None],
        "padding_mask has other",
    ),
    "not contiguous": ("transpose_state", lambda good, x: x.mT, "transpose_state is"),
    "heads and values": ("transpose_state", lambda good, x: x.transpose(0, 1).contiguous(), "transpose_state"),
    "in place": ("pack", lambda good, x, mask: good(x, mask) + 0 * x.detach().mul_(2).sum(), "the input has changed"),
}


@pytest.mark.parametrize("name", CONVERT_FAULTS)
def test_wrong_conversions_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert operations.check(RAGGED, "") == 0
    function, fault, message = CONVERT_FAULTS[name]
    good = getattr(convert, function)
    monkeypatch.setattr(convert, function, lambda *args: fault(good, *args))
    with pytest.raises(Finding, match=message):
        operations.check(RAGGED, "")


# ---- malformed calls

TAME = Case(lengths=(2, 3), K=4, V=3, dtype="float32")


def spoiled(*done: tuple[str, str], call: Any = TAME, **options: bool) -> RefusalCase:
    return RefusalCase(call, done, buffers=True, **options)


@pytest.mark.parametrize("impl", ["recurrent", "chunked"])
@pytest.mark.parametrize("fault", ["number", "float64", "meta", "rank", "None", "requires grad", "on v"])
def test_refusals_of_every_argument(impl: str, fault: str) -> None:
    """As they are: nothing is wrong, with a plan and without. `on v`: of buffers alone."""
    pooled = PoolCase(TAME, slots=6, reads=(3, 1), kept=((4,), (-1,)), own=True)
    stepped = StepCase(replace(TAME, lengths=(2, 2), packed=False), slots=6, reads=(3, 1), tokens=((2, 4), (0, -1)))
    for call in (TAME, pooled, *([stepped] if impl == "recurrent" else [])):
        for argument in faults.TENSORS:
            if fault in faults.faults_of(argument):
                for warm in (False, True):
                    case = replace(spoiled((argument, fault), call=call), warm=warm, buffers=call is not pooled)
                    assert refusal.judge(case, impl) == "", case
                    assert RefusalCase.parse(repr(case)) == case


def wrap(monkeypatch: pytest.MonkeyPatch, after: Callable[[Exception, dict[str, Any]], None]) -> None:
    """Let validation do something before it refuses."""
    good = validate.forward

    def forward(*args: Any, **kwargs: Any) -> Problem:
        try:
            return good(*args, **kwargs)
        except (TypeError, ValueError) as error:
            after(error, {"out": args[6] if len(args) > 6 else kwargs["out"]})
            raise

    monkeypatch.setattr(validate, "forward", forward)


def test_a_buffer_written_before_the_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, lambda error, call: call["out"].fill_(1))
    assert "refused, but out changed" in refusal.judge(spoiled(("k", "rank")), "recurrent")


def test_a_refusal_that_names_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def vague(error: Exception, call: dict[str, Any]) -> None:
        raise ValueError("bad input")

    wrap(monkeypatch, vague)
    assert "the refusal names none of ['k']" in refusal.judge(spoiled(("k", "rank")), "recurrent")


def test_another_exception_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raw(error: Exception, call: dict[str, Any]) -> None:
        raise KeyError("planted")

    wrap(monkeypatch, raw)
    status, text = worker(tmp_path, "--operation", "refusal", "--impl", "recurrent", "--seconds", "20", "--seed", "1")
    assert status == 1
    assert "recurrent raised KeyError: 'planted'" in text
    command = reproducer(text)
    assert len(RefusalCase.parse(command[-1]).faults) == 1, "shrunk"
    assert replay(*command[1:]) == 1
    monkeypatch.undo()
    assert replay(*command[1:]) == 0


def test_what_is_accepted_must_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of NaN that passes, and one above 0; another dtype of g that changes the result; a good call refused."""
    from kda.validate import inputs

    nan, harmless = spoiled(("lower_bound", "nan")), spoiled(("g", "float64"), ("impl", "auto"))
    assert refusal.judge(nan, "chunked") == refusal.judge(harmless, "chunked") == ""
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "require_range", lambda *args: None)
        assert "accepted lower_bound with the fault 'nan'" in refusal.judge(nan, "chunked")
    with monkeypatch.context() as patch:
        good = kda.ref.chunked.IMPL
        patch.setattr(kda.ref.chunked, "IMPL", replace(good, fwd=lambda p: good.fwd(replace(p, g=0 * p.g))))
        assert "accepted, but o is not what the call means" in refusal.judge(harmless, "chunked")
    monkeypatch.setattr(refusal.api, "explain", lambda **call: dispatch.Explanation(None, {}, {}, ()))
    assert "explain chose None, but fwd ran" in refusal.judge(harmless, "chunked")
    assert "explain chose None, but fwd raised ValueError" in refusal.judge(nan, "chunked")


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "call", [PoolCase(TAME, slots=6), StepCase(replace(TAME, lengths=(2, 2), packed=False), slots=6)]
)
def test_collisions_are_refused_on_request(call: PoolCase | StepCase, checked: bool) -> None:
    """The refusal names what was given: found when slots collided that `state_indices` alone had named."""
    for given in (replace(call, reads=(3, 1)), replace(call, writes=(3, 1))):
        name = "state_indices" if given.writes is None else "write_indices"
        assert refusal.judge(RefusalCase(given, ((name, "twice"),), checked=checked), "recurrent") == ""


@pytest.mark.parametrize(
    "call", [PoolCase(TAME, slots=6), StepCase(replace(TAME, lengths=(2, 2), packed=False), slots=6)]
)
def test_the_refusal_of_a_collision_names_no_argument_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, call: PoolCase | StepCase
) -> None:
    monkeypatch.setenv("KDA_CHECK", "1")
    crossed = refusal.good_call(RefusalCase(call, ()), "recurrent") | {"write_indices": torch.tensor([1, -1])}
    with pytest.raises(ValueError, match=r"^write_indices: expected slots that no other sequence writes, got slot 1"):
        (kda.step if isinstance(call, StepCase) else kda.fwd)(**crossed)


WRONG = [
    "GradientCase(case=3)",
    "GradientCase(case=StepCase(case=Case(), slots=1))",
    "GradientCase()",
    "ConvertCase(mask=('12',))",
    "ConvertCase(mask=('1', '11'))",
    "ConvertCase(state=(1,))",
    "ConvertCase(dtype='int3')",
    "ConvertCase(layout='round')",
    "RefusalCase(call=Case(), faults=(('q', 'nope'),))",
    "RefusalCase(call=Case(), faults=(('q', 'meta'), ('q', 'rank')))",
    "RefusalCase(call=ConvertCase(), faults=())",
    "RefusalCase(call=Case(), faults=(('unknown', 'meta'),))",
    "StepCase(case=3, slots=1)",
    "NoCase()",
]


def test_indices_of_another_dtype_are_trusted_on_a_gpu() -> None:
    """-1 is 255 without a sign: refused where contents are looked at, not defined where they are not."""
    case = RefusalCase(
        StepCase(Case(lengths=(1,), packed=False), slots=3, reads=(-1,), index_dtype="int8"),
        (("state_indices", "uint8"),),
    )
    call, done = refusal._spoiled(case, refusal.good_call(case, "recurrent"))
    meant, result = refusal._meant(call), torch.zeros(1, 1, 1, 16)
    (wrong,) = refusal._right(case, done, call, meant, result)
    assert "accepted what the specification refuses in fp64: state_indices: expected slots below 3" in wrong
    on_gpu = call | {"q": SimpleNamespace(is_cpu=False)}
    assert refusal._right(case, done, on_gpu, meant, result) == []
    assert refusal._right(replace(case, checked=True), done, on_gpu, meant, result) == [wrong]
    operations.check(case, "recurrent")


RIGHT = [
    # The padding becomes tokens, whose NaN reaches the token before them in the same chunk.
    RefusalCase(Case(lengths=(1,), padding=2, K=1, V=1, initial_state=False), (("cu_seqlens", "None"),)),
    RefusalCase(Case(lengths=(1,), K=1, V=1), (("batch_invariant", "no flag"),)),
]


@pytest.mark.parametrize("case", RIGHT)
def test_cases_that_the_fuzz_took_for_findings(case: RefusalCase) -> None:
    for impl in ("chunked", "recurrent"):
        operations.check(case, impl)


def test_a_flag_that_was_left_out_can_be_spoiled() -> None:
    call, done = refusal._spoiled(RIGHT[1], refusal.good_call(RIGHT[1], "chunked"))
    assert done == [("batch_invariant", "no flag")]
    with pytest.raises(TypeError, match="batch_invariant"):
        kda.fwd(**call)


def test_nan_may_reach_back_but_not_vanish() -> None:
    nan, one = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0])
    assert refusal._close(torch.tensor([torch.nan, torch.nan]), nan)
    assert not refusal._close(one, nan)
    assert not refusal._close(nan, one)


@pytest.mark.parametrize("text", WRONG)
def test_no_case(text: str) -> None:
    with pytest.raises(ValueError, match="case: expected the text of a"):
        operations.parse(text)
    assert replay(text) == 2
