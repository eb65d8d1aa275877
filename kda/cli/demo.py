"""`python -m kda demo`: the main job on real input, judged.

Source files of the standard library of the running Python, as bytes, are packed into one ragged batch, embedded, and
taken through the input side of a KDA layer. Then every implementation that runs here prefills all but the last tokens
of each document, continues token by token from the final states, and is compared with its own one-shot result and with
the specification in fp64.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Generator, Tensor
from torch.nn.functional import pad, silu

from kda import dispatch
from kda.api import explain, fwd, gather
from kda.numerics import Rounding
from kda.problem import Facts, Output
from kda.ref.error import SIGMAS, Deviation, Expected, deviation, expect
from kda.testing.cases import in_fp64

#: Files of the standard library, from empty to a few thousand bytes, the same in every Python that has them.
DOCUMENTS = (
    "bisect.py",
    "urllib/__init__.py",
    "this.py",
    "concurrent/__init__.py",
    "keyword.py",
    "contextvars.py",
    "antigravity.py",
)

#: Tokens of the call that comes before the timed one, and the seconds from which on a call is timed once.
WARM_UP, LONG = 100, 0.5

#: Most tokens of the whole batch. The oracle walks them one by one with K x K covariances: most of the demo's time.
MAX_TOKENS = 8_000

#: Tokens of each document that are not prefilled but decoded; at most half of it.
HELD_BACK = 32

SHORT_CONVOLUTION = 4  # tokens, the current one included
LOWER_BOUND = -5.0


class Document(NamedTuple):
    name: str
    text: bytes


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layer. The defaults are two of the heads of Kimi-Linear-48B: channels that every kernel takes."""

    d_model: int = 256
    H: int = 2
    K: int = 128
    V: int = 128
    rank: int = 128  # of the gate's projection
    seed: int = 0


@dataclass(frozen=True)
class Layer:
    """Weights of the input side of a KDA layer, fp32. Projections are [in, out]."""

    sizes: Sizes
    embedding: Tensor  # [256, d_model], one row per byte
    q: Tensor  # [d_model, H * K]
    k: Tensor  # [d_model, H * K]
    v: Tensor  # [d_model, H * V]
    q_taps: Tensor  # [H * K, SHORT_CONVOLUTION]
    k_taps: Tensor  # [H * K, SHORT_CONVOLUTION]
    v_taps: Tensor  # [H * V, SHORT_CONVOLUTION]
    gate_down: Tensor  # [d_model, rank]
    gate_up: Tensor  # [rank, H * K]
    beta: Tensor  # [d_model, H]
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, K]


@dataclass(frozen=True)
class Row:
    """What one implementation came to. Without `one_shot` it did not run, and `status` says why."""

    name: str
    status: str
    one_shot: Deviation | None = None
    continued: Deviation | None = None
    #: Largest absolute difference between the two results, of o and of the final states.
    difference: tuple[float, float] = (0.0, 0.0)
    tokens_per_second: float = 0.0

    @property
    def accepted(self) -> bool:
        return all(d is not None and d.accepted for d in (self.one_shot, self.continued))


def documents(names: Sequence[str] = DOCUMENTS, max_tokens: int = MAX_TOKENS) -> list[Document]:
    """Those of the standard library's files that this Python has, as long as they fit into `max_tokens` in all."""
    found: list[Document] = []
    left = max_tokens
    for name in names:
        path = Path(sysconfig.get_paths()["stdlib"], name)
        if path.is_file() and path.stat().st_size <= left:
            found.append(Document(name, path.read_bytes()))
            left -= len(found[-1].text)
    return found


