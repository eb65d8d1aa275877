"""The only file that may say "your input is wrong". Messages: the argument, what was expected, what came, a hint."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda.environment import switched_on
from kda.problem import Facts, GateKind, Layout, Problem, StepProblem, aligned, computed_in, gate_kind

#: Tensors whose rows a kernel would like to address by whole vectors, see `problem.aligned`.
ROWS = ("q", "k", "v", "g", "out", "initial_state", "final_state")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FLOAT_NAMES = "bfloat16, float16, float32 or float64"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(
            f"{name}: expected a dense tensor, got {kind}; make it dense first, with .to_dense() or by packing"
        )


def _require_shape(name: str, value: Tensor, symbols: str, expected: tuple[int, ...], hint: str = "") -> None:
    if tuple(value.shape) != expected:
        hint = f"; {hint}" if hint else ""
        raise ValueError(f"{name}: expected shape {symbols} = {list(expected)}, got {list(value.shape)}{hint}")


def _require_float(name: str, value: Tensor) -> None:
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: expected dtype {_FLOAT_NAMES}, got {_name(value.dtype)}")


def _require_dtype(name: str, value: Tensor, expected: torch.dtype, why: str) -> None:
    if value.dtype != expected:
        raise TypeError(f"{name}: expected dtype {_name(expected)} ({why}), got {_name(value.dtype)}")


def _require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def _require_real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}; for a tensor pass x.item()")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got an integer beyond any float") from None


def _require_range(name: str, value: float, q: Tensor) -> None:
    """Finite, also in the precision that the call is computed in."""
    dtype = computed_in(q.dtype)
    if not abs(value) <= torch.finfo(dtype).max:
        raise ValueError(f"{name}: expected a finite number within {_name(dtype)}, got {value}")


def _axes(x: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of every axis that moves, smallest stride first, in elements."""
    return sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)


def _reach(axes: list[tuple[int, int]]) -> int:
    """Offset of the last element."""
    return sum(stride * (size - 1) for stride, size in axes)


def extent(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of x and of the one after its last; the same twice where there is nothing."""
    start = 0 if x.is_meta else x.data_ptr()
    if x.is_meta or x.numel() == 0:
        return start, start
    last = 0
    for stride, size in zip(x.stride(), x.shape, strict=True):
        last += stride * (size - 1)
    return start, start + (last + 1) * x.element_size()


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two extents have a byte in common."""
    return a[0] < b[1] and b[0] < a[1] and a[0] < a[1] and b[0] < b[1]


def _repeats_itself(x: Tensor) -> bool:
    """Whether two indices may share an element: an axis that does not step over all the smaller ones."""
    axes = _axes(x)
    return any(stride <= _reach(axes[:n]) for n, (stride, _) in enumerate(axes))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose extents meet may share memory. Exact for views side by side in rows of one tensor."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    (a_axes, a_size), (b_axes, b_size) = (
        ([(stride * x.element_size(), n) for stride, n in _axes(x)], x.element_size()) for x in (a, b)
    )
    for row in {stride for stride, _ in a_axes + b_axes if stride > 0}:
        # Seen modulo a common row length, each is an interval, unless an axis cuts across the rows.
        intervals = []
        for start, axes, size in ((a_start, a_axes, a_size), (b_start, b_axes, b_size)):
            inner = [axis for axis in axes if axis[0] % row]
            first = (start - a_start) % row
            intervals.append((first, first + _reach(inner) + size))
        (a_first, a_last), (b_first, b_last) = intervals
        if max(a_last, b_last) <= row and (a_last <= b_first or b_last <= a_first):
            return False
    return True


