"""Host side of the SM90 kernel: a `Problem` as the ABI's parameters, copies where a layout cannot be addressed."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kda.cuda import library
from kda.cuda.params import DTYPES, FwdParams
from kda.problem import ABSENT, TENSORS, Facts, Mark, Output, Problem, buffers
from kda.streams import current_stream

#: The addresses, which the structure begins with.
_ADDRESSES = struct.Struct(f"{len(TENSORS)}P")
_address = Tensor.data_ptr
_OUT, _FINAL = TENSORS.index("out"), TENSORS.index("final_state")


def _parameters(problem: Problem, tensors: dict[str, Tensor | None]) -> bytes:
    """All parameters but the addresses: what follows them in `FwdParams`."""
    facts = problem.facts
    p = FwdParams(
        B=facts.B,
        T=facts.T,
        H=facts.H,
        HV=facts.HV,
        N=facts.N,
        scale=problem.scale,
        lower_bound=facts.lower_bound or 0.0,
        beta_dtype=DTYPES[facts.beta_dtype],
        state_dtype=DTYPES[facts.state_dtype],
        use_qk_l2norm=facts.use_qk_l2norm,
        use_beta_sigmoid=facts.use_beta_sigmoid,
        allow_neg_eigval=facts.allow_neg_eigval,
    )
    for name in ("q", "k", "v", "g", "beta", "out"):
        setattr(p, f"{name}_stride", tensors[name].stride()[:3])  # type: ignore[union-attr]
    for field, name in (
        ("initial_stride", "initial_state"),
        ("final_stride", "final_state"),
        ("pool_stride", "state_pool"),
        ("checkpoint_stride", "checkpoints"),
    ):
        if (state := tensors[name]) is not None:
            setattr(p, field, state.stride()[:3])
    if problem.state_pool is not None:
        p.slots = problem.state_pool.shape[0]
    for name in ("state_indices", "write_indices", "fresh"):
        if (per_sequence := tensors[name]) is not None:
            setattr(p, f"{name}_stride", per_sequence.stride(0))
            if name != "fresh":
                setattr(p, f"{name}_dtype", DTYPES[per_sequence.dtype])
    if problem.checkpoints is not None and problem.checkpoint_indices is not None:
        indices = problem.checkpoint_indices
        p.checkpoint_slots, p.checkpoint_dtype = problem.checkpoints.shape[0], DTYPES[problem.checkpoints.dtype]
        p.checkpoint_columns, p.checkpoint_every = indices.shape[1], problem.checkpoint_every
        p.checkpoint_indices_stride, p.checkpoint_indices_dtype = indices.stride(), DTYPES[indices.dtype]
    if (A_log := tensors["A_log"]) is not None:
        p.A_log_stride, p.A_log_dtype = A_log.stride(0), DTYPES[A_log.dtype]
    if (dt_bias := tensors["dt_bias"]) is not None:
        p.dt_bias_stride, p.dt_bias_dtype = dt_bias.stride(), DTYPES[dt_bias.dtype]
    if (offsets := tensors["cu_seqlens"]) is not None:
        p.cu_stride, p.cu_64 = offsets.stride(0), offsets.dtype == torch.int64
    return bytes(p)[_ADDRESSES.size :]


def _launch(parameters: bytes, addresses: Iterable[int], device: torch.device, careful: bool) -> int:
    """One launch on the device's current stream. Returns the library's error, 0 if there was none.

    careful: look for buffers that lie on other tensors, which validation has not done.
    """
    p = _ADDRESSES.pack(*addresses) + parameters
    if torch.cuda.current_device() == device.index:
        return library.load().kda_fwd_sm90(p, current_stream(device), careful)
    with torch.cuda.device(device):
        return library.load().kda_fwd_sm90(p, current_stream(device), careful)


def fwd(problem: Problem) -> Output:
    """`kda.fwd` in one launch. Memory beyond inputs and outputs: none, but for tensors that must be copied first."""
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
        known = problem.memo["cuda"] = _parameters(problem, tensors)
    addresses = [0 if x is None else x.data_ptr() for x in tensors.values()]
    library.check(_launch(known, addresses, problem.q.device, careful=False))

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
    device, out, final = tensors[0].device, tensors[_OUT], tensors[_FINAL]
    made = final if facts.final_state else None
    if out is ABSENT[_OUT] or made is ABSENT[_FINAL]:
        tensors = [*tensors]
        given = (None if type(x) is Mark else x for x in (out, final))
        out, made = buffers(facts, device, *given)
        tensors[_OUT] = out
        if made is not None:
            tensors[_FINAL] = made
    if error := _launch(known, map(_address, tensors), device, careful=True):
        if error == library.REFUSED:
            return None
        library.check(error)
    return Output(out, made)
