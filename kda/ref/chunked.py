"""KDA by chunks of 64 tokens in plain PyTorch: the algorithm of the kernels, stage by stage, for every gate <= 0.

Write G for the cumulative log decay inside a chunk and beta, k, q, v for its rows. With

    Kd = k exp(G)      Qd = q exp(G)      Kr = k exp(G_end - G)
    L[i, j] = beta-free strict lower part of  sum_c k_ic k_jc exp(G_ic - G_jc)        M: the same for q, with diagonal
    A  = (I + diag(beta) L)^-1 diag(beta)         Ak = A^T Kr        Aq = M A

the state S at the chunk's start gives the outputs and the next state in two dependent products:

    R = V - Kd S          O = Qd S + Aq R          S' = diag(exp(G_end)) S + Ak^T R

Two stages, named as the kernels': `prepare` makes Kd, Qd, Ak, Aq and the chunk's decay, all token-parallel; `recur`
walks the chunks with the state.

No exponent is ever positive and no sum of log decays is ever subtracted from another, for any gate down to -inf. The
lower triangle is built by doubling: blocks of b tokens are paired, and between a token j of the left and a token i of
the right block the decay factors at the boundary as exp(forward_i) exp(reverse_j), where `forward` sums the log decays
from the boundary up to i and `reverse` those after j up to the boundary. Both factors are at most 1, both depend on
tokens up to i alone, so outputs are causal to the bit. The inverse is built in the same doubling,
[[T1, 0], [-T2 X T1, T2]], so it never meets a power of L.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import threshold

from kda.gate import activate_beta, l2norm, problem_log_decay
from kda.numerics import CHUNK, Rounding
from kda.problem import Facts, Implementation, Output, Problem, computed_in
from kda.ref import states

#: Elements of one [chunks, HV, CHUNK, K] temporary of `prepare`.
GROUP = 1 << 18

Operand = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """The operand rounding of this implementation: none. Tests pass the rounding of a kernel to emulate it."""
    return x


class Tiles(NamedTuple):
    """How the ragged batch is cut into chunks. X chunks in all, numbered sequence after sequence."""

    token: Tensor  # [X, CHUNK] row of the flattened [B * T] token axis; 0 where there is none
    valid: Tensor  # [X, CHUNK] whether there is one
    first: list[int]  # [N] the sequence's first chunk
    chunks: list[int]  # [N] its number of chunks
    full: bool  # every chunk has all its tokens


class Packets(NamedTuple):
    """What `recur` needs of each chunk; everything token-parallel is folded in."""

    Kd: Tensor  # [X, HV, CHUNK, K]
    Qd: Tensor  # [X, HV, CHUNK, K]
    Ak: Tensor  # [X, HV, CHUNK, K]
    Aq: Tensor  # [X, HV, CHUNK, CHUNK]
    decay: Tensor  # [X, HV, K] exp(G_end)
    V: Tensor  # [X, HV, CHUNK, V]


def tile(problem: Problem) -> Tiles:
    """Cut every sequence into chunks from its own start; the last one is padded."""
    T = problem.facts.T
    starts: list[int] = []
    lengths: list[int] = []
    first: list[int] = []
    chunks: list[int] = []
    for row, start, stop in states.spans(problem):
        first.append(len(starts))
        for at in range(start, stop, CHUNK):
            starts.append(row * T + at)
            lengths.append(min(CHUNK, stop - at))
        chunks.append(len(starts) - first[-1])
    device = problem.q.device
    offset = torch.arange(CHUNK, device=device)
    valid = offset < torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
    token = torch.tensor(starts, dtype=torch.long, device=device)[:, None] + offset
    return Tiles(torch.where(valid, token, 0), valid, first, chunks, full=all(x == CHUNK for x in lengths))


def split(tiles: Tiles, channels: int) -> Iterator[Tiles]:
    """The same chunks in groups whose temporaries stay in the cache, each with the sequences' chunks that lie in it."""
    size = max(1, GROUP // max(1, CHUNK * channels))
    for start in range(0, len(tiles.token), size):
        token, valid = tiles.token[start : start + size], tiles.valid[start : start + size]
        ends = [first + chunks for first, chunks in zip(tiles.first, tiles.chunks, strict=True)]
        first = [max(first - start, 0) for first in tiles.first]
        chunks = [max(min(end - start, len(token)) - at, 0) for end, at in zip(ends, first, strict=True)]
        yield Tiles(token, valid, first, chunks, full=bool(valid.all()))


def gather(x: Tensor, tiles: Tiles, dtype: torch.dtype) -> Tensor:
    """[B, T, H, ...] -> [X, H, CHUNK, ...] in `dtype`, zero where a chunk has no token (whatever lies there)."""
    x = x.flatten(0, 1)[tiles.token].to(dtype).transpose(1, 2)
    return x if tiles.full else masked(x, tiles)


def masked(x: Tensor, tiles: Tiles) -> Tensor:
    """x [X, H, CHUNK, ...] with zeros where a chunk has no token; a select, so that NaN there vanishes too."""
    valid = tiles.valid.reshape(len(tiles.valid), 1, CHUNK, *[1] * (x.dim() - 3))
    return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))


