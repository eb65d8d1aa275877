"""The accuracy suite: the families of inputs against the specification in fp64, in all and along the sequence."""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch

from kda import dispatch
from kda.bench import forward
from kda.bench.session import Column, Row, Session, Table, code, plain
from kda.numerics import Rounding
from kda.problem import Output
from kda.ref.error import SIGMAS, Deviation, Expected, deviation, token_sigmas
from kda.testing.cases import FAMILIES, Case, arguments
from kda.testing.judge import expected, facts_of, on_cpu

#: Tokens whose errors are taken together.
BLOCK = 32
#: Where the rows of the table of positions begin and end.
OCTAVES = (0, 32, 64, 128, 256, 512, 1024, 2048)

_SIGMA = f"standard deviations of the roundings that the implementation declares; more than {SIGMAS:g} are a bug"


def _octave(start: int, stop: int, value: Callable[[Row, int, int], str]) -> Column:
    return Column(f"{start}-{stop - 1}", lambda row: value(row, start // BLOCK, stop // BLOCK))


def _rms(row: Row, start: int, stop: int) -> str:
    reference = sum(row["reference2"][start:stop])
    return f"{100 * math.sqrt(sum(row['error2'][start:stop]) / reference):.2f}" if reference else ""


def _worst(row: Row, start: int, stop: int) -> str:
    return f"{max(row['sigma'][start:stop]):.1f}" if row["sigma"][start:stop] else ""


TABLES = {
    "accuracy": Table(
        "Accuracy: RMS error / RMS reference against fp64",
        f"T = 2048 and H = 4 (on a CPU 512 and 1; ragged: 1241 and 4), K = V = 128, bf16. Worst sigma: the largest "
        f"error of a token's output or a state's channel, in {_SIGMA}. Peers declare none.",
        (
            Column("inputs", plain("family")),
            Column("implementation", code("implementation")),
            Column("o", lambda row: f"{row['rms_o']:.2e}"),
            Column("state", lambda row: f"{row['rms_state']:.2e}"),
            Column("worst sigma", lambda row: f"{row['sigma']:.2f}" if row["ours"] else ""),
        ),
    ),
    "worst": Table(
        "Accuracy: the worst case of each implementation",
        "Over the families above; peers in the roundings that the last of ours declares. The command repeats it.",
        (
            Column("implementation", code("implementation")),
            Column("inputs", plain("family")),
            Column("sigma", lambda row: f"{row['sigma']:.2f}"),
            Column("where", plain("where")),
            Column("command", lambda row: f"`{row['command']}`", aside=True),
        ),
    ),
    "rms by position": Table(
        "Accuracy: RMS error of o in % of the reference's RMS, by the token's position",
        "",
        (
            Column("inputs", plain("family")),
            Column("implementation", code("implementation")),
            *(_octave(a, b, _rms) for a, b in itertools.pairwise(OCTAVES)),
        ),
    ),
    "sigma by position": Table(
        "Accuracy: worst error of o in sigma, by the token's position",
        "In the roundings that the implementation declares; peers in those of the last of ours.",
        (
            Column("inputs", plain("family")),
            Column("implementation", code("implementation")),
            *(_octave(a, b, _worst) for a, b in itertools.pairwise(OCTAVES)),
        ),
    ),
}


#: What the oracle is asked.
Job = tuple[Case, Rounding]


def _oracle(job: Job) -> Expected:
    torch.set_num_threads(1)  # the oracle's matrices are tiny: a second thread only waits
    return expected(*job)


def _oracles(session: Session, jobs: list[Job]) -> dict[Job, Expected]:
    """The oracle's results, by as many processes as there are cores."""
    if session.device == "cpu":  # small, and the cores are busy
        return {job: expected(*job) for job in session.over("specification in fp64", jobs)}
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs)), get_context("spawn")) as pool:
        results = session.over("specification in fp64", pool.map(_oracle, jobs), len(jobs))
        return dict(zip(jobs, results, strict=True))


def _by_position(o: torch.Tensor, exact: Expected) -> dict[str, list[float]]:
    """Squares of errors and references, and the worst sigma, of blocks of tokens of a single sequence."""

    def blocks(x: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        return [float(reduce(block)) for block in x[0].split(BLOCK)]

    return {
        "error2": blocks((o.double() - exact.o).square(), torch.sum),
        "reference2": blocks(exact.o.square(), torch.sum),
        "sigma": blocks(token_sigmas(o, exact), torch.max),
    }


def _where(d: Deviation) -> str:
    if d.sigma_o >= d.sigma_state:
        return f"o at (row, token, head) {d.where_o}"
    return f"state at (sequence, head, channel) {d.where_state}"


def rows(session: Session) -> dict[str, list[Row]]:
    """Judge every family; what leaves the tolerance goes to the session's wrongs."""
    cases: dict[str, Case] = {}
    runs: list[tuple[str, str, Callable[[], Output], Job]] = []
    jobs: dict[Job, None] = {}
    for family, full in FAMILIES.items():
        case = full if session.device == "cuda" or len(full.lengths) > 1 else replace(full, lengths=(512,), H=1)
        cases[family] = case
        facts = facts_of(case, session.device)
        calls = forward.callables(session, case, arguments(case, session.device))
        last = [name for name in calls if name in dispatch.TABLE][-1]
        for name, run in calls.items():
            job = case, dispatch.implementation(name if name in dispatch.TABLE else last).rounding(facts)
            jobs[job] = None
            runs.append((family, name, run, job))
    oracle = _oracles(session, [*jobs])
    found: dict[str, list[Row]] = {name: [] for name in TABLES}
    worst: dict[str, Row] = {}
    for family, name, run, job in runs:
        ours = name in dispatch.TABLE
        done = run() if ours else session.attempt(name, family, run)
        if done is None:
            continue
        result = on_cpu(done)
        d = deviation(result, oracle[job])
        row: Row = {"family": family, "implementation": name, "ours": ours}
        found["accuracy"].append(row | {"rms_o": d.rms_o, "rms_state": d.rms_state, "sigma": d.sigma})
        if len(cases[family].lengths) == 1:
            by_position = row | _by_position(result.o, oracle[job])
            found["rms by position"].append(by_position)
            found["sigma by position"].append(by_position)
        text = repr(cases[family])
        command = f"python -m kda replay --impl {name} {shlex.quote(text)}" if ours else f"the inputs of {text}"
        if ours and not d.accepted:
            session.wrong.append(f"{name} on {family}: {d.sigma:.1f} sigma; not timed. {command}")
            session.faulty.add(name)
        if name not in worst or d.sigma > worst[name]["sigma"]:
            worst[name] = row | {"sigma": d.sigma, "where": _where(d), "command": command}
    found["worst"] = [*worst.values()]
    return found
