"""The Hopper kernel where it differs from the others: chunks of 32 tokens, tensor maps, a library of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from targets import HOPPER, parameter
from torch import Tensor

import kda
import kda.cuda.fwd
import kda.cuda.launch
import kda.devices
from kda import api, dispatch, plan, validate
from kda.cuda import library
from kda.cuda.params import FwdParams, StepParams
from kda.problem import aligned
from kda.testing.cases import Case, arguments, within_hopper
from kda.testing.judge import check, judge_call

gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
on_gpu = pytest.mark.parametrize("impl", [parameter("cuda")])

MODEL = within_hopper(Case(lengths=(130, 0, 65, 17), H=2))


@pytest.mark.long
@gpu
@on_gpu
@pytest.mark.parametrize("lengths", [range(1, 50), range(50, 90), range(90, 131)], ids=str)
def test_every_length(impl: str, lengths: range) -> None:
    """Every residue of a tail, in one packed batch and so at every alignment."""
    check(within_hopper(Case(lengths=tuple(lengths), decay="slow")), impl)
    check(within_hopper(Case(lengths=tuple(lengths)[::3], decay="strong", keys="close", beta="strong")), impl)


@gpu
@on_gpu
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 95])
def test_tails_of_batch_rows(impl: str, length: int) -> None:
    """A tile that ends beyond its row must not read or write the next one."""
    check(within_hopper(Case(lengths=(length,) * 3, packed=False, H=2)), impl)


@gpu
@on_gpu
def test_scales_that_only_the_intermediate_sees(impl: str) -> None:
    """v and states of 1e6, raw q and k of norm 1e4, at both ends of the anchor's exponent."""
    for decay in ("strong", "none", "slow"):
        for exponent in (20, 40, -40):
            check(within_hopper(Case(lengths=(100,), decay=decay, exponent=exponent, norm=1e4)), impl)


@gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parameters_of_another_dtype(impl: str, dtype: torch.dtype) -> None:
    """A_log, dt_bias of any float and beta in fp32 are their values."""
    call = arguments(MODEL, "cuda")
    rounded = dict(call, A_log=call["A_log"].to(dtype), dt_bias=call["dt_bias"].to(dtype))
    exact = dict(call, A_log=rounded["A_log"].float(), dt_bias=rounded["dt_bias"].float(), beta=call["beta"].float())
    a, b = kda.fwd(**rounded, impl=impl), kda.fwd(**exact, impl=impl)
    assert torch.equal(a.o, b.o)
    assert torch.equal(a.final_state, b.final_state)  # type: ignore[arg-type]


@gpu
@on_gpu
@pytest.mark.parametrize(("weight", "tokens"), [(3.0, 20), (2.0, 64), (1e-7, 64)])
def test_weights_that_no_sigmoid_gives(impl: str, weight: float, tokens: int) -> None:
    """Given weights are of any size, also beyond the format that holds a sigmoid's; 3 doubles the state a token."""
    case = Case(lengths=(tokens,), keys="close", decay="slow", use_beta_sigmoid=False, initial_state=False)
    call = arguments(within_hopper(case), "cuda")
    call["beta"] = torch.full_like(call["beta"], weight)
    d = judge_call(call, impl)
    assert d.accepted, d
    assert max(d.rms_o, d.rms_state) < 2e-2, d


@gpu
@on_gpu
@pytest.mark.parametrize("bound", [-5.04, -5.0, -1e-3, 0.0])
def test_channels_that_never_decay(impl: str, bound: float) -> None:
    """Beside others that do, at the edge of the exponents' budget too, where a factor of Kr is largest."""
    call = arguments(MODEL, "cuda") | {"lower_bound": bound}
    call["g"] = torch.where(torch.arange(128, device="cuda") % 3 == 0, -torch.inf, call["g"])
    d = judge_call(call, impl)
    assert d.accepted, d