def same(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _require_writable(
    name: str, buffer: Tensor, readers: dict[str, Tensor], extents: dict[str, tuple[int, int]]
) -> None:
    """A buffer may be strided, but must not hold an element twice nor lie on a tensor that is still to be read."""
    if buffer.is_neg():
        raise ValueError(f"{name}: expected a plain buffer, got a negated view; pass the tensor it is a view of")
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name}: expected a normal tensor, got one made in inference mode; call inside inference mode"
        )
    if _repeats_itself(buffer):
        raise ValueError(
            f"{name}: expected a buffer with one element per index, got an expanded or overlapping view; clone() it"
        )
    for other, tensor in readers.items():
        if meet(extents[name], extents[other]) and _overlap(buffer, tensor):
            raise ValueError(f"{name}: expected memory of its own, got some of {other}'s; pass a buffer elsewhere")


def _vector(name: str, value: Tensor | None, symbols: str, shape: tuple[int, ...], hint: str) -> Tensor | None:
    """`value` viewed as `shape`; accepted when it has that shape, flat or with extra dimensions of 1."""
    if value is None:
        return None
    _require_float(name, value)
    squeezed = [size for size in value.shape if size != 1]
    accepted = ([size for size in shape if size != 1], [size for size in (math.prod(shape),) if size != 1])
    if value.numel() != math.prod(shape) or squeezed not in accepted:
        raise ValueError(f"{name}: expected {symbols} = {list(shape)} elements, got shape {list(value.shape)}; {hint}")
    return value.resolve_neg().reshape(shape).contiguous()  # a kernel reads it as one block


def matrix(name: str, value: Tensor) -> None:
    """A tensor of at least two dimensions."""
    _require_tensor(name, value)
    if value.dim() < 2:
        raise ValueError(f"{name}: expected at least the dimensions K and V, got shape {list(value.shape)}")


def mask(name: str, value: Tensor, x: Tensor | None = None) -> None:
    """A padding mask, of `x` if that is given."""
    _require_tensor(name, value)
    _require_dtype(name, value, torch.bool, "True where there is a token")
    if value.dim() != 2:
        raise ValueError(f"{name}: expected shape [B, T], got {list(value.shape)}")
    if x is not None:
        _require_tensor("x", x)
        if x.shape[:2] != value.shape:
            raise ValueError(f"x: expected shape [B, T, ...] = {[*value.shape, '...']}, got {list(x.shape)}")


def packed(name: str, value: Tensor, tokens: int) -> None:
    """Packed sequences of so many tokens in all."""
    _require_tensor(name, value)
    if value.dim() < 2 or value.shape[:2] != (1, tokens):
        raise ValueError(
            f"{name}: expected shape [1, tokens, ...] = [1, {tokens}, ...], got {list(value.shape)}; "
            "the mask has so many tokens"
        )


def offsets(value: Tensor) -> None:
    """cu_seqlens on their own."""
    _require_tensor("cu_seqlens", value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected dtype int32 or int64, got {_name(value.dtype)}")
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(
            f"cu_seqlens: expected shape [N + 1], got {list(value.shape)}; it starts with 0 and ends each sequence"
        )


def _cu_seqlens(value: Tensor, q: Tensor) -> None:
    offsets(value)
    if q.shape[0] != 1:
        raise ValueError(
            f"q: expected batch 1 with cu_seqlens, got {q.shape[0]}; pack the sequences along T: "
            "x.flatten(0, 1).unsqueeze(0)"
        )


def _require_no_capture(q: Tensor) -> None:
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "KDA_CHECK: expected no CUDA graph capture while it is set, got one; it reads tensors on the host. "
            "Unset KDA_CHECK to capture"
        )


