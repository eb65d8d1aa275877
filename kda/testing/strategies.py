"""Hypothesis strategies: structure is drawn, noise comes from one seed. Edges that draws never reach are named."""

from __future__ import annotations

import inspect
from dataclasses import replace

from hypothesis import strategies as st

from kda import api
from kda.testing import convert, faults
from kda.testing.cases import BETAS, DECAYS, DTYPES, GATES, KEYS, STRIDES, Case, PoolCase, Printed, StepCase
from kda.testing.convert import ConvertCase
from kda.testing.gradient import GradientCase
from kda.testing.operations import fitted_to, reasons_against
from kda.testing.refusal import RefusalCase

#: Lengths at which tiles, blocks and chunks begin and end.
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)

#: Channel counts: powers of two, their neighbours, and what a vectorised load does not divide.
CHANNELS = (1, 2, 7, 8, 12, 16, 17, 31, 32, 33, 48, 64)


def lengths(max_tokens: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Ragged layouts: edges mixed with anything, empties anywhere, also all of them; at most `max_tokens` in all."""
    one = st.one_of(st.sampled_from(EDGES), st.integers(0, 200))
    ragged = st.lists(one, min_size=0, max_size=9).map(tuple)

    def fit(drawn: tuple[int, ...]) -> tuple[int, ...]:
        kept, total = [], 0
        for length in drawn:
            if total + length <= max_tokens:
                kept.append(length)
                total += length
        return tuple(kept)

    return ragged.map(fit)


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
    max_tokens: int = 200,
    channels: tuple[int, ...] = CHANNELS,
) -> Case:
    """A call that every general implementation accepts."""
    packed = draw(st.booleans())
    if packed:
        drawn, padding = draw(lengths(max_tokens)), draw(st.sampled_from((0, 0, 1, 40)))
    else:
        batch = draw(st.integers(0, 3))
        drawn, padding = (draw(st.sampled_from([e for e in EDGES if e * max(batch, 1) <= max_tokens])),) * batch, 0
    dtype = draw(st.sampled_from(dtypes))
    sigmoid = draw(st.booleans())
    l2norm = draw(st.booleans())
    fp16 = dtype == "float16"
    return Case(
        lengths=drawn,
        packed=packed,
        padding=padding,
        H=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 2)),
        K=draw(st.sampled_from(channels)),
        V=draw(st.sampled_from(channels)),
        dtype=dtype,
        state_dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        index_dtype=draw(st.sampled_from(("int32", "int64"))),
        gate=draw(st.sampled_from(GATES)),
        lower_bound=draw(st.sampled_from((-5.0, -1.0, -5.5, -6.0, 0.0, -0.01, -20.0, -100.0))),
        A_log=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        decay=draw(st.sampled_from(DECAYS)),
        keys=draw(st.sampled_from(KEYS)),
        beta=draw(st.sampled_from(BETAS)),
        strides=draw(st.sampled_from(STRIDES)),
        exponent=draw(st.sampled_from((0, 0, 3, -8) if fp16 else (0, 0, 20, -20, 40, -40))),
        norm=draw(st.sampled_from((1.0, 1e-2, 30.0) if fp16 else (1.0, 1e-2, 1e4))) if l2norm else 1.0,
        initial_state=draw(st.booleans()),
        use_qk_l2norm=l2norm,
        use_beta_sigmoid=sigmoid,
        allow_neg_eigval=sigmoid and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def steps(draw: st.DrawFn, of: st.SearchStrategy[Case], max_rows: int = 4, max_tokens: int = 3) -> StepCase:
    """A call of `kda.step` that writes no slot twice and reads none that another row writes. `of` draws the rest."""
    N, T = draw(st.integers(0, max_rows)), draw(st.integers(1, max_tokens))
    case = replace(draw(of), lengths=(T,) * N, packed=False, padding=0, initial_state=True)
    slots = N * (T + 2) + draw(st.integers(0, 2))
    own = draw(st.permutations(range(slots)))  # dealt out: a row's to read, to write, and one for each token
    dealt = [own[n * (T + 2) : (n + 1) * (T + 2)] for n in range(N)]

    def maybe(slot: int) -> int:
        return draw(st.sampled_from((slot, slot, slot, -1, -7)))

    simple = draw(st.booleans())
    reads = None if simple else tuple(maybe(row[0]) for row in dealt)
    if simple:  # then rows own the first slots, and the others are dealt
        others = [slot for slot in own if slot >= N]
        dealt = [[n, *others[n * (T + 1) : (n + 1) * (T + 1)]] for n in range(N)]
    writes = tuple(maybe(row[draw(st.integers(0, 1))]) for row in dealt) if draw(st.booleans()) else None
    tokens = tuple(tuple(maybe(slot) for slot in row[2:]) for row in dealt) if draw(st.booleans()) else None
    fresh = tuple(draw(st.booleans()) for _ in range(N)) if draw(st.booleans()) else None
    index_dtype = draw(st.sampled_from(("int8", "int32", "int64")))
    return StepCase(case, max(slots, N), reads, writes, tokens, fresh, index_dtype)


@st.composite
def pools(draw: st.DrawFn, of: st.SearchStrategy[Case]) -> PoolCase:
    """A call of `kda.fwd` on a pool, with checkpoints, under the same rules. `of` draws the sequences."""
    case = replace(draw(of), initial_state=True)
    N, columns = len(case.lengths), draw(st.integers(0, 3))
    slots = max(N * (columns + 2) + draw(st.integers(0, 2)), 1)
    own = draw(st.permutations(range(slots)))  # dealt out: a sequence's to read, to write, and for its checkpoints
    dealt = [own[n * (columns + 2) : (n + 1) * (columns + 2)] for n in range(N)]

    def maybe(slot: int) -> int:
        return draw(st.sampled_from((slot, slot, slot, slot, -1, -7)))

    reads = tuple(maybe(row[0]) for row in dealt)
    writes = tuple(maybe(row[draw(st.integers(0, 1))]) for row in dealt) if draw(st.booleans()) else None
    kept = tuple(tuple(maybe(slot) for slot in row[2:]) for row in dealt) if draw(st.booleans()) else None
    return PoolCase(
        case,
        slots,
        reads,
        writes,
        fresh=tuple(draw(st.booleans()) for _ in range(N)) if draw(st.booleans()) else None,
        kept=kept,
        every=draw(st.sampled_from((64, 64, 128))),
        own=draw(st.booleans()),
        kept_dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        index_dtype=draw(st.sampled_from(("int8", "int16", "int32", "int64"))),
    )


@st.composite
def gradients(draw: st.DrawFn) -> GradientCase:
    """A call in fp64 that is differentiated. Small: each token of the reference is a few dozen nodes of a graph."""
    case = draw(cases(("float64",), max_tokens=140, channels=(1, 2, 3, 7, 8, 16)))
    return GradientCase(case, draw(st.integers(0, 2**16)))


@st.composite
def converts(draw: st.DrawFn) -> ConvertCase:
    """Masks of every kind: ragged, with gaps, full, empty, without rows or columns."""
    B, T = draw(st.integers(0, 4)), draw(st.integers(0, 7))
    return ConvertCase(
        mask=tuple(draw(st.text("01", min_size=T, max_size=T)) for _ in range(B)),
        trailing=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
        state=tuple(draw(st.lists(st.integers(0, 4), min_size=2, max_size=4))),
        dtype=draw(st.sampled_from(tuple(convert.DTYPES))),
        layout=draw(st.sampled_from(convert.LAYOUTS)),
        index_dtype=draw(st.sampled_from(("int32", "int64"))),
        cut=draw(st.integers(0, 9)),
    )


@st.composite
def refusals(draw: st.DrawFn, impl: str) -> RefusalCase:
    """A small, tame call of any kind with one or two arguments spoiled."""
    tame = Case(
        lengths=tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
        padding=draw(st.sampled_from((0, 0, 2))),
        H=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 2)),
        K=draw(st.sampled_from((1, 4, 8))),
        V=draw(st.sampled_from((1, 3, 8))),
        dtype=draw(st.sampled_from(("bfloat16", "float32"))),
        gate=draw(st.sampled_from(GATES)),
        strides=draw(st.sampled_from(STRIDES)),
        initial_state=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    kinds = ["fwd", "pool", *(["step"] if not reasons_against(impl, "step") else [])]
    kind = draw(st.sampled_from(kinds))
    call: Case | PoolCase | StepCase = tame
    if kind != "fwd":
        call = draw((pools if kind == "pool" else steps)(st.just(tame)))
    names = [*inspect.signature(api.step if kind == "step" else api.fwd).parameters, "nope"]
    arguments = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    case = RefusalCase(
        call,
        tuple((name, draw(st.sampled_from(faults.faults_of(name)))) for name in arguments),
        *(draw(st.booleans()) for _ in range(3)),
    )
    fitted = fitted_to(case, impl)
    return fitted if isinstance(fitted, RefusalCase) else case


def _sequences(impl: str, device: str) -> st.SearchStrategy[Case]:
    """What an implementation is attacked with, in sizes that it is quick at."""
    dtypes = tuple(name for name in DTYPES if name != "float64" or impl in ("recurrent", "chunked"))
    if impl == "triton" and device == "cuda":
        return cases(dtypes, max_tokens=600, channels=(*CHANNELS, 100, 128, 200, 256))
    if impl == "cuda":
        return cases(("bfloat16",), max_tokens=600, channels=(128,))
    if impl == "triton":  # interpreted
        return cases(dtypes, max_tokens=130, channels=(1, 8, 16, 17, 33))
    return cases(dtypes)


def drawn(operation: str, impl: str, device: str) -> st.SearchStrategy[Printed]:
    """Cases of an operation for an implementation; on a pool with the sequences of the forward's."""
    sequences = _sequences(impl, device)
    of: dict[str, st.SearchStrategy[Printed]] = {
        "fwd": sequences,
        "step": steps(sequences),
        "pool": pools(sequences),
        "gradient": gradients(),
        "convert": converts(),
        "refusal": refusals(impl),
    }
    return of[operation].map(lambda case: fitted_to(case, impl))
