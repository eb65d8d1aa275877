"""What only a GPU can show: streams, graphs, repetition, 64-bit offsets, every row of the tile table."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from targets import GPU, KERNELS, kernels
from torch import Tensor

import kda
from kda.testing.cases import Case, PoolCase, arguments, fitted
from kda.testing.pool import call_of, pool_of
from kda.triton.config import TABLE, architecture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]

TOKENS = ("q", "k", "v", "g", "beta")
MODEL = Case(lengths=(300, 0, 65, 17), H=2, K=128, V=128)


def assert_equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_auto_runs_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `auto` takes a kernel, and that kernel is what ran."""
    call = arguments(MODEL, "cuda")
    chosen = kda.explain(**call).chosen
    assert chosen in KERNELS
    ran = []
    impl = kda.dispatch.implementation(chosen)
    spy = dataclasses.replace(impl, fwd=lambda problem: ran.append(chosen) or impl.fwd(problem))  # type: ignore
    monkeypatch.setattr(sys.modules[kda.dispatch.TABLE[chosen]], "IMPL", spy)
    kda.fwd(**call)
    assert ran == [chosen]


@pytest.mark.parametrize("impl", kernels())
@pytest.mark.parametrize("case", [MODEL, dataclasses.replace(MODEL, gate="softplus", decay="mixed")], ids=repr)
def test_repetition_is_bitwise(impl: str, case: Case) -> None:
    call = arguments(fitted(case, impl), "cuda")
    first = kda.fwd(**call, impl=impl)
    for _ in range(200):
        again = kda.fwd(**call, impl=impl)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.final_state, first.final_state)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", kernels())
def test_other_stream(impl: str) -> None:
    call = arguments(MODEL, "cuda")
    expected = kda.fwd(**call, impl=impl).o
    stream = torch.cuda.Stream()
    late = torch.empty_like(call["v"])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(call["v"])
        o = kda.fwd(**dict(call, v=late), impl=impl).o
    stream.synchronize()
    assert_equal(o, expected)


@pytest.mark.parametrize("impl", kernels())
def test_graph_replay_sees_changed_inputs(impl: str) -> None:
    """Captured once; replayed with other inputs and other cu_seqlens, shorter than the tensors included."""
    static = arguments(MODEL, "cuda")
    out, final = torch.empty_like(static["v"]), torch.empty_like(static["initial_state"])
    kda.fwd(**static, out=out, final_state=final, impl=impl)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda.fwd(**static, out=out, final_state=final, impl=impl)
    for lengths in ((300, 0, 65, 17), (1, 2, 3, 4), (0, 0, 0, 0), (100, 200, 0, 0)):
        case = dataclasses.replace(MODEL, lengths=lengths, padding=382 - sum(lengths), seed=sum(lengths))
        other = arguments(case, "cuda")
        for name in (*TOKENS, "A_log", "dt_bias", "initial_state", "cu_seqlens"):
            static[name].copy_(other[name])
        out.fill_(torch.nan)
        final.fill_(torch.nan)
        graph.replay()
        expected = kda.fwd(**other, impl=impl)
        assert_equal(out, expected.o)
        assert_equal(final, expected.final_state)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", kernels())
def test_graph_replay_on_a_pool(impl: str) -> None:
    """Captured once; replayed with other slots, lengths and contents, padding and fresh sequences among them."""
    kind = PoolCase(MODEL, 14, (1, 2, 3, 4), (5, 2, 3, 4), (False,) * 4, ((6, 7), (8, 9), (10, 11), (12, 13)))
    static, states = call_of(kind, "cuda")
    out = torch.empty_like(static["v"])
    pool = pool_of(kind, states)

    def run() -> None:
        kda.fwd(**static, state_pool=pool, checkpoints=pool, out=out, impl=impl)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for other in (
        dataclasses.replace(kind, reads=(13, -1, 0, 2), writes=(12, 11, -1, 2), kept=((1, 3), (4, 5), (6, 7), (8, 9))),
        dataclasses.replace(
            kind,
            case=dataclasses.replace(MODEL, lengths=(64, 128, 65, 0), padding=125, seed=1),
            fresh=(True, False, False, True),
        ),
        kind,
    ):
        call, states = call_of(other, "cuda")
        for name in (*TOKENS, "A_log", "dt_bias", "cu_seqlens"):
            static[name].copy_(call[name])
        for name in ("state_indices", "write_indices", "fresh", "checkpoint_indices"):
            static[name].copy_(call[name])
        out.fill_(torch.nan)
        pool.copy_(pool_of(other, states))
        expected = pool.clone()
        graph.replay()
        assert_equal(out, kda.fwd(**call, state_pool=expected, checkpoints=expected, impl=impl).o)
        assert_equal(pool, expected)


