"""The decode suite of `python -m kda bench`: one token for each of N sequences, the states updated in a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from kda import api, dispatch
from kda.cli.bench import AGREEMENT, copy_bandwidth, difference, time_on_cpu, time_on_gpu
from kda.cli.peers import STEPS, installed
from kda.testing.cases import TOKENS, Case, arguments

#: Sequences and heads: bf16, K = V = 128, bounded gate of -5, fp32 states.
SHAPES = {
    "cuda": [(1, 32), (32, 32), (128, 32), (256, 32), (256, 96), (512, 96)],
    "cpu": [(1, 4), (4, 4)],
}


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as the replay of a CUDA graph, which is how a server decodes."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def floor_ms(call: dict[str, Any], pool: Tensor, bytes_per_second: float) -> float:
    """The time to read and write the states, and to move all else, once."""
    inputs = sum(call[name].numel() * call[name].element_size() for name in ("q", "k", "v", "v", "g", "beta"))
    return (2 * pool.numel() * pool.element_size() + inputs) / bytes_per_second * 1e3


def times(console: Console, names: list[str] | None, device: str) -> tuple[list[list[str]], bool]:
    """A heading and a row per shape and implementation. The second value: whether ours did as specified."""
    rows = [["N", "H", "implementation", "ms (quartiles)", "floor / time", "RMS difference"]]
    bandwidth = copy_bandwidth() if device == "cuda" else 0.0
    agreed = True
    with Progress(console=console) as progress:
        task = progress.add_task("decode", total=len(SHAPES[device]))
        for N, H in SHAPES[device]:
            case = Case(lengths=(1,) * N, packed=False, H=H, K=128, V=128)
            call = arguments(case, device, made_on=device)
            states = call.pop("initial_state")
            del call["output_final_state"]
            facts = api.step_facts(**call, state=states)
            explanation = dispatch.explain_facts(facts)
            wanted = names or explanation.auto
            chosen = [name for name in wanted if not explanation.reasons.get(name, ("not known",))]
            exact = api.step(**_first(call), state=states[:1].clone(), impl="recurrent")
            calls: dict[str, Callable[[], object]] = {}
            differences = {}
            for name in chosen:
                run = partial(api.step, **call, state=states.clone(), out=torch.empty_like(call["v"]), impl=name)
                differences[name] = difference(exact, run()[:1])
                agreed &= differences[name] < AGREEMENT
                calls[name] = _captured(run) if device == "cuda" else run
            if device == "cuda":
                for peer in installed():
                    peer_run = STEPS[peer](call, states.clone())
                    differences[peer] = difference(exact, peer_run().o.reshape(call["v"].shape)[:1])
                    calls[peer] = _captured(peer_run)
            timed = (time_on_gpu if device == "cuda" else time_on_cpu)(calls, 30 if device == "cuda" else 5)
            for name, timing in timed.items():
                floor = f"{floor_ms(call, states, bandwidth) / timing.median:.3f}" if bandwidth else ""
                rows.append([str(N), str(H), name, str(timing), floor, f"{differences[name]:.1e}"])
            del calls
            progress.advance(task)
    return rows, agreed


def _first(call: dict[str, Any]) -> dict[str, Any]:
    """The call's first row."""
    return {name: x[:1] if name in TOKENS else x for name, x in call.items()}