@gpu
@on_gpu
@pytest.mark.parametrize("initial_state", [True, False])
@pytest.mark.parametrize(
    ("lengths", "H", "group"),
    [
        ((33, 0, 64, 1, 100, 7, 0, 32), 8, 8),  # heads go to who has the least
        ((40, 40, 40), 8, 8),  # of one length
        (tuple(7 * n % 67 for n in range(70)), 1, 2),  # longest first, forth and back
        (tuple(7 * n % 67 for n in range(300)), 1, 1),  # as they come
        (tuple(7 * n % 67 for n in range(1100)), 1, 1),  # offsets from memory
    ],
)
def test_more_tasks_than_multiprocessors(
    impl: str, lengths: tuple[int, ...], H: int, group: int, initial_state: bool
) -> None:
    """A CTA takes several (sequence, head) tasks, however dealt, its pipeline running through; as one by one."""
    case = within_hopper(Case(lengths=lengths, H=H, group=group, initial_state=initial_state))
    call = arguments(case, "cuda")
    whole = kda.fwd(**call, impl=impl)
    bounds = call["cu_seqlens"].tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        state = call["initial_state"][n : n + 1] if initial_state else None
        one: dict[str, Any] = dict(call, cu_seqlens=None, initial_state=state)
        one |= {name: call[name][:, start:stop] for name in ("q", "k", "v", "g", "beta")}
        alone = kda.fwd(**one, impl=impl)
        assert torch.equal(alone.o, whole.o[:, start:stop])
        assert torch.equal(alone.final_state[0], whole.final_state[n])  # type: ignore[index]


@gpu
@on_gpu
def test_a_spawned_process(impl: str) -> None:
    program = f"from kda.testing.judge import check; from kda.testing.cases import Case; check({MODEL!r}, {impl!r})"
    code = f"""
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=exec, args=({program!r},))
    child.start()
    child.join(120)
    raise SystemExit(child.exitcode)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- the host side, without a GPU


class Recorder:
    """Stands in for the library: keeps the parameters it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.refuses = False
        self.workspace = 0

    def kda_fwd_plan(self, given: Any, multiprocessors: int) -> int:
        return self.workspace

    def kda_fwd_sm90(self, given: bytes, stream: int, careful: bool) -> int:
        if careful and self.refuses:
            return library.REFUSED
        p = FwdParams.from_buffer_copy(given)
        self.raw.append(given)
        self.calls.append(
            {name: getattr(p, name) for name, *_ in FwdParams._fields_} | {"stream": stream, "careful": careful}
        )
        return 0

    def kda_step_sm90(self, given: bytes, stream: int, careful: bool) -> int:
        if careful and self.refuses:
            return library.REFUSED
        self.raw.append(given)
        return 0


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """`kda.cuda.fwd` with the library and the device replaced, so that what it passes on can be looked at."""
    import contextlib

    recorder = Recorder()
    monkeypatch.setattr(library, "load", lambda: recorder)
    monkeypatch.setattr(kda.cuda.fwd, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(kda.cuda.launch, "current_stream", lambda device: 77)
    return recorder


def passed(record: Recorder, call: dict[str, Any]) -> dict[str, Any]:
    from kda.cuda.fwd import fwd

    fwd(api.gather(**call)[0])
    return record.calls[-1]


def test_what_the_library_is_told(record: Recorder) -> None:
    call = arguments(within_hopper(Case(lengths=(5, 9), H=2, group=2, state_dtype="bfloat16", index_dtype="int64")))
    out = torch.empty_like(call["v"])
    p = passed(record, dict(call, out=out, scale=0.25, allow_neg_eigval=True))
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"):
        assert p[name] == call[name].data_ptr(), name
    assert p["out"] == out.data_ptr()
    for name in ("q", "k", "v", "g", "beta"):
        assert tuple(p[f"{name}_stride"]) == call[name].stride()[:3]
    assert (p["B"], p["T"], p["H"], p["HV"], p["N"]) == (1, 14, 2, 4, 2)
    assert (p["scale"], p["lower_bound"], p["stream"]) == (0.25, -5.0, 77)
    assert (p["state_dtype"], p["beta_dtype"], p["A_log_dtype"], p["cu_64"], p["cu_stride"]) == (1, 1, 3, 1, 1)
    assert (p["use_qk_l2norm"], p["use_beta_sigmoid"], p["allow_neg_eigval"]) == (1, 1, 1)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("current", [0, 1])
def test_the_device_of_the_tensors_is_the_current_one_at_the_launch(
    record: Recorder, monkeypatch: pytest.MonkeyPatch, current: int, raw: bool
) -> None:
    """With q on device 1: entered where another is current, its stream asked for, and left again."""
    from kda.cuda import fwd

    events: list[object] = []
    devices = [current]

    class Entered:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            events.append(("enter", self.device.index))
            devices.append(self.device.index)  # type: ignore[arg-type]

        def __exit__(self, *_: object) -> None:
            events.append("leave")
            devices.pop()

    class Stream:
        cuda_stream = 5

        def __init__(self, device: torch.device) -> None:
            events.append(("stream", device.index))

    # As with a torch that has no raw calls, and as with one that has.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(
        kda.devices, "_raw_stream", (lambda index: Stream(torch.device("cuda", index)).cuda_stream) if raw else None
    )
    monkeypatch.setattr(kda.devices, "_raw_device", (lambda: devices[-1]) if raw else None)
    monkeypatch.setattr(kda.cuda.launch, "current_stream", kda.devices.current_stream)
    problem = api.gather(**arguments(within_hopper(Case(lengths=(5,)))))[0]
    on_other = type(
        "OnOther", (), {"device": torch.device("cuda", 1), "__getattr__": lambda _, name: getattr(problem.q, name)}
    )()
    made = torch.empty_like(problem.v)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made)
    fwd.fwd(replace(problem, q=on_other))
    assert events == ([("stream", 1)] if current == 1 else [("enter", 1), ("stream", 1), "leave"])


