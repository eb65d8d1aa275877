"""Host side of the SM90 kernel: a `Problem` as the ABI's parameters, copies where a layout cannot be addressed."""

from __future__ import annotations

import struct
from ctypes import byref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda import environment
from kda.cuda import library
from kda.cuda.launch import launch
from kda.cuda.params import DTYPES, FwdParams, describe
from kda.devices import multiprocessors
from kda.numerics import SM90_TOKENS
from kda.problem import TENSORS, Facts, Output, Problem, with_buffers

#: The addresses, which the structure begins with: those of the tensors, and the workspace.
_ADDRESSES = struct.Struct(f"{len(TENSORS) + 1}P")
_address = Tensor.data_ptr

#: Tokens of the first segment and of the next ones. None: as the library finds best.
SEGMENTS = environment.segments()


class Known(NamedTuple):
    """What calls have in common that differ in addresses alone.

    parameters: what follows the addresses in `FwdParams`.
    workspace:  bytes of states between segments.
    """

    parameters: bytes
    workspace: int

    def addressed(self, tensors: list[int], device: torch.device) -> tuple[bytes, Tensor | None]:
        """All parameters for tensors at some addresses, and the workspace, which must live until the launch."""
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device) if self.workspace else None
        address = 0 if workspace is None else workspace.data_ptr()
        return _ADDRESSES.pack(*tensors, address) + self.parameters, workspace


def _parameters(problem: Problem, tensors: dict[str, Tensor | None]) -> FwdParams:
    """All parameters but the addresses, and how sequences are cut."""
    facts = problem.facts
    p = FwdParams(
        B=facts.B,
        T=facts.T,
        H=facts.H,
        HV=facts.HV,
        N=facts.N,
        scale=problem.scale,
        lower_bound=facts.lower_bound or 0.0,
        state_dtype=DTYPES[facts.state_dtype],
        use_qk_l2norm=facts.use_qk_l2norm,
        use_beta_sigmoid=facts.use_beta_sigmoid,
        allow_neg_eigval=facts.allow_neg_eigval,
        batch_invariant=facts.batch_invariant,
    )
    renamed = {"initial_state": "initial", "final_state": "final", "state_pool": "pool", "checkpoints": "checkpoint"}
    describe(p, {renamed.get(name, name): x for name, x in tensors.items()})
    if (offsets := tensors["cu_seqlens"]) is not None:
        p.cu_stride, p.cu_64 = offsets.stride(0), offsets.dtype == torch.int64
    if problem.state_pool is not None:
        p.slots = problem.state_pool.shape[0]
    if problem.checkpoints is not None and problem.checkpoint_indices is not None:
        p.checkpoint_slots, p.checkpoint_columns = problem.checkpoints.shape[0], problem.checkpoint_indices.shape[1]
        p.checkpoint_every = problem.checkpoint_every
    return p


def _known(problem: Problem, tensors: dict[str, Tensor | None]) -> Known:
    p = _parameters(problem, tensors)
    if SEGMENTS is not None:
        p.first_segment, p.segment = (tokens // SM90_TOKENS for tokens in SEGMENTS)
    if (offsets := tensors["cu_seqlens"]) is not None:
        p.cu_seqlens = offsets.data_ptr()
    workspace = library.load().kda_fwd_plan(byref(p), multiprocessors(problem.q.device))
    return Known(bytes(p)[_ADDRESSES.size :], workspace)


def fwd(problem: Problem) -> Output:
    """`kda.fwd` in one launch.

    Memory beyond inputs and outputs: tensors that must be copied first; and where sequences are cut (kda/segments.h) a
    state and a transition per segment and head, 135 KB, at most four pairs per multiprocessor: 71 MB on an H200.
    """
    facts = problem.facts
    tensors: dict[str, Tensor | None] = {
        name: problem.layout.cu_seqlens if name == "cu_seqlens" else getattr(problem, name) for name in TENSORS
    }
    for name in facts.unaligned:
        if name not in ("out", "final_state"):
            tensors[name] = tensors[name].clone(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
    out, final = problem.buffers(new=facts.unaligned)
    tensors["out"], tensors["final_state"] = out, final
    if facts.N * facts.HV == 0:
        out.zero_()

    known = problem.memo.get("cuda")
    if known is None:
        known = problem.memo["cuda"] = _known(problem, tensors)
    device = problem.q.device
    parameters, _workspace = known.addressed([0 if x is None else x.data_ptr() for x in tensors.values()], device)
    launch(library.load().kda_fwd_sm90, parameters, device, careful=False)

    if problem.out is not None and out is not problem.out:
        out = problem.out.copy_(out)
    if problem.final_state is not None and final is not problem.final_state and final is not None:
        final = problem.final_state.copy_(final)
    return Output(out, final)


def again(facts: Facts, memo: dict[str, Any], tensors: list[Tensor]) -> Output | None:
    """`fwd` of a repeated call: parameters as they were, but for the addresses."""
    known = memo.get("cuda")
    if known is None or facts.N * facts.HV == 0:
        return None
    device = tensors[0].device
    tensors, result = with_buffers(facts, tensors)
    parameters, _workspace = known.addressed([*map(_address, tensors)], device)
    return result if launch(library.load().kda_fwd_sm90, parameters, device, careful=True) else None
