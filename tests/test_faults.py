"""Planted faults: the suite still bites. Each is a small edit of the chunked algorithm, caught by a named test.

The faulty implementation rounds like a bf16 kernel and declares so, hence is judged with a bf16 kernel's tolerance.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import test_gates
import test_laws
import test_oracle
import torch
from targets import GPU
from test_tolerance import BF16, to_bf16, to_fp16

from kda import dispatch
from kda.problem import Output, Problem
from kda.ref import chunked
from kda.testing.cases import NAMED
from kda.testing.judge import Finding


@dataclass(frozen=True)
class Fault:
    """Edits of kda/ref/chunked.py, each a text that stands there and its replacement, and the test that must fail."""

    edits: dict[str, str]
    caught_by: Callable[[str], None]


def named(name: str) -> Callable[[str], None]:
    """The oracle test on the named case, in bf16."""
    return lambda impl: test_oracle.test_named(impl, name, NAMED[name])


def causality(impl: str) -> None:
    test_laws.test_prefix_causality(impl, test_laws.REGIMES["bounded"])


FAULTS = {
    "anchor on a future row": Fault(
        {
            "decayed(pairs(reverse, b)[..., 0, :, :])": (
                "(pairs(reverse, b)[..., 0, :, :] + pairs(forward, b)[..., 1, -1:, :] / 2).exp()"
            ),
            "decayed(pairs(forward, b)[..., 1, :, :])": (
                "(pairs(forward, b)[..., 1, :, :] - pairs(forward, b)[..., 1, -1:, :] / 2).exp()"
            ),
        },
        causality,
    ),
    "gate off by 0.5 %": Fault(
        {"    # One token is a block of its own": "    a = 1.005 * a\n    # One token is a block of its own"},
        named("only decay"),
    ),
    "state kept in bf16": Fault(
        {"        o.update(": "        S = S.bfloat16().to(S.dtype)\n        o.update("},
        named("long memory, weak beta"),
    ),
    "a tail's last gate left out": Fault(
        {"decay=e[..., -1, :]": "decay=e[torch.arange(len(e)), :, (tiles.valid.sum(1) - 2).clamp(min=0)]"},
        named("only decay"),
    ),
    "an empty sequence shifts the table": Fault(
        {
            "S = torch.stack([current[n] for n in active])": (
                "S = torch.stack([current[sum(c > 0 for c in tiles.chunks[:n])] for n in active])"
            )
        },
        named("empty first, middle, last"),
    ),
    "beta one token late": Fault(
        {"    # One token is a block of its own": "    beta = beta.roll(1, -1)\n    # One token is a block of its own"},
        named("one chunk"),
    ),
    "mask without the diagonal": Fault(
        {"M = rearrange((operand(q)": "M = 0 * rearrange((operand(q)"}, named("one token")
    ),
    "mask that lets the future in": Fault(
        {"torch.zeros_like(below)": "1e-3 * below.transpose(-1, -2)"}, causality
    ),
    "reverse sum as total minus prefix": Fault(
        {
            "r = r + torch.cat([right, torch": (
                "r[..., 0, :, :] = left[..., 0, :, :] - f[..., 0, :, :]; r = r + torch.cat([right, torch"
            )
        },
        lambda impl: test_gates.test_a_reset_leaves_small_decays_alone(impl, -1e6),
    ),
    "Aq off by 1 %": Fault(
        {"Aq=operand(inverse(M) @ A)": "Aq=1.01 * operand(inverse(M) @ A)"}, named("empty first, middle, last")
    ),
    "Ak off by 1 %": Fault(
        {"Ak=operand(A.transpose(-1, -2) @ Kr)": "Ak=1.01 * operand(A.transpose(-1, -2) @ Kr)"}, named("grouped heads")
    ),
    "Qd off by 1 %": Fault({"Qd=operand(q * e)": "Qd=1.01 * operand(q * e)"}, named("only decay")),
    "products of pairs off by 1 %": Fault(
        {"        M = blocks(M, M_new)": "        M = blocks(M, 1.01 * M_new)"}, named("slow channels")
    ),
    "bound as a clamp": Fault(
        {
            "rearrange(problem_log_decay(problem, a), ": (
                "rearrange((problem_log_decay(problem, a) * 2).clamp(min=facts.lower_bound or -1e9), "
            )
        },
        test_gates.test_bounded_is_a_sigmoid_not_a_clamp,
    ),
}  # fmt: skip


def faulty_module(edits: dict[str, str]) -> ModuleType:
    """kda.ref.chunked with the edits, as a module of its own."""
    source = inspect.getsource(chunked)
    for old, new in edits.items():
        assert source.count(old) == 1, f"the fault no longer fits the source: {old!r}"
        source = source.replace(old, new)
    module = ModuleType("faulty")
    exec(compile(source, "faulty", "exec"), module.__dict__)
    return module


def install(monkeypatch: pytest.MonkeyPatch, edits: dict[str, str]) -> str:
    """Register the edited algorithm as an implementation; returns its name."""
    module = faulty_module(edits)

    def fwd(problem: Problem) -> Output:
        if problem.facts.dtype == torch.bfloat16:
            return module.fwd(problem, to_bf16, to_fp16)
        return module.fwd(problem)

    rounding = lambda facts: BF16 if facts.dtype == torch.bfloat16 else chunked.IMPL.rounding(facts)  # noqa: E731
    module.IMPL = replace(chunked.IMPL, name="faulty", fwd=fwd, rounding=rounding)
    monkeypatch.setitem(sys.modules, "faulty", module)
    monkeypatch.setitem(dispatch.TABLE, "faulty", "faulty")
    monkeypatch.setattr(test_laws, "ROUNDS_BY_BATCH", ("chunked", "faulty"))
    dispatch.forget()
    return "faulty"


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    dispatch.forget()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    impl = install(monkeypatch, fault.edits)
    with pytest.raises((AssertionError, Finding)):
        fault.caught_by(impl)


@dataclass(frozen=True)
class KernelFault:
    """An edit of a file of kda/triton, and the named case that must catch it; `segment`: where the chain is cut so."""

    file: str
    old: str
    new: str
    case: str
    segment: int = 0


KERNEL_FAULTS = {
    "gate off by 0.5 %": KernelFault(
        "prepare", "a = log_decay(gates", "a = 1.005 * log_decay(gates", "only decay"
    ),
    "a tail's last gate left out": KernelFault(
        "prepare",
        "total = tl.sum(by_chunks(a, C), axis=1)\n            whole",
        "total = tl.sum(by_chunks(tl.where(i == tl.minimum(stop - start, BLOCK) - 1, 0.0, a), C), axis=1)\n"
        "            whole",
        "only decay",
    ),
    "beta one token late": KernelFault(
        "prepare", "tl.load(beta + rows * beta_t,", "tl.load(beta + tl.maximum(rows - 1, 0) * beta_t,", "one chunk"
    ),
    "mask without the diagonal": KernelFault(
        "prepare", "within & (i >= j), M * exact", "within & (i > j), M * exact", "one token"
    ),
    "anchor not taken out": KernelFault(
        "prepare", "exact = tl.where(_paired(i, j, C // 2), tl.exp2(-anchor), 1.0)", "exact = 1.0", "one chunk"
    ),
    "an empty sequence shifts the table": KernelFault(
        "recur", "slot = start // BLOCK + n", "slot = start // BLOCK", "empty first, middle, last"
    ),
    "state kept in bf16": KernelFault(
        "recur",
        "S = S * e[None, :] + ",
        "S = cast(S, tl.bfloat16, INTERPRET).to(tl.float32) * e[None, :] + ",
        "long memory, weak beta",
    ),
    "Aq off by 1 %": KernelFault(
        "recur", "dot(R, tl.trans(aq), OPERAND", "dot(R, 1.01 * tl.trans(aq), OPERAND", "empty first, middle, last"
    ),
    "states merged in bf16": KernelFault(
        "merge", "tl.trans(phi),", "tl.trans(phi).to(tl.bfloat16).to(tl.float32),", "long memory, weak beta", segment=64
    ),
    "a segment's own state left out": KernelFault("merge", "S += dot(", "S = dot(", "slow channels", segment=64),
    "a transition from the wrong segment": KernelFault(
        "merge", "transition += step * K", "transition += 0 * step * K", "slow channels", segment=64
    ),
}  # fmt: skip


def edited_kernel(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, old: str, new: str) -> None:
    """Put an edited copy of kda/triton/<name>.py, a file because Triton reads sources, in the place of its kernel."""
    from kda.triton import forward

    source = inspect.getsource(importlib.import_module(f"kda.triton.{name}"))
    assert source.count(old) == 1, f"the fault no longer fits the source: {old!r}"
    path = folder / f"edited_{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    monkeypatch.setattr(forward, f"{name}_kernel", getattr(module, f"{name}_kernel"))


@pytest.mark.skipif(GPU, reason="planted in the interpreted kernels")
@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_fault_in_a_kernel_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from test_split import cut

    fault = KERNEL_FAULTS[name]
    if fault.segment:
        cut(monkeypatch, fault.segment)
    edited_kernel(monkeypatch, tmp_path, fault.file, fault.old, fault.old)
    test_oracle.test_named("triton", fault.case, NAMED[fault.case])
    edited_kernel(monkeypatch, tmp_path, fault.file, fault.old, fault.new)
    with pytest.raises((AssertionError, Finding)):
        test_oracle.test_named("triton", fault.case, NAMED[fault.case])


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_the_same_test_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].caught_by(install(monkeypatch, {}))