def test_what_is_absent_is_null(record: Recorder) -> None:
    call = arguments(within_hopper(Case(lengths=(5,), packed=False, initial_state=False, A_log=False, dt_bias=False)))
    p = passed(record, dict(call, output_final_state=False))
    for name in ("A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens"):
        assert p[name] is None, name


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "initial_state"])
def test_inputs_that_no_vector_addresses_are_copied(record: Recorder, name: str) -> None:
    call = arguments(within_hopper(Case(lengths=(5,), packed=False)))
    odd = torch.empty(*call[name].shape[:-1], 131, dtype=call[name].dtype)[..., 1:129].copy_(call[name])
    assert not aligned(odd)
    p = passed(record, call | {name: odd})
    assert p[name] != odd.data_ptr()
    assert p[name] % 16 == 0
    assert kda.explain(**(call | {name: odd})).notes["cuda"] == (
        f"copies {name}: rows must be contiguous and start at multiples of 16 bytes.",
    )


def test_buffers_that_no_vector_addresses_are_filled_all_the_same(record: Recorder) -> None:
    call = arguments(within_hopper(Case(lengths=(5,), packed=False)))

    def odd(x: Tensor) -> Tensor:
        return torch.full((*x.shape[:-1], 131), 7.0, dtype=x.dtype)[..., 1:129]

    out, final = odd(call["v"]), odd(call["initial_state"])
    p = passed(record, call | {"out": out, "final_state": final})
    assert p["out"] != out.data_ptr()
    assert p["final_state"] != final.data_ptr()
    assert not (out == 7).all()
    assert not (final == 7).all()


