"""Whether the chain is cut into segments, and into which: a pure function of a call's facts and the processors.

A recurrence has as many chains as sequences, heads and blocks of V; fewer than a GPU has room for leave it idle. A cut
costs a second walk, of the local states and the transitions, so it pays for few long chains only (`kda.triton.recur`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kda.numerics import CHUNK
from kda.problem import Facts
from kda.triton.config import TOKENS, tiles

#: Measured on an H200, K = V = 128 in bf16: microseconds that a processor takes for a chunk of each of its programs, by
#: their number, with output and for the local states; for a merge; for two more launches; and for a call on the host.
WALK = (0.0, 0.95, 1.44)
LOCAL = (0.0, 0.78, 0.86)
MERGE = 3.8
LAUNCHES = 12.0
HOST = 100.0

#: What a cut must promise, as part of the time without one: the model is not exact, and lengths are not known.
WORTH = 0.85

#: The most pairs of a state and a transition, of one segment and head, that are kept: 64 MiB for K = V = 128.
MOST = 512


@dataclass(frozen=True)
class Split:
    """segment: tokens, a multiple of CHUNK; places: for segments, see `kda.triton.math.piece_of`."""

    segment: int
    places: int


def _time(programs: int, chunks: int, each: tuple[float, ...], processors: int) -> float:
    """Microseconds for programs of so many chunks: rounds that fill the processors, and the rest spread evenly."""
    room = len(each) - 1
    rounds, rest = divmod(programs, room * processors)
    return chunks * (rounds * each[room] + each[-(-rest // processors)])


def estimate(tokens: int, chains: int, blocks_v: int, blocks_k: int, segments: int, processors: int) -> float:
    """Microseconds of the recurrence for `chains` sequences and heads of so many tokens, cut into segments or not."""
    chunks = -(-tokens // (segments * TOKENS))
    walk = _time(chains * segments * blocks_v, chunks, WALK, processors)
    if segments == 1:
        return walk
    programs = chains * ((segments - 1) * blocks_v + (segments - 2) * blocks_k)
    return walk + _time(programs, chunks, LOCAL, processors) + (segments - 2) * MERGE + LAUNCHES


def places(facts: Facts, segment: int) -> int:
    """Places for the segments of a call: as many as any lengths can need."""
    return facts.T // segment + facts.N if facts.varlen else facts.B * -(-facts.T // segment)


def plan(facts: Facts, processors: int) -> Split | None:
    """The segments that promise the shortest time, or None. Packed sequences are taken to be of equal lengths."""
    chains = facts.N * facts.HV
    if facts.batch_invariant or processors == 0 or chains == 0:
        return None
    tokens = facts.T // facts.N if facts.varlen else facts.T
    block_v = tiles(facts).block_v
    blocks = -(-facts.V // block_v), -(-facts.K // block_v)
    whole = estimate(tokens, chains, *blocks, 1, processors)
    if whole < HOST:
        return None
    best, shortest = None, WORTH * whole
    for segments in range(2, tokens // (2 * CHUNK) + 1):
        segment = -(-tokens // (segments * CHUNK)) * CHUNK
        split = Split(segment, places(facts, segment))
        if split.places * facts.HV > MOST:
            break
        time = estimate(tokens, chains, *blocks, segments, processors)
        if time < shortest:
            best, shortest = split, time
    return best
