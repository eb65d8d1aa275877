"""A call as a printable value (`Case`), the tensors it stands for, and the named cases everything iterates over."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Generator, Tensor

C = TypeVar("C")

#: The tensors that every token has a part of.
TOKENS = ("q", "k", "v", "g", "beta")

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
GATES = ("bounded", "softplus", "given")
DECAYS = ("usual", "slow", "bias -5", "bias -8", "raw -8", "raw -12", "mixed", "strong", "none", "saturated", "resets")
KEYS = ("random", "mild", "close", "repeated", "alternating", "one-hot")
BETAS = ("random", "firm", "strong", "full", "weak", "zero", "saturated")
STRIDES = ("contiguous", "packed", "heads-first", "every-second")


#: The kinds of cases, by their names.
KINDS: dict[str, type[Printed]] = {}


class Printed:
    """A case: a dataclass whose text, without what is a default, makes it again."""

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    @classmethod
    def parse(cls, text: str) -> Self:
        """The case whose repr is `text`. Raises ValueError for anything else."""
        try:
            return _built(cls, ast.parse(text.strip(), mode="eval").body)
        except (AttributeError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(f"case: expected the text of a {cls.__name__}(...), got {text!r}: {error}") from error

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))  # type: ignore[arg-type]
        changed = (f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, repr=False)
class Case(Printed):
    """One call of `kda.fwd`. Its repr is the reproducer: `python -m kda replay 'Case(...)'`.

    lengths:  tokens of each sequence. With `packed` they lie in one row with cu_seqlens, followed by `padding` rows of
              NaN; otherwise all are equal and each is a batch row.
    decay:    regime of the gate: usual (the benchmark's), slow (half-lives up to thousands of tokens), "bias x"
              (dt_bias is x), "raw x" (every raw gate is x), mixed (one gate per channel, far apart), strong (the
              bound, or -8), none (no decay), saturated (raw gates of +-1e4, A_log of +-100), resets (slow with some
              tokens at -1e3, -1e6 or -inf, as far as the gate reaches). A given gate takes the log decay softplus(raw)
              instead.
    keys:     random; mild, close (a common key plus noise of 1, of 0.3); repeated (one key); alternating (two keys);
              one-hot.
    beta:     regime of the weight: random, firm (logit 1), strong (3), full (8), weak (-6), zero, saturated (+-1e4).
    exponent: v and the initial state are scaled by 2 ** exponent.
    norm:     scale of the raw q and k.
    index_dtype: of cu_seqlens.
    """

    lengths: tuple[int, ...] = (65,)
    packed: bool = True
    padding: int = 0
    H: int = 1
    group: int = 1
    K: int = 16
    V: int = 16
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    index_dtype: str = "int32"
    gate: str = "bounded"
    lower_bound: float = -5.0
    A_log: bool = True
    dt_bias: bool = True
    decay: str = "usual"
    keys: str = "random"
    beta: str = "random"
    strides: str = "contiguous"
    exponent: int = 0
    norm: float = 1.0
    initial_state: bool = True
    use_qk_l2norm: bool = True
    use_beta_sigmoid: bool = True
    allow_neg_eigval: bool = False
    seed: int = 0

    @property
    def HV(self) -> int:
        return self.H * self.group

    def __post_init__(self) -> None:
        for field in fields(self):
            value, example = getattr(self, field.name), field.default
            if type(value) is not type(example) and not (isinstance(example, float) and type(value) is int):
                raise ValueError(f"{field.name}: expected {type(example).__name__}, got {value!r}")
        if not all(type(n) is int and n >= 0 for n in self.lengths):
            raise ValueError(f"lengths: expected non-negative integers, got {self.lengths}")
        for name in ("H", "group", "K", "V"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.padding < 0 or self.lower_bound > 0:
            raise ValueError(f"expected padding >= 0 and lower_bound <= 0, got {self.padding}, {self.lower_bound}")
        choices = {
            "dtype": tuple(DTYPES),
            "state_dtype": tuple(DTYPES),
            "index_dtype": ("int32", "int64"),
            "gate": GATES,
            "decay": DECAYS,
            "keys": KEYS,
            "beta": BETAS,
            "strides": STRIDES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not self.packed and (len(set(self.lengths)) > 1 or self.padding):
            raise ValueError(f"lengths: those of a batch are equal and need no padding, got {self.lengths}")


def _built(cls: type[C], call: ast.expr) -> C:
    """The object that a call of `cls` with literals makes; a field may be a case too."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == cls.__name__):
        raise ValueError(f"expected {cls.__name__}(...)")
    if call.args or any(word.arg is None for word in call.keywords):
        raise ValueError("expected keyword arguments only")
    given = {str(word.arg): _value(word.value) for word in call.keywords}
    if len(given) < len(call.keywords):
        raise ValueError("a field is given twice")
    unknown = set(given) - {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    return cls(**given)


def _value(text: ast.expr) -> Any:
    """A literal, or a case."""
    if isinstance(text, ast.Call):
        return _built(KINDS.get(text.func.id, Case) if isinstance(text.func, ast.Name) else Case, text)
    return ast.literal_eval(text)


@dataclass(frozen=True, repr=False)
class StepCase(Printed):
    """One call of `kda.step` on a pool of NaN but for the states that are read. Its repr is the reproducer.

    case:   the rows: sequences of one length, in a batch, with states.
    slots:  of the pool.
    reads:  state_indices; None for n = 0, 1, ...
    writes, tokens, fresh: write_indices, token_indices and fresh, None where they are left out.
    index_dtype: of all indices.
    """

    case: Case
    slots: int
    reads: tuple[int, ...] | None = None
    writes: tuple[int, ...] | None = None
    tokens: tuple[tuple[int, ...], ...] | None = None
    fresh: tuple[bool, ...] | None = None
    index_dtype: str = "int64"

    def __post_init__(self) -> None:
        case, N = self.case, len(self.case.lengths)
        if case.packed or not case.initial_state:
            raise ValueError("case: expected packed=False and initial_state=True")
        for name in ("reads", "writes", "fresh", "tokens"):
            value = getattr(self, name)
            if value is not None and len(value) != N:
                raise ValueError(f"{name}: expected one for each of {N} rows, got {value}")
        if self.tokens is not None and any(len(row) != case.lengths[0] for row in self.tokens):
            raise ValueError(f"tokens: expected {case.lengths[0]} a row, got {self.tokens}")


@dataclass(frozen=True, repr=False)
class PoolCase(Printed):
    """One call of `kda.fwd` on a pool of NaN but for the states that are read. Its repr is the reproducer.

    case:   the sequences, with states.
    slots:  of the pool, and of the checkpoints' own tensor.
    reads:  state_indices; None for n = 0, 1, ...
    writes, fresh: write_indices and fresh, None where they are left out.
    kept:   checkpoint_indices; None for no checkpoints.
    every:  checkpoint_every.
    own:    checkpoints are kept in a tensor of their own, not in the pool.
    kept_dtype: of that tensor.
    index_dtype: of all indices.
    """

    case: Case
    slots: int
    reads: tuple[int, ...] | None = None
    writes: tuple[int, ...] | None = None
    fresh: tuple[bool, ...] | None = None
    kept: tuple[tuple[int, ...], ...] | None = None
    every: int = 64
    own: bool = False
    kept_dtype: str = "float32"
    index_dtype: str = "int64"

    def __post_init__(self) -> None:
        if not self.case.initial_state:
            raise ValueError("case: expected initial_state=True")
        for name in ("reads", "writes", "fresh", "kept"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.case.lengths):
                raise ValueError(f"{name}: expected one for each of {len(self.case.lengths)} sequences, got {value}")
        if self.kept is not None and len({len(row) for row in self.kept}) > 1:
            raise ValueError(f"kept: expected as many slots for every sequence, got {self.kept}")


def _uniform(noise: Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=noise, dtype=torch.float64, device=noise.device)


def _normal(noise: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=noise, dtype=torch.float64, device=noise.device)


def _integers(noise: Generator, stop: int, *shape: int) -> Tensor:
    return torch.randint(stop, shape, generator=noise, device=noise.device)


def _gate(case: Case, noise: Generator, B: int, T: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Raw gate [B, T, HV, K], A_log [HV] and dt_bias [HV, K] of the case's regime."""
    HV, K = case.HV, case.K
    A_log, dt_bias = _uniform(noise, 0, 1, HV), _uniform(noise, 0, 1, HV, K)
    g = _normal(noise, B, T, HV, K)
    reset = torch.rand(B, T, HV, K, generator=noise, device=noise.device) < 0.05
    given = case.gate == "given"
    match case.decay:
        case "usual":
            g = -torch.nn.functional.softplus(g) if given else g
        case "slow":
            dt_bias = _uniform(noise, -9, 1, HV, K)
            g = -torch.exp(_uniform(noise, -10, 0, B, T, HV, K)) if given else g
        case "bias -5" | "bias -8":
            bias = float(case.decay.removeprefix("bias "))
            dt_bias = torch.full_like(dt_bias, bias)
            g = -torch.nn.functional.softplus(g + bias) if given else g
        case "raw -8" | "raw -12":
            g = torch.full_like(g, float(case.decay.removeprefix("raw ")))
            g = -torch.nn.functional.softplus(g) if given else g
        case "mixed":
            dt_bias = _uniform(noise, -12, 12, HV, K)
            g = -torch.exp(_uniform(noise, -14, 3, 1, 1, HV, K)).expand_as(g) if given else 0 * g
        case "strong":
            g = torch.full_like(g, -8.0 if given else 20.0)
        case "none":
            g = torch.zeros_like(g) if given else torch.full_like(g, -1e4)
        case "saturated":
            A_log = torch.where(torch.rand(HV, generator=noise, device=noise.device) < 0.5, -100.0, 100.0).double()
            g = -1e4 * (g > 0) if given else 1e4 * g.sign()
        case "resets":
            if given:
                size = torch.tensor([-1e3, -1e6, -torch.inf], device=noise.device)[_integers(noise, 3, *g.shape)]
                g = torch.where(reset, size.double(), -torch.exp(_uniform(noise, -10, 0, B, T, HV, K)))
            else:
                dt_bias = _uniform(noise, -9, -4, HV, K)
                g = torch.where(reset, 1e4, g)
        case _:
            raise ValueError(f"decay: expected one of {DECAYS}, got {case.decay!r}")
    return g, None if given or not case.A_log else A_log, None if given or not case.dt_bias else dt_bias


def _keys(case: Case, noise: Generator, B: int, T: int) -> Tensor:
    """[B, T, H, K]"""
    base, k = _normal(noise, B, 2, case.H, case.K), _normal(noise, B, T, case.H, case.K)
    match case.keys:
        case "random":
            return k
        case "mild":
            return base[:, :1] + k
        case "close":
            return base[:, :1] + 0.3 * k
        case "repeated":
            return base[:, :1].expand_as(k)
        case "alternating":
            return base[:, torch.arange(T) % 2]
        case "one-hot":
            return torch.nn.functional.one_hot(_integers(noise, case.K, B, T, case.H), case.K).double()
    raise ValueError(f"keys: expected one of {KEYS}, got {case.keys!r}")


def _beta(case: Case, noise: Generator, B: int, T: int) -> Tensor:
    """[B, T, HV] logits, or weights where the case gives them."""
    n = _normal(noise, B, T, case.HV)
    levels = {
        "random": n,
        "firm": torch.full_like(n, 1.0),
        "strong": torch.full_like(n, 3.0),
        "full": torch.full_like(n, 8.0),
        "weak": torch.full_like(n, -6.0),
        "zero": torch.full_like(n, -torch.inf),
        "saturated": 1e4 * n.sign(),
    }
    logit = levels[case.beta]
    return logit if case.use_beta_sigmoid else torch.sigmoid(logit)


def _strided(tensors: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """The same values in memory as a real caller has them. Gaps hold NaN."""
    if how == "contiguous":
        return tensors
    result = {}
    for name, x in tensors.items():
        if x.numel() == 0:
            result[name] = x
        elif how == "heads-first":
            result[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif how == "every-second":
            wide = x.new_full((*x.shape, 2), torch.nan)
            wide[..., 0] = x
            result[name] = wide[..., 0]
        else:  # rows of a wider projection
            B, T = x.shape[:2]
            width = x[0, 0].numel()
            wide = x.new_full((B, T, width + 5), torch.nan)
            wide[..., 3 : 3 + width] = x.flatten(2)
            result[name] = wide[..., 3 : 3 + width].unflatten(2, x.shape[2:])
    return result


def arguments(case: Case, device: torch.device | str = "cpu", made_on: torch.device | str = "cpu") -> dict[str, Any]:
    """The keyword arguments of `kda.fwd` that the case stands for.

    The same values on every device, unless they are `made_on` another than the CPU, where large cases take minutes.
    """
    noise = Generator(made_on).manual_seed(case.seed)
    dtype, state_dtype = DTYPES[case.dtype], DTYPES[case.state_dtype]
    total = sum(case.lengths)
    B, T = (1, total + case.padding) if case.packed else (len(case.lengths), max(case.lengths, default=0))
    N = len(case.lengths)
    g, A_log, dt_bias = _gate(case, noise, B, T)
    q, k = _normal(noise, B, T, case.H, case.K), _keys(case, noise, B, T)
    if not case.use_qk_l2norm:  # what a caller who switches the normalisation off has done already
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) for x in (q, k))
    q, k = q * case.norm, k * case.norm
    v = _normal(noise, B, T, case.HV, case.V) * 2.0**case.exponent
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": _beta(case, noise, B, T)}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    if case.packed and case.padding:
        for x in tensors.values():
            x[:, total:] = torch.nan
    call: dict[str, Any] = dict(_strided(tensors, case.strides))
    call["A_log"] = None if A_log is None else A_log.float()
    call["dt_bias"] = None if dt_bias is None else dt_bias.float()
    call["lower_bound"] = case.lower_bound if case.gate == "bounded" else None
    if case.gate == "softplus" and call["A_log"] is None:
        call["A_log"] = torch.zeros(case.HV, device=made_on)
    if case.initial_state:
        state = 0.1 * _normal(noise, N, case.HV, case.V, case.K) * 2.0**case.exponent
        call["initial_state"] = state.to(state_dtype)
    if case.packed:
        offsets = torch.tensor([0, *case.lengths], dtype=torch.int64).cumsum(0)
        call["cu_seqlens"] = offsets.to(getattr(torch, case.index_dtype))
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
    for flag in ("use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval"):
        call[flag] = getattr(case, flag)
    call["output_final_state"] = True
    return call


def in_fp64(call: dict[str, Any]) -> dict[str, Any]:
    """The same values, floats in fp64 on the CPU: what the oracle gets."""
    result = {}
    for name, x in call.items():
        if isinstance(x, Tensor):
            x = x.detach().cpu()
            x = x.double() if x.is_floating_point() else x
        result[name] = x
    return result


_LONG = Case(lengths=(2048,), H=4, K=128, V=128, A_log=False)

#: The input families of the accuracy table, at its size.
FAMILIES = {
    "usual": _LONG,
    "slow channels": replace(_LONG, decay="slow"),
    "mild correlation": replace(_LONG, keys="mild", beta="firm", decay="bias -5"),
    "strong correlation": replace(_LONG, keys="close", beta="strong", decay="bias -8"),
    "one key repeated": replace(_LONG, keys="repeated", beta="full", decay="raw -12"),
    "raw gate -8": replace(_LONG, decay="raw -8"),
    "ragged": replace(_LONG, lengths=(1, 15, 16, 17, 63, 64, 65, 300, 700)),
}

#: Small cases with one idea each, run by every implementation that accepts them.
NAMED: dict[str, Case] = {
    "one token": Case(lengths=(1,)),
    "one chunk": Case(lengths=(64,)),
    "one past a chunk": Case(lengths=(65,)),
    "batch": Case(lengths=(70, 70, 70), packed=False, H=2),
    "ragged edges": Case(lengths=(1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)),
    "empty first, middle, last": Case(lengths=(0, 40, 0, 0, 70, 1, 0)),
    "all empty": Case(lengths=(0, 0, 0)),
    "no sequence": Case(lengths=(), padding=5),
    "no token": Case(lengths=(0,), packed=False),
    "padding": Case(lengths=(10, 70), padding=33),
    "nothing but padding": Case(lengths=(0, 0), padding=70),
    "grouped heads": Case(lengths=(40, 30), H=2, group=3),
    "K above V": Case(lengths=(70,), K=48, V=8),
    "V above K": Case(lengths=(70,), K=12, V=40),
    "odd channels": Case(lengths=(70,), K=33, V=17),
    "more channels than 128": Case(lengths=(70,), K=130, V=200),
    "as many channels as kernels take": Case(lengths=(40,), K=256, V=256, decay="slow"),
    "one channel": Case(lengths=(70,), K=1, V=1),
    "softplus gate": Case(lengths=(70, 20), gate="softplus"),
    "given gate": Case(lengths=(70, 20), gate="given"),
    "no A_log": Case(lengths=(70,), A_log=False),
    "no dt_bias": Case(lengths=(70,), dt_bias=False),
    "bound of 0": Case(lengths=(70,), lower_bound=0.0),
    "bound of -40": Case(lengths=(70, 33), lower_bound=-40.0),
    "slow channels": Case(lengths=(200,), decay="slow"),
    "mixed gates": Case(lengths=(130,), decay="mixed"),
    "mixed softplus gates": Case(lengths=(130,), gate="softplus", decay="mixed"),
    "strong gate, odd tails": Case(lengths=(17, 33, 63, 65), decay="strong"),
    "strong given gate": Case(lengths=(17, 33, 63, 65), gate="given", decay="strong"),
    "saturated": Case(lengths=(70,), decay="saturated", beta="saturated"),
    "saturated softplus": Case(lengths=(70,), gate="softplus", decay="saturated", beta="saturated"),
    "hard resets": Case(lengths=(70, 200), gate="given", decay="resets"),
    "softplus resets": Case(lengths=(200,), gate="softplus", decay="resets"),
    "close keys": Case(lengths=(200,), keys="close", beta="strong", decay="slow"),
    "one key repeated": Case(lengths=(200,), keys="repeated", beta="full", decay="none"),
    "alternating keys": Case(lengths=(200,), keys="alternating", beta="full", decay="none"),
    "one-hot keys": Case(lengths=(200,), keys="one-hot", beta="full", decay="none"),
    "zero beta": Case(lengths=(70,), beta="zero"),
    "only decay": Case(lengths=(130, 40), beta="zero", decay="slow"),
    "long memory, weak beta": Case(lengths=(1024,), beta="weak", decay="none"),
    "negative eigenvalues": Case(lengths=(200,), beta="full", decay="none", allow_neg_eigval=True),
    "weights given": Case(lengths=(70,), use_beta_sigmoid=False),
    "no normalisation": Case(lengths=(70,), use_qk_l2norm=False),
    "raw norm of 1e4": Case(lengths=(70,), norm=1e4),
    "scaled by 2^20": Case(lengths=(70, 3), exponent=20),
    "scaled by 2^40": Case(lengths=(70, 3), exponent=40),
    "scaled by 2^-40": Case(lengths=(70, 3), exponent=-40),
    "fp16, state of 2^20": Case(lengths=(70, 0), dtype="float16", exponent=12),
    "bf16 state": Case(lengths=(70, 0, 3), state_dtype="bfloat16"),
    "no initial state": Case(lengths=(70, 0, 3), initial_state=False),
    "int64 offsets": Case(lengths=(70, 3), index_dtype="int64"),
    "rows of a projection": Case(lengths=(70, 3), H=2, group=2, strides="packed"),
    "heads first": Case(lengths=(70, 70), packed=False, H=2, strides="heads-first"),
    "every second channel": Case(lengths=(70, 3), H=2, strides="every-second"),
}


def within_hopper(case: Case) -> Case:
    """The case moved into what `cuda` takes (bf16, 128 channels, a bounded gate of at least -5), the rest as it is."""
    bound = max(case.lower_bound, -5.0)
    return replace(case, K=128, V=128, dtype="bfloat16", gate="bounded", lower_bound=bound)


def fitted(case: Case, impl: str) -> Case:
    """The case as `impl` can take it: `cuda` has its own channels, dtype and gate."""
    return within_hopper(case) if impl == "cuda" else case


def fitted_step(case: Case, impl: str) -> Case:
    """The same for the rows of a step, where `cuda` takes every gate, but rows of whole vectors alone."""
    if impl != "cuda":
        return case
    strides = case.strides if case.strides == "contiguous" else "heads-first"
    return replace(case, K=128, V=128, dtype="bfloat16", strides=strides)


def named(dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")) -> Iterator[tuple[str, Case]]:
    """The named cases in each of `dtypes`; one that pins its own dtype or does not fit a dtype's range stands once."""
    for name, case in NAMED.items():
        if case.dtype != "bfloat16":
            yield name, case
            continue
        for dtype in dtypes:
            if dtype != "float16" or (abs(case.exponent) <= 10 and case.norm < 1e3):
                yield f"{name} [{dtype}]", replace(case, dtype=dtype)