def test_a_call_of_nothing(record: Recorder) -> None:
    call = arguments(within_hopper(Case(lengths=(), padding=3)))
    result = api.gather(**call)[0]
    from kda.cuda.fwd import fwd

    assert not fwd(result).o.any()


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call that is validated in full; `cuda` runs them, and there are no plans yet."""
    ready = replace(dispatch.implementation("cuda"), reasons=lambda facts: [], unavailable=lambda: None)
    monkeypatch.setattr(dispatch, "choose", lambda facts, impl: ready)
    calls: list[int] = []
    original = validate.forward
    monkeypatch.setattr(validate, "forward", lambda *args, **flags: calls.append(1) or original(*args, **flags))
    monkeypatch.setattr(api, "_PLANS", plan.Plans())
    return calls


@pytest.mark.parametrize("given", [(), ("state_indices",), ("fresh",), ("write_indices", "token_indices")])
@pytest.mark.parametrize("buffer", [True, False])
def test_a_repeated_step_launches_the_same(
    record: Recorder, validated: list[int], monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], buffer: bool
) -> None:
    """The parameters of the same step on its own, byte for byte, whichever tensors are left out."""
    monkeypatch.setattr(api, "_STEP_PLANS", plan.Plans())
    for seed in (1, 2, 3):
        call = arguments(Case(lengths=(2,) * 3, packed=False, H=2, group=2, K=128, V=128, seed=seed))
        call["state"] = call.pop("initial_state")
        del call["output_final_state"]
        shapes = {"state_indices": (3,), "write_indices": (3,), "token_indices": (3, 2)}
        for name in given:
            call[name] = torch.tensor([True, False, True]) if name == "fresh" else torch.full(shapes[name], -1)
        if buffer:
            call["out"] = torch.empty_like(call["v"])
        short = kda.step(**call, impl="cuda")
        plans, api._STEP_PLANS = api._STEP_PLANS, plan.Plans()
        alone = kda.step(**call, impl="cuda")
        api._STEP_PLANS = plans
        assert alone.shape == short.shape
        a, b = (StepParams.from_buffer_copy(x) for x in record.raw[-2:])
        assert (a.q, a.out, a.state) == (call["q"].data_ptr(), short.data_ptr(), call["state"].data_ptr())
        for name in ("state_indices", "write_indices", "token_indices", "fresh"):
            assert getattr(a, name) == (call[name].data_ptr() if name in given else None)
        if not buffer:
            b.out = a.out
        assert bytes(a) == bytes(b)
    record.refuses = True
    again = kda.step(**call, impl="cuda")
    assert again.shape == short.shape  # the library's quick look refuses, the plan's finds nothing, and it is launched


def test_views_side_by_side_are_launched(record: Recorder, validated: list[int]) -> None:
    """What the library's quick look refuses, validation looks at, and then it runs; at every call."""
    record.refuses = True
    call = arguments(within_hopper(Case(lengths=(20, 5), H=2)))
    both = torch.empty(1, 25, 2, 256, dtype=torch.bfloat16)
    both[..., :128] = call["v"]
    call |= {"v": both[..., :128], "out": both[..., 128:]}
    for n in (1, 2):
        assert kda.fwd(**call, impl="cuda").o is call["out"]
        assert len(validated) == len(record.calls) == n
    assert not any(p["careful"] for p in record.calls)


@pytest.mark.parametrize("given", [True, False])
def test_a_repeated_call_launches_the_same(record: Recorder, validated: list[int], given: bool) -> None:
    """From the plan to the launch: the parameters of the same call on its own, byte for byte, its own addresses in."""
    for seed in (1, 2):
        call = arguments(within_hopper(Case(lengths=(20, 0, 5), H=2, group=2, seed=seed)))
        if given:
            call |= {"out": torch.empty_like(call["v"]), "final_state": torch.empty_like(call["initial_state"])}
        short = kda.fwd(**call, impl="cuda")
        plans, api._PLANS = api._PLANS, plan.Plans()
        alone = kda.fwd(**call, impl="cuda")
        api._PLANS = plans
        assert (alone.o.shape, alone.final_state.shape) == (short.o.shape, short.final_state.shape)  # type: ignore
        a, b = (FwdParams.from_buffer_copy(x) for x in record.raw[-2:])
        assert (a.q, a.out, a.final_state) == tuple(x.data_ptr() for x in (call["q"], *short))  # type: ignore
        if not given:
            b.out, b.final_state = a.out, a.final_state
        assert bytes(a) == bytes(b)
    assert len(validated) == 3  # all but the one that had a plan
