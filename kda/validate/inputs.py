"""What every call has in common: inputs, gate, flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.problem import Facts, GateKind, aligned, gate_kind
from kda.validate.require import (
    require_dtype,
    require_flag,
    require_float,
    require_range,
    require_real,
    require_shape,
    require_tensor,
    vector,
)

#: Tensors whose rows a kernel would like to address by whole vectors, see `problem.aligned`.
ROWS = ("q", "k", "v", "g", "out", "initial_state", "final_state", "state_pool", "checkpoints", "state")


class Inputs(NamedTuple):
    """What every call has, after the checks that every call needs."""

    tensors: dict[str, Tensor]  # all that are there, under their names
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    scale: float
    lower_bound: float | None
    gate: GateKind
    A_log: Tensor | None
    dt_bias: Tensor | None
    graded: tuple[str, ...]  # names of those that require grad, where grad mode is on

    def facts(self, **more: Any) -> Facts:
        """The facts of a call: `more` is what the inputs do not tell."""
        q = self.tensors["q"]
        return Facts(
            device=q.device.type,
            capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
            rocm=torch.version.hip is not None,
            triton_interpreter=os.environ.get("TRITON_INTERPRET", "0") == "1",
            B=self.B,
            T=self.T,
            H=self.H,
            HV=self.HV,
            K=self.K,
            V=self.V,
            dtype=q.dtype,
            g_dtype=self.tensors["g"].dtype,
            beta_dtype=self.tensors["beta"].dtype,
            A_log_dtype=None if self.A_log is None else self.A_log.dtype,
            dt_bias_dtype=None if self.dt_bias is None else self.dt_bias.dtype,
            gate=self.gate,
            lower_bound=self.lower_bound,
            unaligned=tuple(name for name in ROWS if name in self.tensors and not aligned(self.tensors[name])),
            requires_grad=self.graded,
            **more,
        )

    def plain(self, name: str) -> Tensor:
        """A lazily negated view (as torch.imag of a conjugate) has the opposite values in memory."""
        return self.tensors[name].resolve_neg()

    def fields(self) -> dict[str, Any]:
        """Of a problem: the inputs, and what goes with them."""
        tensors = {name: self.plain(name) for name in ("q", "k", "v", "g", "beta")}
        return {**tensors, "scale": self.scale, "A_log": self.A_log, "dt_bias": self.dt_bias}


def check_inputs(
    required: dict[str, Tensor],
    optional: Mapping[str, Tensor | None],
    flags: dict[str, bool],
    scale: float | None,
    lower_bound: float | None,
    batch: str,
) -> Inputs:
    """Checks what all calls share: q, k, v, g and beta are `required`; `batch` is what their first axis is called."""
    tensors = dict(required)
    for name, value in required.items():
        require_tensor(name, value)
    for name, maybe in optional.items():
        if maybe is not None:
            require_tensor(name, maybe)
            tensors[name] = maybe
    for name, flag in flags.items():
        require_flag(name, flag)
    if flags["allow_neg_eigval"] and not flags["use_beta_sigmoid"]:
        raise ValueError(
            "allow_neg_eigval: expected use_beta_sigmoid=True with it, got False; a beta that is given as the weight "
            "itself is used as it is, so double it before the call"
        )

    # Shapes.
    q, k, v, g, beta = (tensors[name] for name in ("q", "k", "v", "g", "beta"))
    for name, axes in (("q", "H, K"), ("v", "HV, V")):
        if tensors[name].dim() != 4:
            raise ValueError(f"{name}: expected shape [{batch}, T, {axes}], got {list(tensors[name].shape)}")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if K == 0 or V == 0:
        name, axis = ("q", "K") if K == 0 else ("v", "V")
        raise ValueError(f"{name}: expected at least one channel, got {axis} = 0")
    require_shape("k", k, f"[{batch}, T, H, K]", (B, T, H, K), "q and k have the same heads and channels")
    require_shape("v", v, f"[{batch}, T, HV, V]", (B, T, HV, V), "v has q's batch and tokens")
    if (H == 0) != (HV == 0) or (H and HV % H):
        raise ValueError(
            f"v: expected a number of heads HV that is a multiple of q's H = {H}, got HV = {HV}; "
            "each query/key head serves HV / H value heads"
        )
    require_shape("g", g, f"[{batch}, T, HV, K]", (B, T, HV, K), "one gate per value head and key channel")
    require_shape("beta", beta, f"[{batch}, T, HV]", (B, T, HV), "one beta per value head")

    # Dtypes and devices.
    for name in ("q", "g", "beta"):
        require_float(name, tensors[name])
    for name in ("k", "v"):
        require_dtype(name, tensors[name], q.dtype, "q's; q, k and v have one dtype")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(
                f"{name}: expected device {q.device} (q's), got {tensor.device}; move it with .to(q.device)"
            )

    # Scalars and the gate.
    if scale is None:
        scale = K**-0.5
    scale = require_real("scale", scale)
    require_range("scale", scale, q)
    if lower_bound is not None:
        lower_bound = require_real("lower_bound", lower_bound)
        require_range("lower_bound", lower_bound, q)
        if lower_bound > 0:
            raise ValueError(
                f"lower_bound: expected a finite number <= 0, got {lower_bound}; "
                "it is the strongest log decay per token, such as -5"
            )
    A_log, dt_bias = tensors.get("A_log"), tensors.get("dt_bias")
    if dt_bias is not None and A_log is None and lower_bound is None:
        raise ValueError(
            "dt_bias: expected A_log or lower_bound beside it, got neither; without them g is the log decay itself "
            "and no bias is added"
        )
    graded = tuple(name for name, tensor in tensors.items() if tensor.requires_grad) if torch.is_grad_enabled() else ()
    return Inputs(
        *(tensors, B, T, H, HV, K, V, scale, lower_bound, gate_kind(lower_bound, A_log)),
        vector("A_log", A_log, "HV", (HV,), "one per value head"),
        vector("dt_bias", dt_bias, "HV * K", (HV, K), "one per value head and key channel"),
        graded,
    )
