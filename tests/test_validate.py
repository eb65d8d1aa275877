"""Bad input is refused before anything is written, in one sentence; legal input, however odd, is not refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kda
import kda.api
from kda import dispatch, validate
from kda.problem import GateKind

Call = dict[str, Any]
Change = Callable[[Call], Call]

# All different, so that no two axes can be mistaken for each other.
T, H, HV, K, V, N = 5, 2, 4, 6, 3, 7
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
BUFFERS = ("out", "final_state")
TENSORS = (*INPUTS, *BUFFERS, "cu_seqlens")
FLAGS = ("output_final_state", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "batch_invariant")


@pytest.fixture(autouse=True)
def _no_checking(monkeypatch):
    """Whatever the environment says, KDA_CHECK is off unless a test sets it."""
    monkeypatch.delenv("KDA_CHECK", raising=False)


def inputs(B: int = 1, T: int = T, H: int = H, HV: int = HV, K: int = K, V: int = V, dtype=torch.float32) -> Call:
    """The required arguments and the bounded gate."""
    noise = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)

    call = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V), "g": normal(B, T, HV, K)}
    return call | {"beta": normal(B, T, HV), "A_log": normal(HV), "dt_bias": normal(HV, K), "lower_bound": -5.0}


def flat(*sizes: int) -> Tensor:
    """Zeros of a shape."""
    return torch.zeros(sizes)


def full() -> Call:
    """A good packed call with every tensor argument; the buffers hold a sentinel."""
    state = torch.linspace(-1, 1, N * HV * V * K).reshape(N, HV, V, K)
    buffers = {"out": flat(1, T, HV, V) + 7.25, "final_state": flat(N, HV, V, K) - 3.5}
    cu_seqlens = torch.tensor([0, 2, 2, 3, 3, 3, 4, 5], dtype=torch.int32)
    return inputs() | {"initial_state": state, "cu_seqlens": cu_seqlens} | buffers


def batched(B: int = 2) -> Call:
    """A good call with B batch rows and no buffers."""
    return inputs(B)


def dense(call: Call) -> dict[str, Tensor]:
    """The tensors of a call whose contents can be compared."""
    return {n: x for n, x in call.items() if type(x) is Tensor and x.layout == torch.strided and not x.is_meta}


def refuse(call: Call, error: type[Exception], argument: str, *parts: str) -> None:
    """`fwd` and `explain` raise exactly `error` with a sentence about `argument`, and write nothing."""
    before = {name: x.detach().clone() for name, x in dense(call).items()}
    for function in (kda.fwd, kda.explain):
        with pytest.raises(error) as caught:
            function(**call)
        message = str(caught.value)
        assert caught.type is error, message
        assert re.match(rf"{argument}: expected .+, got .+", message), message
        for part in parts:
            assert part in message
    for name, x in dense(call).items():
        assert torch.equal(x, before[name]), f"{name} was written"


def accept(call: Call, like: Call) -> None:
    """`call` runs and gives bitwise what `like` gives."""
    actual, expected = kda.fwd(**call, output_final_state=True), kda.fwd(**like, output_final_state=True)
    for name, x in expected._asdict().items():
        assert getattr(actual, name).dtype == x.dtype
        assert torch.equal(getattr(actual, name), x), name


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [[1.0], np.ones(3), 1.0, "q"], ids=["list", "array", "float", "str"])
def test_not_a_tensor(name, value):
    refuse(full() | {name: value}, TypeError, name, "torch.Tensor", type(value).__name__)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_none_for_a_required_tensor(name):
    refuse(full() | {name: None}, TypeError, name, "torch.Tensor", "NoneType")


@pytest.mark.parametrize("name", TENSORS)
def test_sparse(name):
    call = full()
    refuse(call | {name: call[name].to_sparse()}, TypeError, name, "dense", "sparse_coo", ".to_dense()")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested():
    """Its layout says strided, yet it has no shape."""
    with pytest.raises(TypeError, match=r"^q: expected a dense tensor, got a nested tensor"):
        kda.fwd(**full() | {"q": torch.nested.nested_tensor([flat(T, H, K)])})


SHAPES: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "q rank 3": ("q", lambda c: {"q": c["q"][0]}, ("[B, T, H, K]", "[5, 2, 6]")),
    "q rank 0": ("q", lambda c: {"q": flat()}, ("[B, T, H, K]", "[]")),
    "k rank 3": ("k", lambda c: {"k": c["k"][0]}, ("[B, T, H, K] = [1, 5, 2, 6]", "[5, 2, 6]")),
    "k other T": ("k", lambda c: {"k": flat(1, 6, H, K)}, ("= [1, 5, 2, 6]", "[1, 6, 2, 6]")),
    "k other H": ("k", lambda c: {"k": flat(1, T, 1, K)}, ("= [1, 5, 2, 6]", "[1, 5, 1, 6]", "same heads")),
    "k other K": ("k", lambda c: {"k": flat(1, T, H, 7)}, ("= [1, 5, 2, 6]", "[1, 5, 2, 7]")),
    "k heads first": ("k", lambda c: {"k": c["k"].mT}, ("= [1, 5, 2, 6]", "[1, 5, 6, 2]")),
    "v rank 5": ("v", lambda c: {"v": c["v"][None]}, ("[B, T, HV, V]", "[1, 1, 5, 4, 3]")),
    "v other B": ("v", lambda c: {"v": flat(2, T, HV, V)}, ("= [1, 5, 4, 3]", "[2, 5, 4, 3]", "q's batch")),
    "v other T": ("v", lambda c: {"v": flat(1, 4, HV, V)}, ("= [1, 5, 4, 3]", "[1, 4, 4, 3]")),
    "HV not a multiple": ("v", lambda c: {"v": flat(1, T, 3, V)}, ("multiple", "H = 2", "HV = 3", "HV / H")),
    "HV below H": ("v", lambda c: {"v": flat(1, T, 1, V)}, ("multiple", "H = 2", "HV = 1")),
    "HV = 0": ("v", lambda c: {"v": flat(1, T, 0, V)}, ("multiple", "H = 2", "HV = 0")),
    "H = 0": ("v", lambda c: {"q": flat(1, T, 0, K), "k": flat(1, T, 0, K)}, ("multiple", "H = 0", "HV = 4")),
    "K = 0": ("q", lambda c: {"q": flat(1, T, H, 0), "k": flat(1, T, H, 0), "g": flat(1, T, HV, 0)}, ("K = 0",)),
    "V = 0": ("v", lambda c: {"v": flat(1, T, HV, 0)}, ("V = 0",)),
    "g rank 3": ("g", lambda c: {"g": c["g"][..., 0]}, ("[B, T, HV, K] = [1, 5, 4, 6]", "[1, 5, 4]")),
    "g of q's heads": ("g", lambda c: {"g": flat(1, T, H, K)}, ("= [1, 5, 4, 6]", "[1, 5, 2, 6]", "value head")),
    "g one channel": ("g", lambda c: {"g": flat(1, T, HV, 1)}, ("= [1, 5, 4, 6]", "[1, 5, 4, 1]")),
    "g of V channels": ("g", lambda c: {"g": flat(1, T, HV, V)}, ("= [1, 5, 4, 6]", "[1, 5, 4, 3]", "key channel")),
    "beta rank 4": ("beta", lambda c: {"beta": c["beta"][..., None]}, ("[B, T, HV] = [1, 5, 4]", "[1, 5, 4, 1]")),
    "beta of q's heads": ("beta", lambda c: {"beta": flat(1, T, H)}, ("= [1, 5, 4]", "[1, 5, 2]", "value head")),
    "beta transposed": ("beta", lambda c: {"beta": c["beta"].mT}, ("= [1, 5, 4]", "[1, 4, 5]")),
    "out transposed": ("out", lambda c: {"out": c["out"].mT}, ("[B, T, HV, V] = [1, 5, 4, 3]", "[1, 5, 3, 4]")),
    "out rank 3": ("out", lambda c: {"out": c["out"][0]}, ("= [1, 5, 4, 3]", "[5, 4, 3]")),
    "A_log of q's heads": ("A_log", lambda c: {"A_log": flat(H)}, ("HV", "[4]", "[2]", "value head")),
    "A_log scalar": ("A_log", lambda c: {"A_log": flat()}, ("[4]", "[]")),
    "A_log of HV * K": ("A_log", lambda c: {"A_log": flat(HV, K)}, ("[4]", "[4, 6]")),
    "A_log folded": ("A_log", lambda c: {"A_log": flat(2, 2)}, ("[4]", "[2, 2]")),
    "dt_bias of HV": ("dt_bias", lambda c: {"dt_bias": flat(HV)}, ("HV * K", "[4, 6]", "got shape [4]", "key channel")),
    "dt_bias of K": ("dt_bias", lambda c: {"dt_bias": flat(K)}, ("[4, 6]", "[6]")),
    "dt_bias transposed": ("dt_bias", lambda c: {"dt_bias": c["dt_bias"].mT}, ("[4, 6]", "[6, 4]")),
    "dt_bias folded": ("dt_bias", lambda c: {"dt_bias": flat(3, 8)}, ("[4, 6]", "[3, 8]")),
    **{
        f"{name} {what}": (name, lambda c, name=name, make=make: {name: make(c[name])}, ("[N, HV, V, K]", *parts))
        for name in ("initial_state", "final_state")
        for what, make, parts in (
            ("K before V", lambda x: x.mT, ("= [7, 4, 3, 6]", "[7, 4, 6, 3]", "V comes before K")),
            ("other N", lambda x: x[:6], ("= [7, 4, 3, 6]", "[6, 4, 3, 6]")),
            ("for B, not N", lambda x: x[:1], ("= [7, 4, 3, 6]", "[1, 4, 3, 6]")),
            ("of q's heads", lambda x: x[:, :H], ("= [7, 4, 3, 6]", "[7, 2, 3, 6]")),
            ("rank 3", lambda x: x[0], ("= [7, 4, 3, 6]", "[4, 3, 6]")),
        )
    },
    "cu_seqlens rank 2": ("cu_seqlens", lambda c: {"cu_seqlens": c["cu_seqlens"][None]}, ("[N + 1]", "[1, 8]")),
    "cu_seqlens rank 0": ("cu_seqlens", lambda c: {"cu_seqlens": c["cu_seqlens"][0]}, ("[N + 1]", "[]")),
    "cu_seqlens empty": ("cu_seqlens", lambda c: {"cu_seqlens": c["cu_seqlens"][:0]}, ("[N + 1]", "[0]", "0")),
}


@pytest.mark.parametrize(("argument", "change", "parts"), SHAPES.values(), ids=SHAPES)
def test_shape(argument, change, parts):
    call = full()
    refuse(call | change(call), ValueError, argument, *parts)


@pytest.mark.parametrize("B", [0, 2])
def test_packed_sequences_in_a_batch(B):
    refuse(inputs(B) | {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "(q|cu_seqlens)", "batch 1", str(B), "pack")


def test_wrong_number_of_states_in_a_batch():
    refuse(batched(2) | {"initial_state": flat(1, HV, V, K)}, ValueError, "initial_state", "[2, 4, 3, 6]")


NO_FLOAT = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", NO_FLOAT, ids=str)
@pytest.mark.parametrize("name", ["q", "g", "beta", "A_log", "dt_bias"])
def test_dtype_that_is_no_float(name, dtype):
    call = full()
    changed = ("q", "k", "v") if name == "q" else (name,)
    got = str(dtype).removeprefix("torch.")
    refuse(call | {n: call[n].to(dtype) for n in changed}, TypeError, name, "bfloat16", "float64", f"got {got}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_dtype_other_than_qs(name, dtype):
    call = full()
    refuse(call | {name: call[name].to(dtype)}, TypeError, name, "float32 (q's", str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("names", [("initial_state",), ("final_state",), ("initial_state", "final_state")], ids=str)
def test_state_dtype(names, dtype):
    call = full()
    parts = ("float32 or bfloat16", str(dtype).removeprefix("torch."))
    refuse(call | {n: call[n].to(dtype) for n in names}, TypeError, names[0], *parts)


@pytest.mark.parametrize("name", ["initial_state", "final_state"])
def test_state_dtypes_that_differ(name):
    call = full()
    refuse(call | {name: call[name].bfloat16()}, TypeError, "(initial|final)_state", "bfloat16", "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_cu_seqlens_dtype(dtype):
    got = str(dtype).removeprefix("torch.")
    refuse(full() | {"cu_seqlens": torch.zeros(N + 1).to(dtype)}, TypeError, "cu_seqlens", "int32 or int64", got)


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "q"])
def test_tensor_on_a_second_device(name):
    call = full()
    refuse(call | {name: call[name].to("meta")}, ValueError, name, "device cpu", "got meta", ".to(q.device)")


def test_q_alone_on_a_second_device():
    refuse(full() | {"q": flat(1, T, H, K).to("meta")}, ValueError, "k", "device meta", "got cpu")


NO_NUMBER = [True, "1", 1j, torch.tensor(-1.0), np.array(-1.0), [-1.0]]
NOT_FINITE = [float("inf"), float("-inf"), float("nan"), np.float32("nan"), -(10**400)]


@pytest.mark.parametrize("value", NO_NUMBER, ids=repr)
@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_no_number(name, value):
    refuse(full() | {name: value}, TypeError, name, "number", f"got {type(value).__name__}")


def test_hint_for_a_tensor_in_place_of_a_number():
    refuse(full() | {"scale": torch.tensor(1.0)}, TypeError, "scale", ".item()")


@pytest.mark.parametrize("value", NOT_FINITE, ids=["inf", "-inf", "nan", "float32 nan", "-1e400 as an int"])
@pytest.mark.parametrize("name", ["scale", "lower_bound"])
def test_number_not_finite(name, value):
    refuse(full() | {name: value}, ValueError, name, "finite")


@pytest.mark.parametrize("value", [1e-30, 0.5, 5, np.float32(5)], ids=str)
def test_positive_lower_bound(value):
    refuse(full() | {"lower_bound": value}, ValueError, "lower_bound", "<= 0", str(float(value)), "such as -5")


def test_bias_without_a_gate():
    refuse(full() | {"A_log": None, "lower_bound": None}, ValueError, "dt_bias", "A_log or lower_bound", "neither")


OFFSETS = {
    "not from 0": ([1, 2, 5], ("start with 0", "got 1")),
    "negative": ([-1, 2, 5], ("start with 0", "got -1")),
    "decreasing": ([0, 3, 2, 5], ("not to decrease", "3 then 2", "index 2", "not lengths")),
    "past T": ([0, 3, 6], ("T = 5", "got 6")),
    "a length instead of offsets": ([5], ("start with 0", "got 5")),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("offsets", "parts"), OFFSETS.values(), ids=OFFSETS)
def test_offsets(offsets, parts, dtype):
    call = {**inputs(), "out": full()["out"], "cu_seqlens": torch.tensor(offsets, dtype=dtype)}
    refuse(call, ValueError, "cu_seqlens", *parts)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_flag_that_is_not_bool(name, value):
    refuse(full() | {name: value}, TypeError, name, "True or False", repr(value))


def test_negative_eigenvalues_of_given_weights():
    call = full() | {"allow_neg_eigval": True, "use_beta_sigmoid": False}
    refuse(call, ValueError, "allow_neg_eigval", "use_beta_sigmoid=True", "False", "double it")


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("name", INPUTS)
def test_buffer_with_an_input_that_requires_grad(name, buffer):
    call = full()
    call.pop(next(other for other in BUFFERS if other != buffer))
    call[name] = nn.Parameter(call[name])
    refuse(call, ValueError, buffer, f"{name} requires grad", "torch.no_grad()")
    with torch.no_grad():
        assert kda.fwd(**call) is not None
        assert not torch.equal(call[buffer], full()[buffer])


@pytest.mark.parametrize("name", INPUTS)
def test_input_that_requires_grad_without_buffers(name):
    call = {n: x for n, x in full().items() if n not in BUFFERS}
    call[name] = nn.Parameter(call[name])
    kda.fwd(**call, output_final_state=True).final_state.sum().add(kda.fwd(**call).o.sum()).backward()
    assert call[name].grad.abs().sum() > 0


def shared(call: Call, buffer: str, other: str, shift: int) -> Call:
    """`call` with `buffer` in the memory of `other`, starting `shift` elements after (or before) it."""
    a, b = call[other], call[buffer]
    memory = flat(a.numel() + b.numel() + abs(shift))
    at = {other: max(-shift, 0), buffer: max(shift, 0)}
    call[other] = memory[at[other] :][: a.numel()].view(a.shape).copy_(a)
    call[buffer] = memory[at[buffer] :][: b.numel()].view(b.shape)
    return call


ALIASES = [(buffer, other) for buffer in BUFFERS for other in INPUTS] + [("final_state", "out")]
ALIASES.remove(("final_state", "initial_state"))


@pytest.mark.parametrize("buffer, other", ALIASES)
def test_buffer_in_the_memory_of_another_argument(buffer, other):
    refuse(shared(full(), buffer, other, 0), ValueError, buffer, "memory", other)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(
    "buffer, other", [("out", "v"), ("final_state", "g"), ("final_state", "initial_state"), ("final_state", "out")]
)
def test_buffer_that_overlaps_another_argument(buffer, other, shift):
    """A call modifies no input, wherever in it the buffer starts."""
    refuse(shared(full(), buffer, other, shift), ValueError, buffer, "memory", other)


def test_final_state_as_the_transpose_of_initial_state():
    """The same memory in another order: a kernel that writes one head's state would overwrite what is still read."""
    state = flat(1, HV, K, K)
    call = inputs(V=K) | {"initial_state": state, "final_state": state.mT}
    refuse(call, ValueError, "final_state", "memory", "initial_state")


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_expanded_buffer(name, axis):
    call = full()
    refuse(call | {name: call[name].narrow(axis, 0, 1).expand_as(call[name])}, ValueError, name, "expanded", "clone()")