def make_layer(sizes: Sizes, device: torch.device) -> Layer:
    """Seeded weights, drawn on the CPU so that they are the same on every device."""
    noise = Generator().manual_seed(sizes.seed)

    def weight(fan_in: int, fan_out: int) -> Tensor:
        return (torch.randn(fan_in, fan_out, generator=noise) * fan_in**-0.5).to(device)

    def taps(channels: int) -> Tensor:
        return (torch.randn(channels, SHORT_CONVOLUTION, generator=noise) * SHORT_CONVOLUTION**-0.5).to(device)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(*shape, generator=noise)).to(device)

    d, H, K, V = sizes.d_model, sizes.H, sizes.K, sizes.V
    return Layer(
        sizes=sizes,
        embedding=torch.randn(256, d, generator=noise).to(device),
        q=weight(d, H * K),
        k=weight(d, H * K),
        v=weight(d, H * V),
        q_taps=taps(H * K),
        k_taps=taps(H * K),
        v_taps=taps(H * V),
        gate_down=weight(d, sizes.rank),
        gate_up=weight(sizes.rank, H * K),
        beta=weight(d, H),
        A_log=uniform(0, 1, H),
        # Spread so that channels remember from about a token to thousands: a lost state then shows in every output.
        dt_bias=uniform(-6, 1, H, K),
    )


def short_convolution(x: Tensor, taps: Tensor, position: Tensor) -> Tensor:
    """Causal depthwise convolution of packed documents, then SiLU. Every document starts from zeros.

    x: [T, D]; taps: [D, W], the last column for the token itself; position: [T], of each token in its document.
    Returns [T, D].
    """
    width = taps.shape[1]
    result = torch.zeros_like(x)
    for back in range(width):
        earlier = pad(x, (0, 0, back, 0))[: x.shape[0]]
        # Selected, not multiplied by 0: nothing of the document before may pass, NaN included.
        result = result + taps[:, width - 1 - back] * torch.where((position >= back)[:, None], earlier, 0.0)
    return silu(result)


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[N + 1] cumulative lengths: cu_seqlens."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def layer_call(layer: Layer, texts: Sequence[bytes]) -> dict[str, Any]:
    """The keyword arguments of `kda.fwd` for the packed texts: q, k [1, T, H, K], v [1, T, H, V] and so on, in bf16.

    The layer's input side as in Kimi Linear (arXiv:2510.26692): short convolution and SiLU on q, k and v; a low-rank
    projection for the gate; one beta logit per head. The gate is the bounded one.
    """
    sizes, device = layer.sizes, layer.embedding.device
    H, K, V = sizes.H, sizes.K, sizes.V
    tokens = torch.tensor(list(b"".join(texts)), dtype=torch.long, device=device)
    position = torch.tensor([t for text in texts for t in range(len(text))], dtype=torch.long, device=device)
    x = layer.embedding[tokens]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    q = short_convolution(x @ layer.q, layer.q_taps, position)
    k = short_convolution(x @ layer.k, layer.k_taps, position)
    v = short_convolution(x @ layer.v, layer.v_taps, position)
    g = x @ layer.gate_down @ layer.gate_up
    tensors = {
        "q": q.unflatten(-1, (H, K)),
        "k": k.unflatten(-1, (H, K)),
        "v": v.unflatten(-1, (H, V)),
        "g": g.unflatten(-1, (H, K)),
        "beta": x @ layer.beta,
    }
    return {name: t.bfloat16()[None] for name, t in tensors.items()} | {
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "lower_bound": LOWER_BOUND,
        "cu_seqlens": offsets([len(text) for text in texts], device),
        "output_final_state": True,
    }


