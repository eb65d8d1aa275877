"""`chunk_kda` of flash-linear-attention on the kernels of this library, by fla's own dispatcher of backends.

    import kda.integrations.fla
    kda.integrations.fla.register()

fla is not changed: it asks a registered backend whether it takes a call, and runs its own kernels where the answer is
no. A yes is final, so the answer here is that of `kda.explain`. `FLA_KDA_KERNELS=0` in the environment turns it off.
Works with fla-core 0.5.2 and 0.6.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda import api

#: Arguments of `chunk_kda` that change how fla computes, not what: there is nothing to do about them here.
_IGNORED = ("disable_recompute", "cu_seqlens_cpu", "use_graph", "max_num_seqs")
#: In `chunk_kda`'s order.
_POSITIONAL = (
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
    *("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound"),
    *("disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu", "cp_context"),
)

#: Those that are taken care of; any other is a reason to decline.
_KNOWN = {*_POSITIONAL, *_IGNORED, "A_log", "dt_bias", "chunk_size", "transpose_state_layout"}


class _Declined(Exception):
    """The call is for fla's own kernels; the text says why."""


def _translated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The call as one of `kda.fwd`, and whether states are V-first. Raises `_Declined`."""
    if len(args) > len(_POSITIONAL):
        raise _Declined(f"more than {len(_POSITIONAL)} positional arguments")
    given = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    if unknown := sorted(set(given) - _KNOWN):
        raise _Declined(f"unknown arguments: {', '.join(unknown)}")
    if given.get("cp_context") is not None:
        raise _Declined("context parallelism")
    if given.get("return_intermediate_states"):
        raise _Declined("intermediate states are not returned")
    if given.get("chunk_size", 64) not in (32, 64):
        raise _Declined("a chunk_size that fla itself refuses")
    tensors = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    if torch.is_grad_enabled():
        graded = [x for x in tensors if isinstance(given.get(x), Tensor) and given[x].requires_grad]
        if graded:
            raise _Declined(f"{', '.join(graded)} requires grad")
    v_first = bool(given.get("state_v_first") or given.get("transpose_state_layout"))
    state = given.get("initial_state")
    if state is not None and state.dtype != torch.float32:
        raise _Declined(f"initial_state is {state.dtype}; fla keeps states in float32")

    in_kernel = bool(given.get("use_gate_in_kernel"))
    if in_kernel and given.get("A_log") is None and given.get("lower_bound") is None:
        raise _Declined("use_gate_in_kernel without A_log and lower_bound, which fla itself refuses")
    bound = given.get("lower_bound")
    if in_kernel and given.get("safe_gate") and (bound is None or not -5 <= bound < 0):
        raise _Declined("safe_gate with a lower_bound that fla itself refuses")
    call = {name: given[name] for name in ("q", "k", "v", "g", "beta")}
    call |= {
        "scale": given.get("scale"),
        "A_log": given.get("A_log") if in_kernel else None,
        "dt_bias": given.get("dt_bias") if in_kernel else None,
        "lower_bound": bound if in_kernel else None,
        "initial_state": state if state is None or v_first else state.mT,
        "cu_seqlens": given.get("cu_seqlens"),
        "output_final_state": bool(given.get("output_final_state")),
        "use_qk_l2norm": bool(given.get("use_qk_l2norm_in_kernel")),
        "use_beta_sigmoid": bool(given.get("use_beta_sigmoid_in_kernel")),
        "allow_neg_eigval": bool(given.get("allow_neg_eigval")),
        "batch_invariant": False,
        "impl": "auto",
    }
    return call, v_first


def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """fla's question about a call of `chunk_kda`: whether it runs here, and if not, why."""
    try:
        call, _ = _translated(args, kwargs)
        if api.planned(call):
            return True, None
        explanation = api.explain(**call)
    except (_Declined, KeyError, TypeError, ValueError) as error:
        return False, f"kda: {error}"
    if explanation.chosen is None:
        return False, "kda: " + " ".join(reason for listed in explanation.reasons.values() for reason in listed)
    return True, None


def chunk_kda(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`fla.ops.kda.chunk_kda` by `kda.fwd`: o and, where it is asked for, the final state in the caller's layout."""
    call, v_first = _translated(args, kwargs)
    o, state = api.fwd(**call)
    return o, state if state is None or v_first else state.mT.contiguous()


def register() -> None:
    """Register with fla. Doing it again changes nothing.

    Raises:
        ImportError: flash-linear-attention is not installed, or has no dispatcher for `chunk_kda` (before 0.5).
    """
    try:  # 0.5
        from fla.ops.kda.backends import kda_registry
    except ImportError:  # 0.6
        from fla.backends import BaseBackend
        from fla.backends import register as register_with
        from fla.ops.kda import chunk_kda as entry_point

        register_with(entry_point)(_backend(BaseBackend))
    else:
        from fla.ops.backends import BaseBackend

        kda_registry.register(_backend(BaseBackend)())


def _backend(base: type) -> type:
    """The backend as a class of the installed fla's."""

    def asked(self: object, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        return verify(*args, **kwargs)

    def run(self: object, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_kda(*args, **kwargs)

    return type(
        "KdaKernelsBackend",
        (base,),
        {
            "__doc__": "The kernels of kda-kernels for `chunk_kda`.",
            "backend_type": "kda_kernels",
            "package_name": None,
            "env_var": "FLA_KDA_KERNELS",
            "priority": 2,  # before FlashKDA's 3
            "chunk_kda_verifier": asked,
            "chunk_kda": run,
        },
    )