@pytest.mark.parametrize("name", BUFFERS)
def test_buffer_that_overlaps_itself(name):
    """Rows that share elements without any stride of 0."""
    call = full()
    strides = [min(stride, 2) for stride in call[name].stride()]
    memory = flat(call[name].numel())
    refuse(call | {name: memory.as_strided(call[name].shape, strides)}, ValueError, name)


def test_unknown_implementation():
    for function in (kda.fwd, kda.explain):
        with pytest.raises(ValueError, match=r"^impl: expected .+, got 'flash'") as caught:
            function(**full(), impl="flash")
        assert all(repr(name) in str(caught.value) for name in ("auto", *dispatch.TABLE))


@pytest.mark.parametrize("value", [None, 1, b"auto", ["auto"], kda.fwd], ids=lambda value: type(value).__name__)
def test_implementation_of_a_wrong_type(value):
    refuse(full() | {"impl": value}, TypeError, "impl", type(value).__name__, *map(repr, ("auto", *dispatch.TABLE)))


@pytest.mark.parametrize("function", [kda.fwd, kda.explain])
def test_calls_that_do_not_bind(function):
    call, required = full(), list(inputs().values())[:5]
    with pytest.raises(TypeError, match="allow_negative"):
        function(**call, allow_negative=True)
    with pytest.raises(TypeError, match="beta"):
        function(*required[:4])
    with pytest.raises(TypeError, match="q"):
        function()
    with pytest.raises(TypeError, match="positional"):
        function(*required, *[None] * 8, True)
    with pytest.raises(TypeError, match="multiple values"):
        function(*required, q=required[0])
    assert torch.equal(call["out"], full()["out"])


