"""Ways to make a call malformed, or merely odd: each turns one argument of a good call into another value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]

#: Arguments by what they are; those of both calls.
FLOATS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "final_state", "out", "state", "state_pool",
          "checkpoints")  # fmt: skip
INTEGERS = ("cu_seqlens", "state_indices", "write_indices", "token_indices", "checkpoint_indices")
TENSORS = (*FLOATS, *INTEGERS, "fresh")
BUFFERS = ("out", "final_state", "state", "state_pool", "checkpoints")
NUMBERS = ("scale", "lower_bound")
FLAGS = ("output_final_state", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "batch_invariant")

#: Arguments whose sizes are those of the call, so that another one's may be called wrong when they change.
SIZES = ("q", "v", "cu_seqlens", "state", "state_pool", "checkpoints")


def _on(other: str) -> Callable[[Call, Tensor], object]:
    """A tensor of the same shape, strides and dtype in memory of the argument `other`, where that has room."""

    def move(call: Call, x: Tensor) -> object:
        there = call.get(other)
        if not isinstance(there, Tensor) or there is x or there.layout != torch.strided or there.is_meta:
            return x
        store = there.untyped_storage()
        if x.numel() == 0 or there.numel() == 0 or x.numel() * x.element_size() > store.nbytes():
            return x
        return x.new_empty(0).set_(store, 0, x.shape, torch.empty(x.shape, device="meta").stride())

    return move


def _replaced(x: Tensor, at: int, value: int) -> Tensor:
    if x.numel() == 0 or x.is_floating_point():
        return x
    y = x.flatten().clone()
    y[at] = value
    return y.reshape(x.shape)


def _slots(call: Call) -> int:
    pool = call.get("state", call.get("state_pool"))
    return len(pool) if isinstance(pool, Tensor) and pool.dim() else 0


#: Of tensors.
OF_TENSORS: dict[str, Callable[[Call, Tensor], object]] = {
    "number": lambda call, x: 1.0,
    "text": lambda call, x: "x",
    "list": lambda call, x: x.tolist(),
    "a device": lambda call, x: torch.device("cpu"),
    "None": lambda call, x: None,
    "sparse": lambda call, x: x.to_sparse(),
    "meta": lambda call, x: x.to("meta"),
    "cpu": lambda call, x: x.cpu(),  # of a call on a GPU
    "complex64": lambda call, x: x.to(torch.complex64),
    "bool": lambda call, x: x.bool(),
    "int64": lambda call, x: x.long(),
    "uint8": lambda call, x: x.to(torch.uint8),
    "float16": lambda call, x: x.half(),
    "float32": lambda call, x: x.float(),
    "float64": lambda call, x: x.double(),
    "float8": lambda call, x: x.to(torch.float8_e4m3fn),
    "rank": lambda call, x: x[None],
    "flat": lambda call, x: x.flatten(),
    "scalar": lambda call, x: x.new_zeros(()),
    "longer": lambda call, x: torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], -1) if x.dim() else x,
    "shorter": lambda call, x: x[..., :-1] if x.dim() and x.shape[-1] else x,
    "one more": lambda call, x: torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if x.dim() else x,
    "one less": lambda call, x: x[:-1] if x.dim() and len(x) else x,
    "turned": lambda call, x: x.mT if x.dim() > 1 else x,
    "expanded": lambda call, x: x.new_zeros(1).expand(x.shape),
    "negated": lambda call, x: torch._neg_view(x) if x.is_floating_point() else x,
    "requires grad": lambda call, x: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
    "of a subclass": lambda call, x: torch.nn.Parameter(x.detach().clone(), requires_grad=False),
    **{f"on {name}": _on(name) for name in ("q", "v", "g", "initial_state", "out", "state", "state_pool")},
    # Contents.
    "starts at 1": lambda call, x: _replaced(x, 0, 1),
    "ends beyond": lambda call, x: _replaced(x, -1, 99),
    "decreasing": lambda call, x: x.flip(0) if x.dim() and not x.is_floating_point() else x,
    "beyond the pool": lambda call, x: _replaced(x, 0, _slots(call)),
    "twice": lambda call, x: _replaced(x, -1, int(x.flatten()[0])) if x.numel() and not x.is_floating_point() else x,
}

#: Of numbers.
OF_NUMBERS: dict[str, object] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "positive": 0.5,
    "integer": -1,
    "beyond fp32": -1e39,
    "beyond floats": -(10**400),
    "number as text": "-1",
    "number as tensor": torch.tensor(-1.0),
    "True": True,
    "complex": -1j,
}

#: Of flags.
OF_FLAGS: dict[str, object] = {"1": 1, "yes": "yes", "no flag": None, "tensor": torch.tensor(True)}

#: Of the name of an implementation, and of the number of tokens between checkpoints.
OF_NAMES: dict[str, object] = {
    "unknown": "nope",
    "not a name": 3,
    "no name": None,
    "auto": "auto",
    "Recurrent": "Recurrent",
}
OF_COUNTS: dict[str, object] = {
    "0": 0,
    "-64": -64,
    "63": 63,
    "64.0": 64.0,
    "True": True,
    "None": None,
    "10**30": 64 * 10**30,
}

#: What no argument takes, whatever the rest of the call: such a call must be refused.
_NEVER = ("number", "text", "list", "a device", "sparse", "meta", "cpu", "complex64", "float8")
_NEVER_NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "beyond fp32",
    "beyond floats",
    "number as text",
    "number as tensor",
    "True",
    "complex",
)

#: Contents that are looked at on a CPU, and on request.
CONTENTS = ("starts at 1", "ends beyond", "decreasing", "beyond the pool")
#: Contents that are looked at on request alone.
COLLISIONS = ("twice",)


def faults_of(argument: str) -> tuple[str, ...]:
    """The ways that make sense for an argument."""
    if argument in TENSORS:  # what is only read may lie anywhere
        return tuple(fault for fault in OF_TENSORS if argument in BUFFERS or not fault.startswith("on "))
    if argument in FLAGS:
        return tuple(OF_FLAGS)
    special = {"impl": OF_NAMES, "checkpoint_every": OF_COUNTS}
    return tuple(special.get(argument, OF_NUMBERS)) if argument != "nope" else ("keyword",)


def apply(call: Call, argument: str, fault: str) -> object:
    """The argument's new value; the old one where the fault does not fit it."""
    value = call.get(argument)
    if argument == "nope":
        return 1
    if argument in TENSORS:
        if fault in ("number", "text", "a device", "None"):
            return OF_TENSORS[fault](call, torch.empty(0))
        return OF_TENSORS[fault](call, value) if isinstance(value, Tensor) and not value.is_meta else value
    known = {**OF_NUMBERS, **OF_FLAGS, **OF_NAMES, **OF_COUNTS}
    return known[fault]


def must_be_refused(argument: str, fault: str) -> bool:
    """Whether no call can have this."""
    if argument == "nope":
        return True
    if argument in TENSORS:
        never = fault in _NEVER or (fault == "None" and argument in ("q", "k", "v", "g", "beta", "state"))
        wrong_dtype = (fault == "int64" and argument in FLOATS) or (fault == "bool" and argument != "fresh")
        return never or wrong_dtype
    if argument in FLAGS:
        return True
    if argument == "impl":
        return fault != "auto"
    if argument == "checkpoint_every":
        return fault in ("0", "-64", "63", "64.0", "True")
    return fault in _NEVER_NUMBERS or (argument == "lower_bound" and fault == "positive")