def pairs(x: Tensor, b: int) -> Tensor:
    """[..., CHUNK, D] -> [..., pairs, 2, b, D]: the left and the right block of every pair of b-blocks."""
    return x.unflatten(-2, (-1, 2, b))


def doubled(forward: Tensor, reverse: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The sums of log decays inside blocks of 2 b tokens, from those inside blocks of b."""
    f, r = pairs(forward, b), pairs(reverse, b)
    left, right = f[..., :1, -1:, :], f[..., 1:, -1:, :]  # totals of each block
    f = f + torch.cat([torch.zeros_like(left), left], -3)
    r = r + torch.cat([right, torch.zeros_like(right)], -3)
    return f.flatten(-4, -2), r.flatten(-4, -2)


def decayed(log: Tensor) -> Tensor:
    """exp, with 0 for what is below the smallest normal number: a CPU is many times slower on what lies between."""
    return threshold(log, math.log(torch.finfo(log.dtype).tiny), -math.inf).exp()


def prepare(problem: Problem, tiles: Tiles, operand: Operand = exact, inverse: Operand = exact) -> Packets:
    """The token-parallel stage. `operand` and `inverse` round what a kernel would round before its products."""
    facts, dtype = problem.facts, problem.compute_dtype
    q, k = gather(problem.q, tiles, dtype), gather(problem.k, tiles, dtype)
    if facts.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q * problem.scale
    if problem.group() > 1:
        q, k = (x.repeat_interleave(problem.group(), dim=1) for x in (q, k))
    a = rearrange(gather(problem.g, tiles, dtype), "x h c k -> x c h k")
    a = rearrange(problem_log_decay(problem, a), "x c h k -> x h c k")
    beta = activate_beta(gather(problem.beta, tiles, dtype), facts)  # [X, HV, CHUNK]
    if not tiles.full:
        a, beta = masked(a, tiles), masked(beta, tiles)

    # One token is a block of its own: forward = its own decay, reverse = 0, M = q.k, T = 1.
    forward, reverse = a, torch.zeros_like(a)
    M = rearrange((operand(q) * operand(k)).sum(-1), "... n -> ... n 1 1")
    T = torch.ones_like(M)
    b = 1
    while b < CHUNK:
        left = operand(pairs(k, b)[..., 0, :, :] * decayed(pairs(reverse, b)[..., 0, :, :])).transpose(-1, -2)
        into = decayed(pairs(forward, b)[..., 1, :, :])
        L_new = operand(pairs(k, b)[..., 1, :, :] * into) @ left  # [..., pairs, b, b]
        M_new = operand(pairs(q, b)[..., 1, :, :] * into) @ left
        M = blocks(M, M_new)
        X = L_new * pairs(beta[..., None], b)[..., 1, :, :]
        T_l, T_r = T[..., 0::2, :, :], T[..., 1::2, :, :]
        T = blocks(T, -(inverse(T_r) @ inverse(inverse(X) @ inverse(T_l))))
        forward, reverse = doubled(forward, reverse, b)
        b *= 2

    M, T = M.squeeze(-3), T.squeeze(-3)
    A = inverse(T * beta[..., None, :])
    Kr = operand(k * decayed(reverse))
    e = decayed(forward)
    return Packets(
        Kd=operand(k * e),
        Qd=operand(q * e),
        Ak=operand(A.transpose(-1, -2) @ Kr),
        Aq=operand(inverse(M) @ A),
        decay=e[..., -1, :],
        V=gather(problem.v, tiles, dtype),
    )


def blocks(diagonal: Tensor, below: Tensor) -> Tensor:
    """[..., 2n, b, b] diagonal blocks and [..., n, b, b] blocks below them -> [..., n, 2b, 2b]."""
    top = torch.cat([diagonal[..., 0::2, :, :], torch.zeros_like(below)], dim=-1)
    return torch.cat([top, torch.cat([below, diagonal[..., 1::2, :, :]], dim=-1)], dim=-2)


def recur(
    packets: Packets,
    tiles: Tiles,
    initial: list[Tensor],
    operand: Operand = exact,
    after: Callable[[int, Tensor], None] = lambda n, state: None,
) -> tuple[Tensor, list[Tensor]]:
    """Walk the chunks, all sequences at once. initial: N of [HV, K, V]. Returns o [X, HV, CHUNK, V] and new states.

    after: called with a sequence and its state after each of its chunks.
    """
    current = list(initial)
    o: dict[int, Tensor] = {}
    for step in range(max(tiles.chunks)):
        active = [n for n, chunks in enumerate(tiles.chunks) if chunks > step]
        chunks = [tiles.first[n] + step for n in active]
        at = chunks if len(chunks) > 1 else slice(chunks[0], chunks[0] + 1)  # a view, for a single sequence
        Kd, Qd, Ak, Aq, decay, V = (x[at] for x in packets)
        S = torch.stack([current[n] for n in active])
        rounded = operand(S)
        R = operand(V - Kd @ rounded)
        O = Qd @ rounded + Aq @ R
        S = decay[..., None] * S + Ak.transpose(-1, -2) @ R
        o.update(zip(chunks, O, strict=True))
        for n, state in zip(active, S, strict=True):
            current[n] = state
            after(n, state)
    return torch.stack([o[chunk] for chunk in range(len(o))]), current


def fwd(problem: Problem, operand: Operand = exact, inverse: Operand = exact) -> Output:
    """`kda.fwd` by chunks. Rows that belong to no sequence are zero; an empty sequence keeps its state."""
    facts, dtype = problem.facts, problem.compute_dtype
    tiles = tile(problem)
    initial = states.initial(problem)
    checkpoints = states.Checkpoints(problem)
    left = [stop - start for _, start, stop in states.spans(problem)]
    tokens = [0] * facts.N

    def keep(n: int, state: Tensor) -> None:
        tokens[n] += min(CHUNK, left[n] - tokens[n])
        checkpoints.keep(n, tokens[n], state)

    final = list(initial)
    o = torch.zeros(facts.B * facts.T, facts.HV, facts.V, dtype=dtype, device=problem.q.device)
    pieces = []
    for part in split(tiles, facts.HV * facts.K):
        piece, final = recur(prepare(problem, part, operand, inverse), part, final, operand, keep)
        pieces.append(piece.transpose(1, 2)[part.valid])
    if pieces:
        o.index_put_((tiles.token[tiles.valid],), torch.cat(pieces))
    return states.output(problem, o.reshape(problem.v.shape), (torch.stack(final) if final else initial).mT)


def _reasons(facts: Facts) -> list[str]:
    if facts.operation != "fwd":
        return [f"there is no {facts.operation} here, where tokens come by the chunk; recurrent has one."]
    return []


def _rounding(facts: Facts) -> Rounding:
    dtype = computed_in(facts.dtype)
    return Rounding.uniform(dtype, output=facts.dtype, stored_state=facts.state_dtype, chunk=CHUNK)


IMPL = Implementation(
    name="chunked",
    summary="the same function by chunks of 64 tokens in PyTorch; any device, differentiable; the default on a CPU",
    reasons=_reasons,
    rounding=_rounding,
    fwd=fwd,
)