def given_gate(positive: bool) -> Call:
    """A packed call of 3 tokens and 2 rows of padding that gives the log decay itself."""
    call = full() | {"A_log": None, "dt_bias": None, "lower_bound": None, "initial_state": None, "final_state": None}
    call["cu_seqlens"] = torch.tensor([0, 1, 3])
    call["g"] = -call["g"].abs()
    if positive:
        call["g"][0, 1, 2, 3] = 0.5
    return call


def test_checking_refuses_a_positive_log_decay(monkeypatch):
    monkeypatch.setenv("KDA_CHECK", "1")
    refuse(given_gate(positive=True), ValueError, "g", "<= 0", "got 0.5", "A_log")
    kda.fwd(**given_gate(positive=False))
    kda.fwd(**full())  # a raw gate may be positive


@pytest.mark.parametrize("value", ["0", "", None])
def test_not_checking(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("KDA_CHECK", value)
    kda.fwd(**given_gate(positive=True))


@pytest.mark.parametrize("junk", [torch.inf, torch.nan, 1.0], ids=str)
def test_checking_does_not_read_padding(monkeypatch, junk):
    monkeypatch.setenv("KDA_CHECK", "1")
    call = given_gate(positive=False)
    call["g"][:, 3:] = junk
    assert kda.fwd(**call).o[:, 3:].count_nonzero() == 0


class OnGPU(SimpleNamespace):
    """Stands for q on a GPU where validation looks at contents only."""

    is_cuda, is_cpu, device, shape = True, False, torch.device("cuda"), (1, T, H, K)


class Unread:
    """Stands for a tensor on a GPU that must not be read on the host."""

    def tolist(self) -> list[int]:
        raise AssertionError("a host synchronisation")


def test_contents_on_a_gpu_are_read_under_checking_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    validate.contents(OnGPU(), None, GateKind.BOUNDED, Unread())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("KDA_CHECK", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens: .*got 6"):
        validate.contents(OnGPU(), None, GateKind.BOUNDED, torch.tensor([0, 6]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match=r"KDA_CHECK: expected no .*capture.*, got one"):
        validate.contents(OnGPU(), None, GateKind.BOUNDED, Unread())


# Legal, however odd.


@pytest.mark.parametrize(
    "sizes", [{"T": 0}, {"B": 0}, {"H": 0, "HV": 0}, {"B": 0, "T": 0, "H": 0, "HV": 0}, {"T": 0, "HV": 8}], ids=str
)
def test_nothing_to_do(sizes):
    s = {"B": 1, "T": T, "HV": HV} | sizes
    call = inputs(**sizes)
    state = torch.full((s["B"], s["HV"], V, K), 0.1)
    out, final = torch.empty_like(call["v"]), torch.empty_like(state)
    result = kda.fwd(**call, initial_state=state, out=out, final_state=final)
    assert result.o is out
    assert result.final_state is final
    assert torch.equal(final, state) or s["T"] > 0


@pytest.mark.parametrize("tokens", [0, T])
def test_no_sequence(tokens):
    result = kda.fwd(**inputs(T=tokens), cu_seqlens=torch.tensor([0]), output_final_state=True)
    assert result.o.shape == (1, tokens, HV, V)
    assert result.o.count_nonzero() == 0
    assert result.final_state.shape == (0, HV, V, K)


VARIANTS: dict[str, Change] = {
    "A_log [1, 1, HV, 1]": lambda c: {"A_log": c["A_log"].view(1, 1, HV, 1)},
    "A_log [HV, 1]": lambda c: {"A_log": c["A_log"].view(HV, 1)},
    "A_log strided": lambda c: {"A_log": torch.stack([c["A_log"]] * 2, -1)[:, 0]},
    "A_log in fp64": lambda c: {"A_log": c["A_log"].double()},
    "dt_bias [HV * K]": lambda c: {"dt_bias": c["dt_bias"].flatten()},
    "dt_bias [1, 1, HV, K]": lambda c: {"dt_bias": c["dt_bias"].view(1, 1, HV, K)},
    "dt_bias transposed in memory": lambda c: {"dt_bias": c["dt_bias"].T.contiguous().T},
    "g, beta in fp64": lambda c: {"g": c["g"].double(), "beta": c["beta"].double()},
    "int64 offsets": lambda c: {"cu_seqlens": c["cu_seqlens"].long()},
    "sliced offsets": lambda c: {"cu_seqlens": torch.stack([c["cu_seqlens"], -c["cu_seqlens"]], -1)[:, 0]},
    "the bound as an int": lambda c: {"lower_bound": -5},
    "the bound as numpy's float32": lambda c: {"lower_bound": np.float32(-5)},
    "the bound as numpy's int64": lambda c: {"lower_bound": np.int64(-5)},
    "the bound as a fraction": lambda c: {"lower_bound": Fraction(-5)},
    "scale spelled out": lambda c: {"scale": K**-0.5},
    "scale as numpy's float64": lambda c: {"scale": np.float64(K**-0.5)},
    "a tensor subclass": lambda c: {"q": c["q"].as_subclass(type("Mine", (Tensor,), {}))},
    "a negated view": lambda c: {"v": torch.complex(c["v"], -c["v"]).conj().imag},
    "a buffer with a stride of 0 along B": lambda c: {
        "out": flat(T * HV * V).as_strided((1, T, HV, V), (0, HV * V, V, 1))
    },
    "buffers transposed in memory": lambda c: {n: c[n].mT.contiguous().mT for n in BUFFERS},
    "q expanded along B": lambda c: {"q": c["q"][:1].expand(1, -1, -1, -1)},
}


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_same_call_in_another_form(change):
    call = full()
    accept(call | change(call), full())


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_expanded_input(name):
    call = full()
    x = call[name]
    expanded = x.narrow(-1, 0, 1).expand_as(x)
    if x.dim() > 2:
        expanded = expanded[:, :1].expand_as(x)
    assert 0 in expanded.stride()
    accept(call | {name: expanded}, full() | {name: expanded.contiguous()})


def test_scalar_A_log_for_one_head():
    call = inputs(H=1, HV=1)
    accept(call | {"A_log": call["A_log"][0], "dt_bias": call["dt_bias"][0]}, call)


def test_padding_after_the_last_sequence():
    call = inputs()
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 3:] = torch.nan
    short = {name: x[:, :3] if name in ("q", "k", "v", "g", "beta") else x for name, x in call.items()}
    result = kda.fwd(**call, cu_seqlens=torch.tensor([0, 3]), output_final_state=True)
    expected = kda.fwd(**short, output_final_state=True)
    assert torch.equal(result.o[:, :3], expected.o)
    assert result.o[:, 3:].count_nonzero() == 0
    assert torch.equal(result.final_state, expected.final_state)


def test_state_updated_in_place():
    call, separate = full(), kda.fwd(**full())
    call["final_state"] = call["initial_state"]
    result = kda.fwd(**call)
    assert result.final_state is call["initial_state"]
    assert torch.equal(result.final_state, separate.final_state)
    assert torch.equal(result.o, separate.o)


def test_empty_inputs_in_the_memory_of_a_buffer():
    """No element is shared where there is none."""
    call = inputs(T=0)
    final = flat(1, HV, V, K) + 7
    call["g"] = final.flatten()[:0].view(1, 0, HV, K)
    assert kda.fwd(**call, final_state=final).final_state.count_nonzero() == 0


def test_buffers_side_by_side_in_one_memory():
    """Views that interleave without sharing an element are not an alias."""
    memory = flat(1, T, HV, 2 * V)
    memory[..., :V] = inputs()["v"]
    call = inputs() | {"v": memory[..., :V], "out": memory[..., V:]}
    assert torch.equal(kda.fwd(**call).o, kda.fwd(**inputs()).o)
    assert torch.equal(memory[..., :V], inputs()["v"])


GATES: dict[str, tuple[tuple[str, ...], GateKind]] = {
    "bounded, all": (("lower_bound", "A_log", "dt_bias"), GateKind.BOUNDED),
    "bounded, no A_log": (("lower_bound", "dt_bias"), GateKind.BOUNDED),
    "bounded, no bias": (("lower_bound", "A_log"), GateKind.BOUNDED),
    "bounded alone": (("lower_bound",), GateKind.BOUNDED),
    "softplus, bias": (("A_log", "dt_bias"), GateKind.SOFTPLUS),
    "softplus": (("A_log",), GateKind.SOFTPLUS),
    "given": ((), GateKind.GIVEN),
}


@pytest.mark.parametrize(("arguments", "kind"), GATES.values(), ids=GATES)
def test_gate_kinds(arguments, kind):
    """Told by which arguments are given; every combination but a bias alone is legal."""
    call = inputs()
    call |= {name: None for name in ("lower_bound", "A_log", "dt_bias") if name not in arguments}
    facts = kda.api.gather(**call)[0].facts
    assert facts.gate is kind
    assert facts.lower_bound == call["lower_bound"]
    assert (facts.A_log_dtype is None) == (call["A_log"] is None)
    assert (facts.dt_bias_dtype is None) == (call["dt_bias"] is None)


@pytest.mark.parametrize("sigmoid, negative", [(True, True), (True, False), (False, False)])
def test_beta_flags(sigmoid, negative):
    facts = kda.api.gather(**inputs(), use_beta_sigmoid=sigmoid, allow_neg_eigval=negative)[0].facts
    assert (facts.use_beta_sigmoid, facts.allow_neg_eigval) == (sigmoid, negative)


def test_facts_of_a_call():
    call = full() | {"g": full()["g"].double(), "dt_bias": full()["dt_bias"].bfloat16().flatten()}
    call["q"] = torch.stack([call["q"]] * 2, -1)[..., 0]
    call["v"] = call["v"].transpose(1, 2).contiguous().transpose(1, 2)  # its last dimension is contiguous
    problem, impl = kda.api.gather(**call, batch_invariant=True, use_qk_l2norm=False, impl="recurrent")
    assert impl == "recurrent"
    assert problem.A_log.shape == (HV,)
    assert problem.dt_bias.shape == (HV, K)
    expected = {"device": "cpu", "capability": None, "B": 1, "T": T, "H": H, "HV": HV, "K": K, "V": V, "N": N}
    expected |= {"varlen": True, "initial_state": True, "final_state": True, "state_dtype": torch.float32}
    expected |= {"dtype": torch.float32, "g_dtype": torch.float64, "beta_dtype": torch.float32}
    expected |= {"A_log_dtype": torch.float32, "dt_bias_dtype": torch.bfloat16, "gate": GateKind.BOUNDED}
    expected |= {"lower_bound": -5.0, "use_qk_l2norm": False, "batch_invariant": True}
    assert {name: getattr(problem.facts, name) for name in expected} == expected
    one = kda.api.gather(**inputs(2, K=1, V=1))[0].facts
    assert (one.B, one.N, one.varlen, one.initial_state, one.final_state) == (2, 2, False, False, False)


def test_unaligned_names_what_vectors_cannot_address():
    """Rows of 16-byte vectors: contiguous, on a multiple of 16 bytes, none twice."""
    call = inputs(B=2, K=8, V=8) | {"initial_state": flat(2, HV, 8, 8)}

    def unaligned(**changes):
        return kda.api.gather(**(call | changes))[0].facts.unaligned

    def padded(x, extra, start=0):
        return flat(*x.shape[:-1], x.shape[-1] + extra)[..., start : start + x.shape[-1]]

    assert unaligned() == ()
    assert unaligned(q=padded(call["q"], 4)) == ()
    assert unaligned(q=padded(call["q"], 3), v=padded(call["v"], 4, start=1)) == ("q", "v")
    assert unaligned(k=torch.stack([call["k"]] * 2, -1)[..., 0]) == ("k",)
    assert unaligned(g=call["g"][:, :, :1].expand(call["g"].shape)) == ("g",)
    assert unaligned(out=padded(call["v"], 3), final_state=padded(call["initial_state"], 5)) == ("out", "final_state")
    assert unaligned(q=call["q"].transpose(1, 2).contiguous().transpose(1, 2)) == ()


def test_double_precision():
    call = inputs(dtype=torch.float64)
    result = kda.fwd(**call, output_final_state=True)
    assert (result.o.dtype, result.final_state.dtype) == (torch.float64, torch.float64)
    state = torch.ones(1, HV, V, K, dtype=torch.float64)
    assert kda.fwd(**call, initial_state=state, final_state=torch.empty_like(state)).final_state.dtype == torch.float64
    torch.testing.assert_close(result.o.float(), kda.fwd(**inputs()).o)


STATE_DTYPES = [
    ({}, torch.float32),
    ({"initial_state": torch.bfloat16}, torch.bfloat16),
    ({"final_state": torch.bfloat16}, torch.bfloat16),
    ({"initial_state": torch.float32}, torch.float32),
]


@pytest.mark.parametrize(("states", "expected"), STATE_DTYPES, ids=str)
def test_dtype_of_the_final_state(states, expected):
    call = inputs(dtype=torch.bfloat16) | {name: flat(1, HV, V, K).to(dtype) for name, dtype in states.items()}
    assert kda.fwd(**call, output_final_state=True).final_state.dtype == expected
    assert (kda.fwd(**call).final_state is None) == ("final_state" not in states)


def test_meta_tensors_are_well_formed():
    """No memory, so no two of them share any; that nothing runs there is the dispatcher's to say."""
    call = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in full().items()}
    with pytest.raises(kda.Unsupported, match="meta"):
        kda.fwd(**call)
