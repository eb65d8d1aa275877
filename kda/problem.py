"""One call, as values: its tensors (`Problem`), its facts (`Facts`), and what can run it (`Implementation`).

Facts decide everything, tensor contents decide nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.numerics import Rounding


class Output(NamedTuple):
    """Result of a forward call.

    o:           [B, T, HV, V], q's dtype.
    final_state: [N, HV, V, K], or None when neither a buffer was given nor `output_final_state=True`.
    """

    o: Tensor
    final_state: Tensor | None


#: Bytes of a vector, to which tensor maps and vectorised loads want rows aligned.
VECTOR = 16


#: The tensors of a call, in `kda.fwd`'s order.
TENSORS = (
    *("q", "k", "v", "g", "beta", "out", "A_log", "dt_bias"),
    *("initial_state", "final_state", "cu_seqlens"),
    *("state_pool", "state_indices", "write_indices", "fresh", "checkpoints", "checkpoint_indices"),
)


class Mark(Tensor):
    """A type of its own, so that no argument has it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def mark(size: int) -> Tensor:
    """A tensor of that type, a real one also where the import is traced with fake ones."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(size, device="cpu").as_subclass(Mark)


#: The tensors of a step, in `kda.step`'s order.
STEP_TENSORS = (
    *("q", "k", "v", "g", "beta", "state", "out", "A_log", "dt_bias"),
    *("state_indices", "write_indices", "token_indices", "fresh"),
)

#: Stand for the tensors that a call has not, where calls are compared and addresses taken: theirs is 0.
ABSENT: tuple[Tensor, ...] = tuple(mark(0) for _ in range(max(len(TENSORS), len(STEP_TENSORS))))


def aligned(x: Tensor, unit: int = VECTOR) -> bool:
    """Whether the last dimension is contiguous and every row of it starts at a multiple of `unit` bytes.

    A dimension that is expanded (stride 0) is not: a tensor map has no such stride.
    """
    size = x.element_size()
    rows = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    return (
        (x.stride(-1) == 1 or x.shape[-1] == 1)
        and x.data_ptr() % unit == 0
        and all(stride > 0 and stride * size % unit == 0 for stride, n in rows if n > 1)
    )


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What PyTorch computes in, and keeps states in unless told otherwise, for inputs of a dtype: fp64 or fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class GateKind(enum.Enum):
    """Which activation turns the raw gate into a log decay; told by which arguments are given, never by a flag."""

    BOUNDED = "bounded"  # lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
    SOFTPLUS = "softplus"  # -exp(A_log) * softplus(g + dt_bias)
    GIVEN = "given"  # g


def gate_kind(lower_bound: float | None, A_log: object | None) -> GateKind:
    """Which gate the arguments ask for: a bound makes it bounded, else A_log makes it softplus, else g is the decay."""
    if lower_bound is not None:
        return GateKind.BOUNDED
    return GateKind.GIVEN if A_log is None else GateKind.SOFTPLUS


class Span(NamedTuple):
    """Tokens `start:stop` of batch row `row`: one sequence."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """How the [batch, tokens] grid is cut into sequences.

    Without `cu_seqlens` each batch row is a sequence. With it the batch is 1 and sequence n is
    `cu_seqlens[n]:cu_seqlens[n + 1]`; rows from `cu_seqlens[-1]` on belong to no sequence.
    """

    batch: int
    tokens: int
    cu_seqlens: Tensor | None

    @property
    def sequences(self) -> int:
        return self.batch if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def spans(self) -> list[Span]:
        """The sequences, clamped to the tensors' bounds. Reads `cu_seqlens` (a synchronisation on a GPU)."""
        if self.cu_seqlens is None:
            return [Span(row, 0, self.tokens) for row in range(self.batch)]
        offsets = [min(max(int(x), 0), self.tokens) for x in self.cu_seqlens.tolist()]
        return [Span(0, a, max(a, b)) for a, b in pairwise(offsets)]


@dataclass(frozen=True)
class Facts:
    """Everything about a call that may decide which implementation runs it. Hashable, printable, no tensors."""

    device: str  # torch device type
    capability: tuple[int, int] | None  # compute capability of a CUDA device
    rocm: bool
    triton_interpreter: bool  # TRITON_INTERPRET=1: Triton kernels run on CPU tensors
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    varlen: bool
    dtype: torch.dtype  # of q, k, v and o
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    A_log_dtype: torch.dtype | None
    dt_bias_dtype: torch.dtype | None
    state_dtype: torch.dtype  # of initial_state and final_state, or the pool; what would be used if none is there
    gate: GateKind
    lower_bound: float | None
    initial_state: bool
    final_state: bool
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    batch_invariant: bool
    #: Names of the tensors, buffers included, that a kernel cannot address by rows of whole vectors (`aligned`).
    unaligned: tuple[str, ...]
    #: Names of the arguments that require grad, where grad mode is on.
    requires_grad: tuple[str, ...]
    #: Whether states are slots of a pool; then there is neither an initial nor a final one.
    pool: bool = False
    #: Of the states on the way that are kept, if any are.
    checkpoint_dtype: torch.dtype | None = None
    #: Which of the library's calls: "fwd", or "step", where B = N rows of T tokens each have a state in a pool.
    operation: str = "fwd"


