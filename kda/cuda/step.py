"""Host side of the SM90 decode step: a `StepProblem` as the ABI's parameters."""

from __future__ import annotations

import struct
from typing import Any

from torch import Tensor

from kda.cuda import library
from kda.cuda.launch import launch
from kda.cuda.params import GATES, StepParams, describe
from kda.problem import STEP_TENSORS, Facts, Mark, StepProblem, new_output

#: The addresses, which the structure begins with.
_ADDRESSES = struct.Struct(f"{len(STEP_TENSORS)}P")
#: By how many are there: the rest is null.
_SOME_ADDRESSES = [
    struct.Struct(f"{n}P{_ADDRESSES.size - n * struct.calcsize('P')}x") for n in range(len(STEP_TENSORS) + 1)
]
_address = Tensor.data_ptr
_V, _OUT = STEP_TENSORS.index("v"), STEP_TENSORS.index("out")


def _parameters(problem: StepProblem, tensors: dict[str, Tensor | None]) -> bytes:
    """All parameters but the addresses: what follows them in `StepParams`."""
    facts = problem.facts
    p = StepParams(
        N=facts.B,
        T=facts.T,
        H=facts.H,
        HV=facts.HV,
        slots=facts.N,
        scale=problem.scale,
        lower_bound=facts.lower_bound or 0.0,
        gate=GATES[facts.gate],
        group=facts.HV // max(facts.H, 1),
        use_qk_l2norm=facts.use_qk_l2norm,
        use_beta_sigmoid=facts.use_beta_sigmoid,
        allow_neg_eigval=facts.allow_neg_eigval,
    )
    describe(p, tensors)
    return bytes(p)[_ADDRESSES.size :]


def step(problem: StepProblem) -> Tensor:
    """`kda.step` in one launch and no memory but `out`."""
    tensors: dict[str, Tensor | None] = {name: getattr(problem, name) for name in STEP_TENSORS}
    out = tensors["out"] = new_output(problem.v) if problem.out is None else problem.out
    known = problem.memo.get("cuda")
    if known is None:
        known = problem.memo["cuda"] = _parameters(problem, tensors)
    addresses = _ADDRESSES.pack(*(0 if x is None else x.data_ptr() for x in tensors.values()))
    launch(library.load().kda_step_sm90, addresses + known, problem.q.device, careful=False)
    return out


def again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor]) -> Tensor | None:
    """`step` of a repeated call: parameters as they were, but for the addresses."""
    known, out = memo.get("cuda"), tensors[_OUT]
    if known is None:
        return None
    if type(out) is Mark:
        out = new_output(tensors[_V])
        tensors = [*tensors]
        tensors[_OUT] = out
    addresses = _SOME_ADDRESSES[len(tensors)].pack(*map(_address, tensors))
    return out if launch(library.load().kda_step_sm90, addresses + known, out.device, careful=True) else None
