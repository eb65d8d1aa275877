"""The ABI's structures for ctypes, field by field as in include/kda/abi.h."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kda.problem import STEP_TENSORS, TENSORS, GateKind

#: enum kda_dtype; 0 is "none".
DTYPES = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 4,
    torch.int8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.uint8: 9,
}

#: enum kda_gate.
GATES = {GateKind.BOUNDED: 0, GateKind.SOFTPLUS: 1, GateKind.GIVEN: 2}

_STRIDES = ("q", "k", "v", "g", "beta", "out", "initial", "final", "pool", "checkpoint")


class FwdParams(Structure):
    """struct kda_fwd_params. It begins with the addresses of the tensors, in `kda.fwd`'s order, and the workspace."""

    _fields_ = [
        *((name, c_void_p) for name in (*TENSORS, "workspace")),
        *((f"{name}_stride", c_int64 * 3) for name in _STRIDES),
        ("A_log_stride", c_int64),
        ("dt_bias_stride", c_int64 * 2),
        ("cu_stride", c_int64),
        ("state_indices_stride", c_int64),
        ("write_indices_stride", c_int64),
        ("fresh_stride", c_int64),
        ("checkpoint_indices_stride", c_int64 * 2),
        *((name, c_int64) for name in ("B", "T", "H", "HV", "N", "slots")),
        *((f"checkpoint_{name}", c_int64) for name in ("slots", "columns", "every")),
        ("segment_slots", c_int64),
        ("first_segment", c_int32),
        ("segment", c_int32),
        ("equal_chunks", c_int32),
        ("scale", c_float),
        ("lower_bound", c_float),
        *((f"{name}_dtype", c_int32) for name in ("beta", "A_log", "dt_bias", "state", "checkpoint")),
        *((f"{name}_indices_dtype", c_int32) for name in ("state", "write", "checkpoint")),
        *((name, c_int32) for name in ("cu_64", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval")),
        ("batch_invariant", c_int32),
    ]


class StepParams(Structure):
    """struct kda_step_params. It begins with the tensors' addresses, in `kda.step`'s order."""

    _fields_ = [
        *((name, c_void_p) for name in STEP_TENSORS),
        *((f"{name}_stride", c_int64 * 3) for name in ("q", "k", "v", "g", "beta", "out", "state")),
        ("A_log_stride", c_int64),
        ("dt_bias_stride", c_int64 * 2),
        ("state_indices_stride", c_int64),
        ("write_indices_stride", c_int64),
        ("token_indices_stride", c_int64 * 2),
        ("fresh_stride", c_int64),
        *((name, c_int64) for name in ("N", "T", "H", "HV", "slots")),
        ("scale", c_float),
        ("lower_bound", c_float),
        *((f"{name}_dtype", c_int32) for name in ("g", "beta", "A_log", "dt_bias", "state")),
        *((f"{name}_indices_dtype", c_int32) for name in ("state", "write", "token")),
        *((name, c_int32) for name in ("gate", "group", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval")),
    ]


def describe(p: Structure, tensors: Mapping[str, Tensor | None]) -> None:
    """Fill in `x_stride` and `x_dtype` of every tensor x that is there, where the structure has them."""
    fields = dict(p._fields_)  # type: ignore[arg-type]
    for name, x in tensors.items():
        if x is None:
            continue
        if (kind := fields.get(f"{name}_stride")) is not None:
            count = getattr(kind, "_length_", 0)  # of an array
            setattr(p, f"{name}_stride", x.stride()[:count] if count else x.stride(0))
        if f"{name}_dtype" in fields:
            setattr(p, f"{name}_dtype", DTYPES[x.dtype])
