"""The ledger of findings: what the fuzzer and readers have found, each kept as a case that is run again.

A `fixed` entry has to pass wherever it runs. An `open` one is a known defect: it has to fail, so that whoever mends it
moves it to `fixed`; until then, drawn cases that it `matches` count as known and are no findings. One that kills its
process cannot be open: fix it, or refuse the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from kda import dispatch
from kda.testing.cases import Case, PoolCase, Printed, StepCase
from kda.testing.judge import Finding
from kda.testing.operations import check, fitted_to, operation_of, reasons
from kda.testing.refusal import RefusalCase

#: Every implementation that can run the case.
ALL = tuple(dispatch.TABLE)


@dataclass(frozen=True)
class Entry:
    """case: what fails, or once did.
    implementations: on which; ("",) for an operation without a choice of them.
    status:  "open" or "fixed".
    reason:  what is, or was, wrong.
    since:   the commit that fixed it, or what found it.
    matches: of an open entry, which drawn cases are the same finding; None: this very case. A finding is shrunk only
             to cases that are no such match, so a family of failing cases needs a function.
    """

    case: Printed
    reason: str
    since: str
    implementations: tuple[str, ...] = ALL
    status: str = "fixed"
    matches: Callable[[Printed], bool] | None = None

    def __post_init__(self) -> None:
        if self.status not in ("open", "fixed"):
            raise ValueError(f"status: expected 'open' or 'fixed', got {self.status!r}")

    @cached_property
    def operation(self) -> str:
        return operation_of(self.case)

    def covers(self, case: Printed, impl: str) -> bool:
        """Whether a failure of `case` on `impl` is this open entry's."""
        if self.status != "open" or impl not in self.implementations:
            return False
        return case == fitted_to(self.case, impl) if self.matches is None else self.matches(case)


_ROW = Case(lengths=(2,), packed=False, K=8, V=8)

LEDGER: tuple[Entry, ...] = (
    Entry(
        Case(lengths=(63,), H=2, K=1, V=1, dtype="float32", A_log=False, decay="slow", initial_state=False),
        "one key channel: the chunk's roundings are not erased by the updates that follow inside the chunk",
        "bddc316",
    ),
    Entry(
        Case(
            lengths=(17, 65),
            K=7,
            V=1,
            lower_bound=-5.5,
            A_log=False,
            dt_bias=False,
            decay="strong",
            keys="one-hot",
            exponent=40,
            initial_state=False,
            use_qk_l2norm=False,
            use_beta_sigmoid=False,
        ),
        "decays below the smallest normal number, under values of 2^40",
        "bddc316",
    ),
    Entry(
        Case(
            lengths=(16,),
            packed=False,
            H=2,
            K=1,
            V=1,
            A_log=False,
            dt_bias=False,
            beta="saturated",
            initial_state=False,
            use_qk_l2norm=False,
            use_beta_sigmoid=False,
        ),
        "coefficients of fully decayed tokens, below what fp16 holds",
        "10c5976",
    ),
    Entry(Case(lengths=(), packed=False, strides="packed"), "a batch of nothing", "bddc316"),
    Entry(
        Case(
            lengths=(31, 135),
            padding=40,
            K=48,
            V=2,
            dtype="float32",
            gate="given",
            A_log=False,
            dt_bias=False,
            decay="strong",
            keys="close",
            norm=10000.0,
            initial_state=False,
            seed=55,
        ),
        "tolerance: a sum over K that cancels; its partial sums are rounded too",
        "ccd17b9",
    ),
    Entry(
        Case(
            lengths=(15, 15, 130),
            group=2,
            K=1,
            V=1,
            A_log=False,
            dt_bias=False,
            decay="raw -8",
            keys="repeated",
            beta="full",
            initial_state=False,
            allow_neg_eigval=True,
            seed=189,
        ),
        "tolerance: a repeated weight of almost 2 turns the state's sign at every token, and its rounding adds up",
        "0f2308b",
    ),
    Entry(
        Case(lengths=(188,), K=2, V=1, dtype="float64", gate="softplus", beta="zero", use_beta_sigmoid=False, seed=631),
        "tolerance: nothing but decay, in fp64, down to numbers whose squares are no fp64 numbers any more",
        "the first fuzz of all operations",
    ),
    Entry(Case(lengths=(70,), K=33, V=17), "tiles of 32 value channels in bf16, miscompiled by Triton 3.6", "bddc316"),
    Entry(Case(lengths=(70,), K=64, V=32), "tiles of 32 value channels in bf16, miscompiled by Triton 3.6", "bddc316"),
    Entry(Case(lengths=(70,), use_qk_l2norm=False), "raw keys in bf16, miscompiled by Triton 3.6", "68ce7d0"),
    Entry(
        StepCase(Case(lengths=(2,), packed=False, K=128, V=128), slots=3, writes=(-1,), tokens=((1, 2),)),
        "Triton's state after one of two tokens was not that after one alone: T = 1 was compiled with other fusions",
        "b76dde5",
    ),
    Entry(StepCase(_ROW, slots=0, reads=(-1,)), "a pool without slots, of padding alone", "6381d69"),
    Entry(
        PoolCase(Case(lengths=(70, 3), K=8, V=8), slots=0, reads=(-1, -1)),
        "a pool without slots, of padding alone",
        "86fbee0",
    ),
    Entry(
        PoolCase(
            Case(lengths=(129,), K=8, V=8), slots=2, reads=(0,), writes=(-1,), kept=((0, 1),), every=2**63, own=True
        ),
        "checkpoints further apart than any sequence is long",
        "86fbee0",
    ),
    Entry(
        RefusalCase(
            PoolCase(Case(lengths=(2, 2), K=8, V=8), slots=3, reads=(2, 0)), (("state_indices", "twice"),), checked=True
        ),
        "the refusal of two writes to a slot named write_indices, which was not given",
        "the first fuzz of refusals",
    ),
    Entry(
        Case(
            lengths=(96,),
            K=256,
            V=1,
            A_log=False,
            dt_bias=False,
            beta="saturated",
            initial_state=False,
            use_qk_l2norm=False,
            use_beta_sigmoid=False,
            seed=2,
        ),
        "compiled, Kr between two blocks of channels was converted to fp16 before it was scaled: small channels lost",
        "6ad51e8",
    ),
)


def known(case: Printed, impl: str) -> Entry | None:
    """The open entry that a failure of the case belongs to, if there is one."""
    return next((entry for entry in LEDGER if entry.covers(case, impl)), None)


def why_not(entry: Entry, impl: str) -> str:
    """Why the entry cannot run here; empty if it can."""
    return " ".join(reasons(fitted_to(entry.case, impl), impl)) if impl else ""


def stands(entry: Entry, impl: str, judge: Callable[[Printed], float] | None = None) -> str:
    """What is wrong with an entry: empty where a fixed one passes and an open one fails. `judge` instead of `check`."""
    case = fitted_to(entry.case, impl)
    try:
        check(case, impl) if judge is None else judge(case)
    except Finding as finding:
        return "" if entry.status == "open" else f"fixed by {entry.since}, fails again ({entry.reason})\n{finding}"
    if entry.status == "open":
        where = impl or entry.operation
        return f"open since {entry.since}, but passes on {where}: move it to fixed in kda/testing/ledger.py\n{case!r}"
    return ""