def contents(q: Tensor, g: Tensor, kind: GateKind, cu_seqlens: Tensor | None) -> None:
    """What only the contents can tell: free on a CPU, a synchronisation elsewhere (done under KDA_CHECK=1 alone)."""
    if cu_seqlens is None and kind is not GateKind.GIVEN:
        return
    checking = switched_on("KDA_CHECK")
    if checking:
        _require_no_capture(q)
    if cu_seqlens is not None and (checking or q.device.type == "cpu"):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0:
            raise ValueError(f"cu_seqlens: expected to start with 0, got {offsets[0]}; prepend a 0")
        for n, (start, stop) in enumerate(pairwise(offsets)):
            if stop < start:
                raise ValueError(
                    f"cu_seqlens: expected not to decrease, got {start} then {stop} at index {n + 1}; "
                    "it holds cumulative offsets, not lengths"
                )
        if offsets[-1] > q.shape[1]:
            raise ValueError(f"cu_seqlens: expected to end at most at T = {q.shape[1]}, got {offsets[-1]}")
    if checking and kind is GateKind.GIVEN:
        inside = g if cu_seqlens is None else g[:, : int(cu_seqlens[-1])]  # padding may hold anything
        if bool((inside > 0).any()):
            raise ValueError(
                f"g: expected log decays <= 0 when neither lower_bound nor A_log is given, got {inside.max().item()}; "
                "pass the activated gate, or A_log for the raw one"
            )


class _Inputs(NamedTuple):
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


def _inputs(
    required: dict[str, Tensor],
    optional: Mapping[str, Tensor | None],
    flags: dict[str, bool],
    scale: float | None,
    lower_bound: float | None,
    batch: str,
) -> _Inputs:
    """Checks what all calls share: q, k, v, g and beta are `required`; `batch` is what their first axis is called."""
    tensors = dict(required)
    for name, value in required.items():
        _require_tensor(name, value)
    for name, maybe in optional.items():
        if maybe is not None:
            _require_tensor(name, maybe)
            tensors[name] = maybe
    for name, flag in flags.items():
        _require_flag(name, flag)
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
    _require_shape("k", k, f"[{batch}, T, H, K]", (B, T, H, K), "q and k have the same heads and channels")
    _require_shape("v", v, f"[{batch}, T, HV, V]", (B, T, HV, V), "v has q's batch and tokens")
    if (H == 0) != (HV == 0) or (H and HV % H):
        raise ValueError(
            f"v: expected a number of heads HV that is a multiple of q's H = {H}, got HV = {HV}; "
            "each query/key head serves HV / H value heads"
        )
    _require_shape("g", g, f"[{batch}, T, HV, K]", (B, T, HV, K), "one gate per value head and key channel")
    _require_shape("beta", beta, f"[{batch}, T, HV]", (B, T, HV), "one beta per value head")

    # Dtypes and devices.
    for name in ("q", "g", "beta"):
        _require_float(name, tensors[name])
    for name in ("k", "v"):
        _require_dtype(name, tensors[name], q.dtype, "q's; q, k and v have one dtype")
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(
                f"{name}: expected device {q.device} (q's), got {tensor.device}; move it with .to(q.device)"
            )

    # Scalars and the gate.
    if scale is None:
        scale = K**-0.5
    scale = _require_real("scale", scale)
    _require_range("scale", scale, q)
    if lower_bound is not None:
        lower_bound = _require_real("lower_bound", lower_bound)
        _require_range("lower_bound", lower_bound, q)
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
    return _Inputs(
        *(tensors, B, T, H, HV, K, V, scale, lower_bound, gate_kind(lower_bound, A_log)),
        _vector("A_log", A_log, "HV", (HV,), "one per value head"),
        _vector("dt_bias", dt_bias, "HV * K", (HV, K), "one per value head and key channel"),
        graded,
    )