def test_checks_refuse_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments(MODEL, "cuda")
    monkeypatch.setenv("KDA_CHECK", "1")
    kda.fwd(**call)
    bad = dict(call, cu_seqlens=call["cu_seqlens"] + 1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda.fwd(**bad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="KDA_CHECK"):
        kda.fwd(**call)


@pytest.mark.parametrize("impl", kernels())
@pytest.mark.parametrize("bounds", [[0, 500, 1000], [0, 200, 100], [-5, 100, 382], [0, 2**31 - 1, 0]])
def test_bad_offsets_stay_inside_the_tensors(impl: str, bounds: list[int]) -> None:
    """Contents of cu_seqlens are not checked on a GPU: wrong numbers are allowed, an access out of bounds is not."""
    call = arguments(dataclasses.replace(MODEL, lengths=(300, 82)), "cuda")
    guard = torch.full((1, 382 + 256, *call["v"].shape[2:]), 7.0, device="cuda", dtype=call["v"].dtype)
    out = guard[:, 128 : 128 + 382]
    states = torch.full((4, *call["initial_state"].shape[1:]), 7.0, device="cuda")
    offsets = torch.tensor(bounds, device="cuda")
    kda.fwd(**dict(call, cu_seqlens=offsets), out=out, final_state=states[1:-1], impl=impl)
    torch.cuda.synchronize()
    assert (states[[0, -1]] == 7).all()
    assert (guard[:, :128] == 7).all()
    assert (guard[:, -128:] == 7).all()


@pytest.mark.parametrize("impl", kernels())
def test_uninitialised_memory_is_not_read(impl: str) -> None:
    """Fresh buffers filled with NaN change nothing."""
    call = arguments(dataclasses.replace(MODEL, padding=70), "cuda")
    expected = kda.fwd(**call, impl=impl)
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = kda.fwd(**call, impl=impl)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(poisoned.o, expected.o)
    assert_equal(poisoned.final_state, expected.final_state)  # type: ignore[arg-type]


# ---- sizes


def _spread(x: Tensor, stride: int) -> Tensor:
    """x [1, T, ...] with `stride` elements from token to token, in a buffer of its own."""
    store = torch.empty((x.shape[1] - 1) * stride + x[0, 0].numel(), dtype=x.dtype, device=x.device)
    view = store.as_strided(x.shape, (store.numel(), stride, *x.stride()[2:]))
    return view.copy_(x)


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("impl", kernels())
@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("tokens", [20, 130])
def test_offsets_of_tokens_beyond_32_bits(impl: str, name: str, tokens: int) -> None:
    """Both sides of an offset of 2^31 elements to the last token, in few wide and in many narrow strides."""
    call = arguments(fitted(Case(lengths=(tokens,), H=2, K=32, V=32), impl), "cuda")
    expected = kda.fwd(**call, impl=impl)
    for beyond in (-1, 1):
        spread = _spread(call[name], (2**31 // (tokens - 1) // 64 + beyond) * 64)
        result = kda.fwd(**dict(call, **{name: spread}), impl=impl)
        assert_equal(result.o, expected.o)
        assert_equal(result.final_state, expected.final_state)  # type: ignore[arg-type]
        del spread


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("impl", kernels())
def test_outputs_and_workspace_beyond_32_bits(impl: str) -> None:
    """T * HV * K above 2^31: the last sequence alone gives the same bits."""
    H, K, long, short = 64, 128, 2**31 // (64 * 128), 100
    noise = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=noise, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    call: dict[str, Any] = {n: make(1, long + short, H, K) for n in ("q", "k", "v", "g")}
    call["beta"] = make(1, long + short, H)
    bounds = torch.tensor([0, long, long + short], device="cuda")
    whole = kda.fwd(**call, lower_bound=-5.0, cu_seqlens=bounds, output_final_state=True, impl=impl)
    part = {n: x[:, long:] for n, x in call.items()}
    alone = kda.fwd(**part, lower_bound=-5.0, output_final_state=True, impl=impl)
    assert_equal(whole.o[:, long:], alone.o)
    assert_equal(whole.final_state[1:], alone.final_state)  # type: ignore[index,arg-type]


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("impl", kernels())
def test_states_beyond_32_bits_and_many_sequences(impl: str) -> None:
    """N * HV * V * K above 2^31 and far more sequences than 65,535, most of them empty."""
    N, K = 2**31 // (128 * 128) + 3, 128
    lengths = torch.zeros(N, dtype=torch.int64)
    lengths[[0, 7, N - 2, N - 1]] = torch.tensor([3, 70, 64, 5])
    T = int(lengths.sum())
    call = arguments(Case(lengths=(T,), K=K, V=128, initial_state=False), "cuda")
    call["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    state = torch.randn(N, 1, 128, K, device="cuda")
    kept = state[[1, N - 3]].clone()
    result = kda.fwd(**call, initial_state=state, impl=impl)
    few = torch.tensor([0, 7, N - 2, N - 1], device="cuda")
    small = dict(call, cu_seqlens=torch.tensor([0, 3, 73, 137, 142], device="cuda"), initial_state=state[few])
    expected = kda.fwd(**small, impl=impl)
    assert_equal(result.o, expected.o)
    assert_equal(result.final_state[few], expected.final_state)  # type: ignore[index,arg-type]
    assert_equal(result.final_state[[1, N - 3]], kept)  # type: ignore[index]


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("impl", kernels())
def test_slots_beyond_32_bits(impl: str) -> None:
    """Slots of a pool, and of checkpoints, that lie 2^31 elements and more from the first."""
    call = arguments(fitted(Case(lengths=(70, 65), H=2, K=128, V=128), "cuda"), "cuda")
    states = call.pop("initial_state")
    del call["output_final_state"]
    store = torch.empty(2 * (2**31 + 64) + states[0].numel(), device="cuda", dtype=torch.bfloat16)
    far = store.as_strided((3, *states.shape[1:]), (2**31 + 64, *states.stride()[1:]))
    near = torch.empty(3, *states.shape[1:], device="cuda", dtype=torch.bfloat16)
    call["state_indices"] = torch.tensor([2, 1], device="cuda")
    call["checkpoint_indices"] = torch.tensor([[0], [-1]], device="cuda")
    results = []
    for pool in (far, near):
        pool[2], pool[1], pool[0] = states[0], states[1], torch.nan
        results.append(kda.fwd(**call, state_pool=pool, checkpoints=pool, checkpoint_every=64, impl=impl).o)
    assert_equal(results[0], results[1])
    assert_equal(far.clone(), near)
    assert near.isfinite().all()


# ---- every row of the table


HERE = architecture(torch.cuda.get_device_capability()) if GPU else "any"


@pytest.mark.long
@pytest.mark.parametrize(("bf16", "K"), [(bf16, K) for arch, bf16, K in TABLE if arch == HERE])
def test_every_row_of_the_table(bf16: bool, K: int) -> None:
    """Each configuration in a process of its own: one that is miscompiled must not hide behind another."""
    dtype = "bfloat16" if bf16 else "float32"
    cases = [
        Case(lengths=(200, 0, 65, 3), H=2, K=K, V=V, dtype=dtype, gate=gate, use_qk_l2norm=l2norm, decay="slow")
        for V in (128, 32, 256)
        for gate, l2norm in (("bounded", True), ("softplus", True), ("bounded", False))
    ]
    program = "\n".join(
        ["from kda.testing.cases import Case", "from kda.testing.judge import check"]
        + [f"check({case!r}, 'triton')" for case in cases]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
