"""Run by test_fla.py in a process of its own: a caller of flash-linear-attention, with this library plugged in.

Prints one JSON object: what was compared, and by how much it differed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def forgive_unknown_keys() -> None:
    """fla-core 0.5 names autotuning keys that are no arguments, which newer versions of Triton refuse at the import."""
    import triton

    original = triton.autotune

    def autotune(configs: Any, key: list[str], **rest: Any) -> Any:
        return lambda fn: original(configs, [name for name in key if name in fn.arg_names], **rest)(fn)

    triton.autotune = autotune


def against_own_kernels(ours: list[int]) -> dict[str, float]:
    """How far fla's own kernels, forced by the variable of ours, are from us: o and final states in bf16."""
    from fla.ops.kda import chunk_kda

    noise = torch.Generator("cuda").manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=noise, device="cuda")  # noqa: E731
    T, H, K = 300, 2, 128
    call: dict[str, Any] = {name: make(1, T, H, K).bfloat16() for name in ("q", "k", "v", "g")}
    call |= {"beta": make(1, T, H).bfloat16(), "A_log": make(H), "dt_bias": make(H * K)}
    call |= {"initial_state": 0.1 * make(2, H, K, K), "output_final_state": True}
    call |= {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    call["cu_seqlens"] = torch.tensor([0, 100, T], device="cuda")
    found = {}
    with torch.no_grad():
        for kind, gate in (("bounded", {"lower_bound": -5.0, "safe_gate": True}), ("softplus", {})):
            before = len(ours)
            o, state = chunk_kda(**call, **gate)
            assert len(ours) == before + 1, "fla's own kernels ran"
            os.environ["FLA_KDA_KERNELS"] = "0"
            own, own_state = chunk_kda(**call, **gate)
            del os.environ["FLA_KDA_KERNELS"]
            assert len(ours) == before + 1, "ours ran"
            found[kind] = max(relative(own, o), relative(own_state, state))
    return found


def main() -> None:
    forgive_unknown_keys()
    import fla.ops.kda
    from fla.ops.kda.naive import naive_recurrent_kda

    import kda.integrations.fla as plug
    from kda import api

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours: list[int] = []
    original = api.fwd

    def counted(*args: Any, **kwargs: Any) -> Any:
        ours.append(1)
        return original(*args, **kwargs)

    api.fwd = counted
    plug.register()
    plug.register()  # once more changes nothing

    noise = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=noise).to(device)  # noqa: E731
    N, T, H, HV, K, V = 2, 37, 2, 4, 32, 48
    q, k, g = make(N, T, H, K), make(N, T, H, K), make(N, T, HV, K)
    v, beta = make(N, T, HV, V), make(N, T, HV)
    A_log, dt_bias, state = make(HV), make(HV * K), 0.1 * make(N, HV, K, V)
    kernel = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    gates = {
        "bounded": {"lower_bound": -5.0, "safe_gate": True, "A_log": A_log, "dt_bias": dt_bias},
        "softplus": {"A_log": A_log, "dt_bias": dt_bias},
    }

    def exact(kind: str, state: Tensor) -> tuple[Tensor, Tensor]:
        """By fla's own recurrence in PyTorch, all prepared by hand."""
        x = g + dt_bias.view(HV, K)
        rate = A_log.exp()[:, None]
        decay = -5.0 * torch.sigmoid(rate * x) if kind == "bounded" else -rate * torch.nn.functional.softplus(x)
        unit = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
        return naive_recurrent_kda(unit(q), unit(k), v, decay, beta.sigmoid(), None, state, True)

    result: dict[str, Any] = {"version": getattr(fla, "__version__", ""), "device": device, "differences": {}}
    with torch.no_grad():
        for kind, gate in gates.items():
            o, final = exact(kind, state)
            call = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "output_final_state": True, **kernel, **gate}
            for first, layout in (("K", lambda x: x), ("V", lambda x: x.mT.contiguous())):
                before = len(ours)
                got, got_state = fla.ops.kda.chunk_kda(**call, initial_state=layout(state), state_v_first=first == "V")
                assert len(ours) == before + 1, "fla's own kernels ran"
                name = f"{kind}, {first}-first"
                result["differences"][name] = max(relative(got, o), relative(got_state, layout(final)))
            flat = {name: x.flatten(0, 1)[None] for name, x in call.items() if name in ("q", "k", "v", "g", "beta")}
            offsets = torch.tensor([0, T, 2 * T], device=device)
            packed, last = fla.ops.kda.chunk_kda(**{**call, **flat}, initial_state=state, cu_seqlens=offsets)
            result["differences"][f"{kind}, packed"] = max(relative(packed[0], o.flatten(0, 1)), relative(last, final))
        positional, nothing = fla.ops.kda.chunk_kda(q, k, v, -g.abs(), beta.sigmoid(), 0.5)
        assert nothing is None
        given, _ = naive_recurrent_kda(q, k, v, -g.abs(), beta.sigmoid(), 0.5)
        result["differences"]["given, positional"] = relative(positional, given)
    result["ran"] = len(ours)
    result["own kernels"] = against_own_kernels(ours) if device == "cuda" else {}

    call = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **kernel, **gates["bounded"]}
    wrong = {
        "requires grad": {"q": q.clone().requires_grad_()},
        "context parallelism": {"cp_context": object()},
        "intermediate states": {"return_intermediate_states": True},
        "unknown arguments: head_first": {"head_first": True},
        "chunk_size": {"chunk_size": 16},
        "float32": {"initial_state": state.bfloat16()},
        "lower_bound": {"lower_bound": -6.0},
        "without A_log": {"A_log": None, "lower_bound": None, "safe_gate": False},
        "k: expected": {"k": k[:, :5]},
    }
    result["declined"] = {}
    for reason, change in wrong.items():
        accepted, said = plug.verify(**{**call, **change})
        result["declined"][reason] = not accepted and reason in (said or "")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