def select(call: dict[str, Any], rows: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """The call on some of its tokens: `rows` of the packed axis, cut into sequences of `lengths`."""
    device = call["q"].device
    index = torch.tensor(rows, dtype=torch.long, device=device)
    chosen = {name: call[name].index_select(1, index) for name in ("q", "k", "v", "g", "beta")}
    return call | chosen | {"cu_seqlens": offsets(lengths, device)}


def prefill_and_decode(call: dict[str, Any], lengths: Sequence[int], held_back: int, name: str, impl: str) -> Output:
    """The result of the whole call in pieces: prefill without the last `held_back` tokens, then token by token.

    Half of a short document is prefilled in any case. It then ends before the others, and takes part in the later steps
    as an empty sequence, which keeps its state. The layer's input side is causal, so the inputs of a decoded token are
    its rows of the call. impl: of the prefill, may be "auto"; the steps name what auto chose, so that no other
    implementation takes over.
    """
    held = [min(held_back, length // 2) for length in lengths]
    ends = list(accumulate(lengths))
    prefixes = [length - h for length, h in zip(lengths, held, strict=True)]
    rows = [row for end, length, h in zip(ends, lengths, held, strict=True) for row in range(end - length, end - h)]
    o = torch.full_like(call["v"], torch.nan)  # a token that no piece wrote must not pass for a result
    written, state = fwd(**select(call, rows, prefixes), impl=impl)
    o[:, rows] = written
    for step in range(max(held, default=0)):
        going = [int(h > step) for h in held]
        rows = [end - h + step for end, h in zip(ends, held, strict=True) if h > step]
        written, state = fwd(**select(call, rows, going), initial_state=state, impl=name)
        o[:, rows] = written
    return Output(o, state)


def timed(call: dict[str, Any], impl: str) -> tuple[Output, float]:
    """The one-shot result and its seconds, of the better of two calls if the first, which may compile, was short."""

    def run() -> tuple[Output, float]:
        start = time.perf_counter()
        result = fwd(**call, impl=impl)
        if call["q"].is_cuda:
            torch.cuda.synchronize(call["q"].device)
        return result, time.perf_counter() - start

    T = call["q"].shape[1]
    fwd(**select(call, range(min(T, WARM_UP)), [min(T, WARM_UP)]), impl=impl)  # compiles, and loads libraries
    first = run()
    return min(first, run(), key=lambda pair: pair[1]) if first[1] < LONG else first


def choice(name: str, facts: Facts, explanation: dispatch.Explanation) -> tuple[bool, str]:
    """Whether the demo runs `name`, and one sentence: chosen by auto, or why not."""
    reasons = explanation.reasons[name]
    if reasons:
        more = f" ({len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return False, f"cannot: {reasons[0].rstrip('.')}{more}"
    if name in dispatch.AUTO["cuda"] and facts.device != "cuda":
        return False, "interpreted here; too slow for the demo"
    if name == explanation.chosen:
        return True, "chosen by auto"
    if name in explanation.auto:
        return True, "could run; a faster one is chosen"
    return True, "runs only by name"


def _largest(x: Tensor, y: Tensor) -> float:
    """Largest absolute difference."""
    return float((x.double() - y.double()).abs().max()) if x.numel() else 0.0


def _on_cpu(result: Output) -> tuple[Tensor, Tensor]:
    """o and the final states, which every call of the demo asks for."""
    if result.final_state is None:
        raise RuntimeError("no final state came back from a call with output_final_state=True")
    return result.o.cpu(), result.final_state.cpu()


def _measure(
    name: str,
    status: str,
    impl: str,
    call: dict[str, Any],
    lengths: Sequence[int],
    held_back: int,
    expected: Expected,
) -> Row:
    """Run one implementation in one shot and in pieces, and judge both."""
    result, seconds = timed(call, impl)
    o, state = _on_cpu(result)
    o_pieces, state_pieces = _on_cpu(prefill_and_decode(call, lengths, held_back, name, impl))
    return Row(
        name,
        status,
        one_shot=deviation(Output(o, state), expected),
        continued=deviation(Output(o_pieces, state_pieces), expected),
        difference=(_largest(o, o_pieces), _largest(state, state_pieces)),
        tokens_per_second=sum(lengths) / seconds,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on one CPU thread.

    The matrices of one token are too small to gain from more, and where something else uses the cores, threads that
    wait for each other at every operation make the walks token by token many times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def compare(console: Console, call: dict[str, Any], lengths: Sequence[int], held_back: int) -> list[Row]:
    """Every implementation on the call, in the table's order, with a status line while they and the oracle run."""
    facts = gather(**call)[0].facts
    explanation = explain(**call)
    expected: dict[Rounding, Expected] = {}  # implementations that round alike share one walk of the oracle
    rows = []
    for name in dispatch.TABLE:
        runs, why = choice(name, facts, explanation)
        if not runs:
            rows.append(Row(name, why))
            continue
        rounding = dispatch.implementation(name).rounding(facts)
        if rounding not in expected:
            doing = f"the specification in fp64 with the roundings of {name}, {facts.T:,} tokens one by one"
            with console.status(doing):
                expected[rounding] = expect(gather(**in_fp64(call))[0], rounding)
        impl = "auto" if name == explanation.chosen else name
        with console.status(f"{name}: one shot, then prefill and {held_back} steps"):
            rows.append(_measure(name, why, impl, call, lengths, held_back, expected[rounding]))
    return rows


def tabulate(rows: Sequence[Row]) -> Table:
    """One row per implementation: worst sigma of the one-shot and the continued result, RMS error of the one-shot one.

    The figures of o stand above those of the final states.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("implementation", no_wrap=True)
    table.add_column("auto")
    table.add_column("of", no_wrap=True)
    for heading in ("sigma\none shot", "sigma\ncontinued", "RMS\nerror", "\ntokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.one_shot is None or row.continued is None:
            table.add_row(row.name, escape(row.status), style="dim")
            continue
        table.add_row(
            row.name,
            escape(row.status),
            "o\nstate",
            f"{row.one_shot.sigma_o:.2f}\n{row.one_shot.sigma_state:.2f}",
            f"{row.continued.sigma_o:.2f}\n{row.continued.sigma_state:.2f}",
            f"{row.one_shot.rms_o:.1e}\n{row.one_shot.rms_state:.1e}",
            f"{row.tokens_per_second:,.0f}",
            style=None if row.accepted else "red",
        )
    return table


def verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether everything that ran agrees, and the sentence that says so."""
    ran = [row for row in rows if row.one_shot is not None]
    wrong = [row.name for row in ran if not row.accepted]
    if not ran:
        return False, "No implementation ran."
    if wrong:
        return False, (
            f"The continuation or the one-shot outputs of {', '.join(wrong)} left the tolerance of {SIGMAS:g} standard "
            "deviations around the specification, so they do not agree."
        )
    o, state = (max(row.difference[i] for row in ran) for i in range(2))
    return True, (
        f"The continuation equals the one-shot outputs for {' and '.join(row.name for row in ran)}: both are within "
        f"{SIGMAS:g} standard deviations of rounding error of the specification (between the two, o differs by "
        f"{o:.1e} at most and a state by {state:.1e})."
    )


def demonstrate(
    console: Console, texts: Sequence[Document], sizes: Sizes, held_back: int, device: torch.device
) -> bool:
    """The demo on given documents, sizes and device. Returns whether everything that ran agrees."""
    lengths = [len(document.text) for document in texts]
    listed = ", ".join(f"{document.name} {length:,}" for document, length in zip(texts, lengths, strict=True))
    console.print(f"{sum(lengths):,} bytes of the standard library in one packed batch: {listed}", highlight=False)
    where = "the GPU" if device.type == "cuda" else "one CPU thread"
    console.print(
        f"A KDA layer of {sizes.H} heads with K = {sizes.K}, V = {sizes.V}, bf16, gate bounded by {LOWER_BOUND:g}, on "
        f"{where}. The last {held_back} tokens of each document, at most half of it, are held back and decoded "
        "one by one.",
        highlight=False,
    )
    call = layer_call(make_layer(sizes, device), [document.text for document in texts])
    rows = compare(console, call, lengths, held_back)
    console.print(tabulate(rows))
    agreed, sentence = verdict(rows)
    console.print(sentence, style="green" if agreed else "red", highlight=False)
    return agreed


def run(console: Console) -> bool:
    """`python -m kda demo`. Returns whether the continuation equals the one-shot outputs wherever it ran."""
    texts = documents()
    if not texts:
        console.print("[red]this Python's standard library has no source files to read")
        return False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return demonstrate(console, texts, Sizes(), HELD_BACK, device)