def buffers(
    facts: Facts, device: torch.device, out: Tensor | None, final: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`out` and `final`, new where they are not given; the second is None where no final state is asked for."""
    if out is None:
        out = torch.empty(facts.B, facts.T, facts.HV, facts.V, dtype=facts.dtype, device=device)
    if final is None and facts.final_state:
        final = torch.empty(facts.N, facts.HV, facts.V, facts.K, dtype=facts.state_dtype, device=device)
    return out, final


def new_output(v: Tensor) -> Tensor:
    """Room for o: like v, but contiguous whatever v's strides are."""
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_OUT, _FINAL = TENSORS.index("out"), TENSORS.index("final_state")


def with_buffers(facts: Facts, tensors: list[Tensor]) -> tuple[list[Tensor], Output]:
    """The tensors of a repeated call, in the order of TENSORS, with buffers that are not there made, and the result."""
    out, final = tensors[_OUT], tensors[_FINAL]
    made = final if facts.final_state else None
    if out is ABSENT[_OUT] or made is ABSENT[_FINAL]:
        given = (None if type(x) is Mark else x for x in (out, final))
        out, made = buffers(facts, tensors[0].device, *given)
        tensors = [*tensors]
        tensors[_OUT] = out
        if made is not None:
            tensors[_FINAL] = made
    return tensors, Output(out, made)


@dataclass(frozen=True, eq=False)
class Problem:
    """A validated call. Shapes as in `kda.fwd`; A_log is [HV] and dt_bias [HV, K] here."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    out: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    final_state: Tensor | None
    layout: Layout
    facts: Facts
    state_pool: Tensor | None = None
    state_indices: Tensor | None = None
    write_indices: Tensor | None = None
    fresh: Tensor | None = None
    checkpoints: Tensor | None = None
    checkpoint_indices: Tensor | None = None
    checkpoint_every: int = 0  # tokens
    #: What implementations keep, under their own names, for calls that differ from this one in addresses alone.
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the PyTorch implementations compute in: fp64 for fp64 inputs, else fp32."""
        return computed_in(self.facts.dtype)

    def group(self) -> int:
        """Value heads that share one query/key head."""
        return self.facts.HV // max(self.facts.H, 1)

    def buffers(self, new: tuple[str, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """What a kernel writes o and the final state to: the caller's buffers, or new ones for the names in `new`.

        The second is None where no final state is asked for.
        """
        out = None if "out" in new else self.out
        final = None if "final_state" in new else self.final_state
        return buffers(self.facts, self.q.device, out, final)


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A validated call of `kda.step`. Shapes as there; A_log is [HV] and dt_bias [HV, K] here."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    scale: float
    out: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state_indices: Tensor | None
    write_indices: Tensor | None
    token_indices: Tensor | None
    fresh: Tensor | None
    facts: Facts
    #: As a problem's.
    memo: dict[str, Any] = field(default_factory=dict)


class Missing(RuntimeError):
    """What an implementation needs is not on this machine. The message is a sentence: what, and how to get it."""


def _available() -> str | None:
    return None


#: Whether no buffer of a call lies on another tensor, and rows are aligned.
Apart = Callable[[list[Tensor]], bool]


@dataclass(frozen=True)
class Implementation:
    """What a folder exports as IMPL.

    reasons:      pure function of the facts: every sentence why this call cannot run here; empty if it can.
    rounding:     pure function of the facts: where it rounds, from which the tests derive their tolerance.
    unavailable:  None, or one sentence: what is missing on this machine and how to get it.
    build:        None where there is nothing to build. Else `build(force=False, verbose=False)` makes it available and
                  returns where it is. Raises `Missing` if it cannot begin here, RuntimeError if the build failed.
    notes:        what it would do that a caller may want to know, such as a copy of a strided input.
    again:        `fwd` for a repeated call, where only addresses and contents are new: from the facts and memo, and
                  the tensors in the order of TENSORS, `ABSENT` for what is not there. It has to look for buffers that
                  lie on other tensors and for rows that are not aligned, or ask the last argument about the tensors,
                  which is true where neither is so. None if it has no short cut for these.
    step:         `kda.step`, the state updated in place; None where there is none, which `reasons` says then.
    step_again:   `step` for a repeated call, as `again`, with the tensors in the order of STEP_TENSORS; the last may be
                  left out if none of them is there.
    """

    name: str
    summary: str
    reasons: Callable[[Facts], list[str]]
    rounding: Callable[[Facts], Rounding]
    fwd: Callable[[Problem], Output]
    unavailable: Callable[[], str | None] = field(default=_available)
    build: Callable[..., Path] | None = None
    notes: Callable[[Facts], list[str]] = field(default=lambda facts: [])
    again: Callable[[Facts, dict[str, Any], list[Tensor], Apart], Output | None] | None = None
    step: Callable[[StepProblem], Tensor] | None = None
    step_again: Callable[[Facts, dict[str, Any], list[Tensor], Apart], Tensor | None] | None = None