def _require_state_dtype(name: str, state: Tensor, q: Tensor) -> None:
    allowed = (torch.float32, torch.bfloat16) + ((torch.float64,) if q.dtype == torch.float64 else ())
    if state.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(_name, allowed))}, got {_name(state.dtype)}")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    batch_invariant: bool,
) -> Problem:
    """The arguments of `kda.fwd` as a `Problem`. Raises ValueError or TypeError before anything is written."""
    optional: dict[str, Tensor | None] = {
        "out": out,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "final_state": final_state,
        "cu_seqlens": cu_seqlens,
    }
    flags = {
        "output_final_state": output_final_state,
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "batch_invariant": batch_invariant,
    }
    given = _inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, optional, flags, scale, lower_bound, "B")

    # Layout.
    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, q)
    layout = Layout(given.B, given.T, cu_seqlens)
    N = layout.sequences

    # States and buffers.
    state_dtype = computed_in(q.dtype)
    for name, state in (("initial_state", initial_state), ("final_state", final_state)):
        if state is None:
            continue
        _require_shape(name, state, "[N, HV, V, K]", (N, given.HV, given.V, given.K), "V comes before K")
        _require_state_dtype(name, state, q)
    if final_state is not None:
        state_dtype = final_state.dtype
        if initial_state is not None:
            _require_dtype("initial_state", initial_state, state_dtype, "final_state's")
    elif initial_state is not None:
        state_dtype = initial_state.dtype

    inputs = {name: t for name, t in given.tensors.items() if name not in ("out", "final_state")}
    if out is not None:
        _require_shape("out", out, "[B, T, HV, V]", (given.B, given.T, given.HV, given.V))
        _require_dtype("out", out, q.dtype, "q's")
    written = out is not None or final_state is not None
    extents = {name: extent(x) for name, x in given.tensors.items()} if written else {}
    for name, buffer in (("out", out), ("final_state", final_state)):
        if buffer is None:
            continue
        if given.graded:
            raise ValueError(
                f"{name}: expected no buffer while {', '.join(given.graded)} requires grad, got one; results written "
                "in place cannot be differentiated. Leave the buffer out, or call under torch.no_grad()"
            )
        readers = dict(inputs)
        if name == "final_state":
            if initial_state is not None and same(final_state, initial_state):
                readers.pop("initial_state")  # updating a state in place is a normal thing to do
            if out is not None:
                readers["out"] = out
        _require_writable(name, buffer, readers, extents)
    contents(q, g, given.gate, cu_seqlens)

    facts = given.facts(
        N=N,
        varlen=cu_seqlens is not None,
        state_dtype=state_dtype,
        initial_state=initial_state is not None,
        final_state=output_final_state or final_state is not None,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        batch_invariant=batch_invariant,
    )
    return Problem(
        q=given.plain("q"),
        k=given.plain("k"),
        v=given.plain("v"),
        g=given.plain("g"),
        beta=given.plain("beta"),
        scale=given.scale,
        out=out,
        A_log=given.A_log,
        dt_bias=given.dt_bias,
        initial_state=None if initial_state is None else given.plain("initial_state"),
        final_state=final_state,
        layout=layout,
        facts=facts,
    )


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _indices(name: str, value: Tensor, symbols: str, shape: tuple[int, ...]) -> None:
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected an integer dtype, got {_name(value.dtype)}")
    _require_shape(name, value, symbols, shape, "one slot of the pool for each, negative for none")


