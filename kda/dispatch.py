"""Which implementation runs a call, and why not the others."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from kda.environment import switched_on
from kda.problem import Facts, Implementation, Missing

log = logging.getLogger("kda")

#: Every implementation, fastest first: name -> module that exports IMPL. Imported when first needed.
TABLE = {
    "cuda": "kda.cuda",
    "triton": "kda.triton",
    "chunked": "kda.ref.chunked",
    "recurrent": "kda.ref.recurrent",
}

#: What `auto` may take, best first, by device type; and for a decode step.
AUTO = {"cuda": ("cuda", "triton"), "cpu": ("chunked",)}
AUTO_STEP = {**AUTO, "cpu": ("recurrent",)}


class Unsupported(NotImplementedError):
    """A well-formed call that the implementation asked for, or every one `auto` may take, cannot run.

    reasons: implementation name -> every reason as a sentence.
    """

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]]):
        self.reasons = reasons
        lines = [f"  {name}: {reason}" for name, listed in reasons.items() for reason in listed]
        super().__init__("\n".join([message, *lines]))


@dataclass(frozen=True)
class Explanation:
    """What `auto`, or a name, comes to for one call. Printing it gives one line per implementation.

    chosen:  name of the implementation that would run, or None.
    reasons: name -> every reason why it would not run this call; empty where it could.
    notes:   name -> what it would do besides, such as a copy of a strided input.
    auto:    the names `auto` may take on this device, best first.
    """

    chosen: str | None
    reasons: dict[str, tuple[str, ...]]
    notes: dict[str, tuple[str, ...]]
    auto: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for name, reasons in self.reasons.items():
            if reasons:
                status = "cannot: " + " ".join(reasons)
            elif name == self.chosen:
                status = "chosen. " + " ".join(self.notes[name])
            elif name in self.auto:
                first = f"; {self.chosen} comes first" if self.chosen in self.auto else ""
                status = f"could run{first}. " + " ".join(self.notes[name])
            else:
                status = "could run; only by name. " + " ".join(self.notes[name])
            lines.append(f"{name:<10} {status.rstrip()}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Availability:
    """One row of `kda.implementations()`. reason: None where it is available, else what is missing."""

    name: str
    summary: str
    available: bool
    reason: str | None


def implementation(name: str) -> Implementation:
    """The implementation called `name`, imported on first use."""
    found = getattr(sys.modules.get(TABLE[name]), "IMPL", None)  # at every call of `fwd`; the import alone costs 0.5 us
    return importlib.import_module(TABLE[name]).IMPL if found is None else found


def implementations() -> list[Availability]:
    """Every implementation with what it needs on this machine, fastest first. Takes no device query."""
    rows = []
    for name in TABLE:
        impl = implementation(name)
        reason = impl.unavailable()
        rows.append(Availability(name, impl.summary, reason is None, reason))
    return rows


def automatic(facts: Facts) -> tuple[str, ...]:
    """The names `auto` may take, best first."""
    return (AUTO_STEP if facts.operation == "step" else AUTO).get(facts.device, ())


@lru_cache
def _missing(name: str) -> str | None:
    return implementation(name).unavailable()


@lru_cache(maxsize=4096)
def _reasons(name: str, facts: Facts) -> tuple[str, ...]:
    impl, missing = implementation(name), _missing(name)
    return (*impl.reasons(facts), *([missing] if missing else ()))


_generation = 0


def generation() -> int:
    """How often what is remembered was dropped: a choice made before the last time is out of date."""
    return _generation


def forget() -> None:
    """Drop what is remembered about availability, after something was installed or built in this process."""
    global _generation
    _generation += 1
    for remembered in (_reasons, _missing, _warn_once):
        remembered.cache_clear()


def build(name: str, *, force: bool = False, verbose: bool = False) -> Path:
    """Build the implementation called `name` and return where it is; every later call sees that it is there."""
    make = implementation(name).build
    if make is None:
        raise RuntimeError(f"{name} has nothing to build")
    try:
        return make(force=force, verbose=verbose)
    finally:
        forget()


def _only_unbuilt(name: str, facts: Facts) -> bool:
    """Whether a build is all that stands between an implementation and the call."""
    return implementation(name).build is not None and _reasons(name, facts) == (_missing(name),)


def _at_first_use(name: str, facts: Facts) -> tuple[str, ...]:
    """Every reason against an implementation asked for by name, built first if that alone is in the way."""
    reasons = _reasons(name, facts)
    if not _only_unbuilt(name, facts):
        return reasons
    if switched_on("KDA_NO_JIT"):
        return (*reasons, "KDA_NO_JIT is set: nothing is built at the first use.")
    try:
        build(name)
    except Missing as error:
        return (str(error),)
    return _reasons(name, facts)


def explain_facts(facts: Facts, impl: str = "auto") -> Explanation:
    """What `impl` comes to for these facts, with every implementation's reasons. Builds nothing: not built is one."""
    auto = automatic(facts)
    reasons = {name: _reasons(name, facts) for name in TABLE}
    candidates = auto if impl == "auto" else (impl,)
    chosen = next((name for name in candidates if not reasons[name]), None)
    notes = {name: tuple(implementation(name).notes(facts)) for name in TABLE}
    return Explanation(chosen, reasons, notes, auto)


def choose(facts: Facts, impl: str = "auto") -> Implementation:
    """The implementation that runs these facts. Raises `Unsupported` with every reason if there is none.

    `auto` takes what is there. One asked for by name that only has to be built is built now, unless KDA_NO_JIT=1; a
    build that fails raises its own RuntimeError.
    """
    candidates = automatic(facts) if impl == "auto" else (impl,)
    reasons_of = _reasons if impl == "auto" else _at_first_use
    for name in candidates:
        against = reasons_of(name, facts)
        if impl == "auto" and _only_unbuilt(name, facts):
            _warn_once(name, against[0])
        if not against:
            if log.isEnabledFor(logging.INFO):
                _log_once(name, replace(facts, B=0, T=0, N=0))
            return implementation(name)
    reasons = {name: _reasons(name, facts) for name in TABLE}
    able = [name for name, listed in reasons.items() if not listed]
    if impl != "auto":
        hint = f"; {', '.join(able)} could" if able else ""
        listed = {impl: against, **{name: others for name, others in reasons.items() if name != impl}}
        raise Unsupported(f"impl={impl!r} cannot run this call{hint}:", {n: r for n, r in listed.items() if r})
    hint = f" impl={able[0]!r} can, in plain PyTorch." if able else ""
    where = f"on a {facts.device} tensor auto takes {' or '.join(candidates) or 'nothing'}"
    raise Unsupported(f"no implementation for this call: {where}.{hint}", {n: r for n, r in reasons.items() if r})


@lru_cache(maxsize=64)
def _warn_once(name: str, missing: str) -> None:
    """The faster one is a command away, which a caller who never asks `explain` would not find out."""
    log.warning("%s would run this call, but: %s Until then auto takes the next best.", name, missing)


@lru_cache(maxsize=4096)
def _log_once(name: str, kind: Facts) -> None:
    log.info("%s runs calls of this kind: %s", name, kind)
