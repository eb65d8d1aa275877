"""Run a case on an implementation and judge it against the specification."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Any

import torch

from kda import api, dispatch
from kda.numerics import Rounding
from kda.problem import Facts, Output
from kda.ref.error import SIGMAS, Deviation, Expected, deviation, expect
from kda.testing.cases import Case, Printed, arguments, in_fp64


def device_of(impl: str) -> str:
    """Where tests run an implementation: kernels on a GPU if there is one, the rest on the CPU."""
    return "cuda" if impl in dispatch.AUTO["cuda"] and torch.cuda.is_available() else "cpu"


def facts_of(case: Case, device: str = "cpu") -> Facts:
    """The facts of the case's call."""
    return api.gather(**arguments(case, device))[0].facts


@lru_cache(maxsize=64)
def expected(case: Case, rounding: Rounding) -> Expected:
    """The oracle's result for a case, with the standard deviation that `rounding` leads to."""
    problem, _ = api.gather(**in_fp64(arguments(case)))
    return expect(problem, rounding)


def reasons(case: Case, impl: str, device: str | None = None) -> tuple[str, ...]:
    """Why `impl` cannot run the case here; empty if it can."""
    return dispatch.explain_facts(facts_of(case, device or device_of(impl)), impl).reasons[impl]


def on_cpu(result: Output) -> Output:
    """The result, where the oracle's is."""
    return Output(result.o.cpu(), None if result.final_state is None else result.final_state.cpu())


def _run_call(call: dict[str, Any], impl: str) -> Output:
    """The implementation's own result, on the CPU. `impl` is strict, so this is what ran."""
    return on_cpu(api.fwd(**call, impl=impl))


def run(case: Case, impl: str, device: str | None = None) -> Output:
    """The implementation's own result, on the CPU."""
    return _run_call(arguments(case, device or device_of(impl)), impl)


def rounding_of(call: dict[str, Any], impl: str) -> Rounding:
    """Where the implementation rounds on a call."""
    return dispatch.implementation(impl).rounding(api.gather(**call)[0].facts)


def judge_call(call: dict[str, Any], impl: str, meant: dict[str, Any] | None = None) -> Deviation:
    """`judge` for arguments that no case describes. `meant`: another call whose exact result this one should have."""
    problem, _ = api.gather(**in_fp64(call if meant is None else meant))
    return deviation(_run_call(call, impl), expect(problem, rounding_of(call, impl)))


def judge(case: Case, impl: str, device: str | None = None) -> Deviation:
    """How far the implementation is from the oracle on this case."""
    result = run(case, impl, device)
    return deviation(result, expected(case, rounding_of(arguments(case), impl)))


class Finding(AssertionError):
    """An implementation left the tolerance or failed. The message holds the case and how to repeat it."""


def reproducer(case: Printed | str, impl: str, what: str) -> str:
    """`what` went wrong, and the command that repeats it. No `impl`: nothing that has implementations."""
    option = f"--impl {impl} " if impl else ""
    return f"{what}\nrepeat with: python -m kda replay {option}{shlex.quote(str(case))}"


def check(case: Case, impl: str, device: str | None = None) -> Deviation:
    """`judge`, raising `Finding` with the reproducer when the result leaves the tolerance."""
    d = judge(case, impl, device)
    if not d.accepted:
        what = (
            f"{impl} is {d.sigma:.3g} standard deviations from the specification (accepted: {SIGMAS:g}): "
            f"o {d.sigma_o:.3g} at (row, token, head) {d.where_o}, "
            f"state {d.sigma_state:.3g} at (sequence, head, channel) {d.where_state}; "
            f"RMS {d.rms_o:.2e} / {d.rms_state:.2e}"
        )
        raise Finding(reproducer(case, impl, what))
    return d