def pool_contents(q: Tensor, slots: int, reads: Tensor | None, writes: Tensor | None, tokens: Tensor | None) -> None:
    """What only the indices' contents can tell: on a CPU whether they are within the pool; collisions on request."""
    checking = switched_on("KDA_CHECK")
    if not checking and q.device.type != "cpu":
        return
    if checking:
        _require_no_capture(q)
    N = q.shape[0]
    for name, indices in (("state_indices", reads), ("write_indices", writes), ("token_indices", tokens)):
        if indices is not None and indices.numel() and int(indices.max()) >= slots:
            raise ValueError(f"{name}: expected slots below {slots}, the pool's size, got {int(indices.max())}")
    if not checking:
        return
    read = list(range(N)) if reads is None else reads.tolist()
    write = read if writes is None else writes.tolist()
    owner: dict[int, int] = {}  # slot -> the row that writes it
    for n in range(N):
        if read[n] < 0:
            continue
        for slot in (write[n], *(() if tokens is None else tokens[n].tolist())):
            if slot >= 0 and slot in owner:
                raise ValueError(
                    f"write_indices, token_indices: expected one write to a slot in a call, got slot {slot} in rows "
                    f"{owner[slot]} and {n}; give each its own, or a negative index for no write"
                )
            if slot >= 0:
                owner[slot] = n
    for n, slot in enumerate(read):
        if slot >= 0 and owner.get(slot, n) != n:
            raise ValueError(
                f"state_indices: expected slots that no other row writes, got slot {slot} in row {n}, which row "
                f"{owner[slot]} writes; rows run in any order"
            )


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    *,
    state_indices: Tensor | None,
    write_indices: Tensor | None,
    token_indices: Tensor | None,
    fresh: Tensor | None,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> StepProblem:
    """The arguments of `kda.step` as a `StepProblem`. Raises ValueError or TypeError before anything is written."""
    indices = {"state_indices": state_indices, "write_indices": write_indices, "token_indices": token_indices}
    flags = {
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
    }
    _require_tensor("state", state)
    optional: dict[str, Tensor | None] = {
        "state": state,
        "out": out,
        "A_log": A_log,
        "dt_bias": dt_bias,
        **indices,
        "fresh": fresh,
    }
    given = _inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, optional, flags, scale, lower_bound, "N")
    N, T, HV, K, V = given.B, given.T, given.HV, given.K, given.V

    if state.dim() != 4:
        raise ValueError(f"state: expected shape [slots, HV, V, K], got {list(state.shape)}; V comes before K")
    slots = state.shape[0]
    _require_shape("state", state, "[slots, HV, V, K]", (slots, HV, V, K), "V comes before K")
    _require_state_dtype("state", state, q)
    if state_indices is None and slots < N:
        raise ValueError(
            f"state: expected a slot for each of N = {N} rows, got {slots}; without state_indices row n has slot n"
        )
    for name, value in indices.items():
        if value is not None:
            by_token = name == "token_indices"
            _indices(name, value, "[N, T]" if by_token else "[N]", (N, T) if by_token else (N,))
    if fresh is not None:
        _require_dtype("fresh", fresh, torch.bool, "whether a row starts from zero")
        _require_shape("fresh", fresh, "[N]", (N,))
    if given.graded:
        raise ValueError(
            f"{given.graded[0]}: expected no gradient, but it requires grad; the state is updated in place, which "
            "cannot be differentiated. Call under torch.no_grad(), or use kda.fwd"
        )
    if out is not None:
        _require_shape("out", out, "[N, T, HV, V]", (N, T, HV, V))
        _require_dtype("out", out, q.dtype, "q's")
    extents = {name: extent(x) for name, x in given.tensors.items()}
    for name in ("state", "out"):
        if name in given.tensors:
            readers = {other: x for other, x in given.tensors.items() if other != name}
            _require_writable(name, given.tensors[name], readers, extents)
    pool_contents(q, slots, state_indices, write_indices, token_indices)

    facts = given.facts(
        N=slots,
        varlen=False,
        state_dtype=state.dtype,
        initial_state=True,
        final_state=True,
        **flags,
        batch_invariant=True,
        operation="step",
    )
    return StepProblem(
        q=given.plain("q"),
        k=given.plain("k"),
        v=given.plain("v"),
        g=given.plain("g"),
        beta=given.plain("beta"),
        state=state,
        scale=given.scale,
        out=out,
        A_log=given.A_log,
        dt_bias=given.dt_bias,
        state_indices=state_indices,
        write_indices=write_indices,
        token_indices=token_indices,
        fresh=fresh,
        facts=facts,
    )


def implementation_name(impl: object, names: tuple[str, ...]) -> str:
    """`impl` if it is "auto" or a known name; else TypeError or ValueError with the names there are."""
    if not isinstance(impl, str):
        raise TypeError(
            f"impl: expected a name, got {type(impl).__name__}; one of 'auto', {', '.join(map(repr, names))}"
        )
    if impl != "auto" and impl not in names:
        raise ValueError(f"impl: expected one of 'auto', {', '.join(map(repr, names))}, got {impl!r}")
    return impl
