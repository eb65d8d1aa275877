"""Requirements on one argument: each raises TypeError or ValueError that names it, what was expected and what came."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from kda.environment import switched_on
from kda.problem import computed_in

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FLOAT_NAMES = "bfloat16, float16, float32 or float64"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(
            f"{name}: expected a dense tensor, got {kind}; make it dense first, with .to_dense() or by packing"
        )


def require_shape(name: str, value: Tensor, symbols: str, expected: tuple[int, ...], hint: str = "") -> None:
    if tuple(value.shape) != expected:
        hint = f"; {hint}" if hint else ""
        raise ValueError(f"{name}: expected shape {symbols} = {list(expected)}, got {list(value.shape)}{hint}")


def require_float(name: str, value: Tensor) -> None:
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: expected dtype {_FLOAT_NAMES}, got {name_of(value.dtype)}")


def require_dtype(name: str, value: Tensor, expected: torch.dtype, why: str) -> None:
    if value.dtype != expected:
        raise TypeError(f"{name}: expected dtype {name_of(expected)} ({why}), got {name_of(value.dtype)}")


def require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def require_real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}; for a tensor pass x.item()")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got an integer beyond any float") from None


def require_range(name: str, value: float, q: Tensor) -> None:
    """Finite, also in the precision that the call is computed in."""
    dtype = computed_in(q.dtype)
    if not abs(value) <= torch.finfo(dtype).max:
        raise ValueError(f"{name}: expected a finite number within {name_of(dtype)}, got {value}")


def vector(name: str, value: Tensor | None, symbols: str, shape: tuple[int, ...], hint: str) -> Tensor | None:
    """`value` viewed as `shape`; accepted when it has that shape, flat or with extra dimensions of 1."""
    if value is None:
        return None
    require_float(name, value)
    squeezed = [size for size in value.shape if size != 1]
    accepted = ([size for size in shape if size != 1], [size for size in (math.prod(shape),) if size != 1])
    if value.numel() != math.prod(shape) or squeezed not in accepted:
        raise ValueError(f"{name}: expected {symbols} = {list(shape)} elements, got shape {list(value.shape)}; {hint}")
    return value.resolve_neg().reshape(shape).contiguous()  # a kernel reads it as one block


def require_no_capture(q: Tensor) -> None:
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "KDA_CHECK: expected no CUDA graph capture while it is set, got one; it reads tensors on the host. "
            "Unset KDA_CHECK to capture"
        )


def looks_at_contents(q: Tensor) -> bool:
    """Whether contents are read: free on a CPU, a synchronisation elsewhere (done under KDA_CHECK=1 alone)."""
    checking = switched_on("KDA_CHECK")
    if checking:
        require_no_capture(q)
    return checking or q.is_cpu


def require_state_dtype(name: str, state: Tensor, q: Tensor) -> None:
    allowed = (torch.float32, torch.bfloat16) + ((torch.float64,) if q.dtype == torch.float64 else ())
    if state.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(name_of, allowed))}, got {name_of(state.dtype)}")


def implementation_name(impl: object, names: tuple[str, ...]) -> str:
    """`impl` if it is "auto" or a known name; else TypeError or ValueError with the names there are."""
    if not isinstance(impl, str):
        raise TypeError(
            f"impl: expected a name, got {type(impl).__name__}; one of 'auto', {', '.join(map(repr, names))}"
        )
    if impl != "auto" and impl not in names:
        raise ValueError(f"impl: expected one of 'auto', {', '.join(map(repr, names))}, got {impl!r}")
    return impl
