"""`kda.fwd` under torch.compile: one opaque operator, no recompilation per length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from targets import device, implementations
from torch import Tensor

import kda
from kda.testing.cases import Case, PoolCase, arguments, fitted
from kda.testing.pool import call_of, pool_of, same


def graphs(**options: Any) -> tuple[Any, list[int]]:
    """`kda.fwd` compiled in one graph, and a list that grows with every graph."""
    made: list[int] = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        made.append(len(module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    return torch.compile(lambda **call: kda.fwd(**call), fullgraph=True, backend=backend, **options), made


@pytest.mark.parametrize("impl", implementations())
def test_one_graph_for_all_lengths(impl: str) -> None:
    compiled, made = graphs(dynamic=True)
    for length in (65, 70, 33):
        call = arguments(fitted(Case(lengths=(length, 3)), impl), device(impl))
        traced, plain = compiled(**call, impl=impl), kda.fwd(**call, impl=impl)
        assert torch.equal(traced[0], plain.o)
        assert torch.equal(traced[1], plain.final_state)  # type: ignore[arg-type]
    assert len(made) == 1


def test_buffers_are_filled_and_absent_states_stay_absent() -> None:
    compiled, _ = graphs()
    call = arguments(Case(lengths=(20, 3)))
    plain = kda.fwd(**call)
    out, final = torch.empty_like(call["v"]), torch.empty_like(call["initial_state"])
    compiled(**call, out=out, final_state=final)
    assert torch.equal(out, plain.o)
    assert torch.equal(final, plain.final_state)  # type: ignore[arg-type]
    call["output_final_state"] = False
    assert compiled(**call)[1] is None


def pooled(impl: str, length: int) -> tuple[dict[str, Any], Tensor]:
    """A call on a pool with checkpoints, and the pool."""
    case = PoolCase(
        fitted(Case(lengths=(length, 3)), impl),
        slots=6,
        reads=(4, 2),
        writes=(1, -1),
        fresh=(False, True),
        kept=((0,), (3,)),
    )
    call, states = call_of(case, device(impl))
    return call, pool_of(case, states)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("own", [False, True])
def test_one_graph_for_all_lengths_on_a_pool(impl: str, own: bool) -> None:
    """The pool and the checkpoints, in it or apart, are written by the graph as by the call."""
    compiled, made = graphs(dynamic=True)
    for length in (70, 129, 65):
        call, pool = pooled(impl, length)
        (a, a_kept), (b, b_kept) = (
            (x, torch.full_like(x, torch.nan) if own else x) for x in (pool.clone(), pool.clone())
        )
        traced = compiled(**call, state_pool=a, checkpoints=a_kept, impl=impl)
        plain = kda.fwd(**call, state_pool=b, checkpoints=b_kept, impl=impl)
        assert torch.equal(traced[0], plain.o)
        assert traced[1] is None
        assert same(a, b)
        assert same(a_kept, b_kept)
        assert a_kept[0].isfinite().all()
    assert len(made) == 1


def test_a_wrong_call_says_so_when_it_runs() -> None:
    compiled, _ = graphs()
    call = arguments(Case(lengths=(20, 3)))
    with pytest.raises(ValueError, match="lower_bound"):
        compiled(**dict(call, lower_bound=1.0))


def test_inputs_that_require_grad_are_not_detached() -> None:
    """The operator has no backward, so such a call goes past it."""
    call = arguments(Case(lengths=(20,), packed=False, dtype="float32"))
    call["q"].requires_grad_()
    torch._dynamo.reset()
    o = torch.compile(lambda **c: kda.fwd(**c).o, backend="eager")(**call)
    assert o.requires_grad
    o.sum().backward()
    assert call["q"].grad.any()


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("state", [True, False])
def test_the_operator_keeps_torchs_rules(impl: str, state: bool) -> None:
    case = fitted(Case(lengths=(5, 3), initial_state=state, index_dtype="int64"), impl)
    call = arguments(case, device(impl))
    inputs = (call[n] for n in ("q", "k", "v", "g", "beta"))
    gate = (call["A_log"], call["dt_bias"], call["lower_bound"])
    torch.library.opcheck(
        torch.ops.kda.fwd,
        (*inputs, None, *gate, call.get("initial_state"), call["cu_seqlens"], state, True, True, False, False, impl),
    )


@pytest.mark.parametrize("impl", implementations())
def test_the_operator_on_a_pool_keeps_torchs_rules(impl: str) -> None:
    call, pool = pooled(impl, 70)
    pool = pool.nan_to_num()  # which opcheck would take for a difference
    inputs = (call[n] for n in ("q", "k", "v", "g", "beta"))
    gate = (call["A_log"], call["dt_bias"], call["lower_bound"])
    slots = (call[n] for n in ("state_indices", "write_indices", "fresh"))
    torch.library.opcheck(
        torch.ops.kda.fwd_pool,
        (*inputs, None, *gate, None, call["cu_seqlens"], False, True, True, False, False, impl)
        + (pool, *slots, torch.zeros_like(pool), call["checkpoint_indices"], 64),
    )
