"""The ABI's structures for ctypes, field by field as in include/kda/fwd.h."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch

from kda.problem import TENSORS

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

_STRIDES = ("q", "k", "v", "g", "beta", "out", "initial", "final", "pool", "checkpoint")


class FwdParams(Structure):
    """struct kda_fwd_params. It begins with the tensors' addresses, in `kda.fwd`'s order."""

    _fields_ = [
        *((name, c_void_p) for name in TENSORS),
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
        ("scale", c_float),
        ("lower_bound", c_float),
        *((f"{name}_dtype", c_int32) for name in ("beta", "A_log", "dt_bias", "state", "checkpoint")),
        *((f"{name}_indices_dtype", c_int32) for name in ("state", "write", "checkpoint")),
        *((name, c_int32) for name in ("cu_64", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval")),
    ]
