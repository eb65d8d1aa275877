"""Other libraries as implementations of the same call, for the benchmark. Imported only when installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kda.problem import Output


def _fla_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """What both of fla's functions are given: gate, normalisation and sigmoid in their kernels, states V-first."""
    names = ("q", "k", "v", "g", "beta", "A_log", "lower_bound")
    return {name: call[name] for name in names} | {
        "dt_bias": None if call["dt_bias"] is None else call["dt_bias"].flatten(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }


def _fla(call: dict[str, Any]) -> Callable[[], Output]:
    """`chunk_kda` of flash-linear-attention (fla-core), by its own kernels: it would hand the call to others."""
    import torch

    os.environ["FLA_FLASH_KDA"] = os.environ["FLA_KDA_KERNELS"] = "0"  # read once, at its first call
    from fla.ops.kda import chunk_kda

    offsets = call.get("cu_seqlens")
    arguments = _fla_arguments(call) | {
        "safe_gate": True,
        "initial_state": call["initial_state"],
        "cu_seqlens": None if offsets is None else offsets.long(),
    }

    def run() -> Output:
        with torch.inference_mode():
            return Output(*chunk_kda(**arguments))

    return run


def _fla_step(call: dict[str, Any], states: Tensor) -> Callable[[], Output]:
    """`fused_recurrent_kda` of flash-linear-attention, which returns new states."""
    import torch
    from fla.ops.kda import fused_recurrent_kda

    arguments = _fla_arguments(call) | {"initial_state": states}

    def run() -> Output:
        with torch.inference_mode():
            return Output(*fused_recurrent_kda(**arguments))

    return run


def _flash_kda(call: dict[str, Any]) -> Callable[[], Output]:
    """FlashKDA's `fwd`: everything by position, results into buffers, 64-bit offsets, no parameter left out."""
    import torch
    from flash_kda import fwd

    offsets, scale = call.get("cu_seqlens"), call["q"].shape[-1] ** -0.5
    offsets = None if offsets is None else offsets.long()
    H, K = call["g"].shape[-2:]
    zeros = {"A_log": (H,), "dt_bias": (H, K)}
    A_log, dt_bias = (
        torch.zeros(shape, device=call["q"].device) if call[name] is None else call[name]
        for name, shape in zeros.items()
    )
    gate = (A_log, dt_bias, call["lower_bound"])
    tokens = [call[name] for name in ("q", "k", "v", "g", "beta")]

    def run() -> Output:
        out, final = torch.empty_like(call["v"]), torch.empty_like(call["initial_state"])
        with torch.inference_mode():
            fwd(*tokens, scale, out, *gate, call["initial_state"], final, offsets)
        return Output(out, final)

    return run


#: name -> its decode step, from a call of `kda.step` and the states.
STEPS: dict[str, Callable[[dict[str, Any], Tensor], Callable[[], Output]]] = {"fla": _fla_step}

#: name -> (module to look for, distribution, how to make a call of it).
PEERS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Callable[[], Output]]]] = {
    "fla": ("fla", "fla-core", _fla),
    "flash_kda": ("flash_kda", "flash_kda", _flash_kda),
}


def installed() -> list[str]:
    """The peers that can be imported here."""
    return [name for name, (module, _, _) in PEERS.items() if importlib.util.find_spec(module) is not None]


def versions() -> str:
    """The installed peers' versions, for people."""
    found = []
    for name in installed():
        distribution = PEERS[name][1]
        try:
            found.append(f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:  # a checkout on the path
            found.append(f"{distribution}, of no release")
    return ", ".join(found)
