"""How far a correct implementation may be from the specification: rounding error, propagated by the recurrence.

A rounding error of the state obeys the state's own recurrence. With A_t = (I - beta k k^T) diag(exp(a_t)) a covariance
P (K x K) of the state's error follows P <- A_t P A_t^T + (variance of the roundings of this token), which gives one
standard deviation for every token's output and every key channel of the state, from nothing but the unit roundoffs an
implementation declares (`kda.numerics.Rounding`).

An implementation that folds a chunk of tokens into one update holds, for each token t of the chunk, the vector W_t in
K that its residual has become by now: W_t = beta_t k_t at first, then W <- A_s W with every later token s. These are
the rows of Ak; -beta_s k_s^T diag(exp(a_s)) W_t are the entries of the chunk's triangular inverse, q_s^T W_t those of
Aq. Their roundings, times the residuals, join P where the chunk ends. The inverse is rounded twice: by the products
that make it, whose errors obey the recurrence like P, and when it is used; that error decays to the chunk's end but is
not erased by later updates: D <- diag(exp(a_t)) D diag(exp(a_t)) + (its variance along k_t).

Where inputs repeat, roundings repeat: the same key gives the same rounding error, token after token, and errors add up
in amplitude, not in variance. So tokens whose key (or gate) occurs more than once in their sequence also feed a matrix
F <- A_t F + (amplitude of the roundings), one column per independent source; its rows' norms are the coherent part.

A sum over K that reads the state is accumulated term by term: every partial sum is rounded to the accumulator's dtype.

V columns never mix and everything is linear in them, so each column is measured in units of its own largest input, and
errors are compared as RMS over V. One rounding to nearest has the variance u^2 x^2 / 3 at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, einsum

from kda.numerics import Rounding, unit_roundoff
from kda.problem import Output, Problem
from kda.ref import recurrent, states

#: Variance of one rounding to nearest with unit roundoff 1.
ONE = 1 / 3

#: A result is accepted within this many standard deviations.
SIGMAS = 6.0

#: How many errors it takes to speak of their typical size.
MANY = 64


@dataclass(frozen=True)
class Expected:
    """The specification's result in fp64 with one standard deviation of rounding error.

    o:           [B, T, HV, V]          sigma_o:     [B, T, HV]     RMS over V, in units of `column`
    final_state: [N, HV, V, K]          sigma_state: [N, HV, K]     RMS over V, in units of `column`
    column:      [N, HV, V] unit of each V column of a sequence
    sequence:    [B, T] sequence of each token, -1 for padding
    """

    o: Tensor
    final_state: Tensor
    sigma_o: Tensor
    sigma_state: Tensor
    column: Tensor
    sequence: Tensor


@dataclass(frozen=True)
class Deviation:
    """How far a result is from the expected one.

    sigma_o, sigma_state: worst error in standard deviations (inf if anything is not finite that should be).
    rms_o, rms_state:     RMS error over RMS reference, over the whole tensor.
    typical:  RMS of the errors in standard deviations over all tokens or channels, the larger of o and state; 0 where
              there are fewer than MANY. The deviations are upper bounds, so independent roundings stay below 1, and a
              small error everywhere (1 % of one product) does not.
    where_o: (row, token, head) and where_state: (sequence, head, channel) of the worst.
    """

    sigma_o: float
    sigma_state: float
    rms_o: float
    rms_state: float
    where_o: tuple[int, ...]
    where_state: tuple[int, ...]
    typical: float = 0.0

    @property
    def sigma(self) -> float:
        return max(self.sigma_o, self.sigma_state)

    @property
    def accepted(self) -> bool:
        return self.sigma <= SIGMAS


def _repeats(x: Tensor) -> Tensor:
    """x: [T, H, K] -> [T, H], 1 where the row stands at another token of this sequence too, else 0."""
    result = torch.zeros(x.shape[:2], dtype=torch.float64, device=x.device)
    for head in range(x.shape[1]):
        _, inverse, counts = torch.unique(x[:, head], dim=0, return_inverse=True, return_counts=True)
        result[:, head] = (counts[inverse] > 1).double()
    return result


def expect(problem: Problem, rounding: Rounding) -> Expected:
    """Run the specification on a problem whose tensors are fp64 and propagate the declared roundings beside it."""
    facts = problem.facts
    if facts.dtype != torch.float64:
        raise TypeError(f"expect: the oracle runs in fp64, got a problem in {facts.dtype}")
    initial = states.initial(problem)
    HV, K, V, device = facts.HV, facts.K, facts.V, initial.device

    spans = states.spans(problem)
    sequence = torch.full((facts.B, facts.T), -1, device=device)
    column = torch.zeros(facts.N, HV, V, dtype=torch.float64, device=device)
    repeated_k = torch.zeros(facts.B, facts.T, HV, dtype=torch.float64, device=device)
    repeated_a = torch.zeros_like(repeated_k)
    for n, (row, start, stop) in enumerate(spans):
        sequence[row, start:stop] = n
        column[n] = initial[n].abs().amax(-2)
        if stop > start:
            column[n] = torch.maximum(column[n], problem.v[row, start:stop].abs().amax(0))
            repeated_k[row, start:stop] = _repeats(problem.k[row, start:stop]).repeat_interleave(problem.group(), 1)
            repeated_a[row, start:stop] = _repeats(problem.g[row, start:stop])
    column = torch.where(column > 0, column, 1.0)

    u2 = {name: ONE * getattr(rounding, name) ** 2 for name in ("operand", "inverse", "gate", "state", "output")}
    o = torch.zeros(facts.B, facts.T, HV, V, dtype=torch.float64, device=device)
    var_o = torch.zeros(facts.B, facts.T, HV, dtype=torch.float64, device=device)
    final = initial.clone()
    var_state = torch.zeros(facts.N, HV, K, dtype=torch.float64, device=device)
    diagonal = partial(torch.diagonal, dim1=-2, dim2=-1)

    def folded(W: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk's end: [HV, K, chunk] X with X X^T from Ak and the residual rounded twice, and [HV, K] on the
        diagonal from Ak's own roundings and the coefficients too small for it."""
        own = u2["operand"] * (W.square() * residual[:, None]).sum(-1) + rounding.lost**2 * residual.sum(-1)[:, None]
        return (2 * u2["operand"] * residual[:, None]).sqrt() * W, own

    def partial_sums(x: Tensor, S: Tensor, unit: Tensor) -> Tensor:
        """[HV, 1] squares of the partial sums of x^T S, each of which is rounded when it is accumulated."""
        return ((x[:, :, None] * S).cumsum(1) / unit[:, None]).square().sum(1).mean(-1, keepdim=True)

    last = -1
    for step in recurrent.steps(problem):
        n, at = step.sequence, (step.row, step.token)
        if n != last:
            P, D = torch.zeros(2, HV, K, K, dtype=torch.float64, device=device)
            F, E = torch.zeros(2, HV, K, K + 1, dtype=torch.float64, device=device)  # amplitudes: of P, of D
            repeats = bool(repeated_k[step.row, step.token : spans[n].stop].any()) or bool(
                repeated_a[step.row, step.token : spans[n].stop].any()
            )  # without any, F and E stay zero
            last = n
            W, keys = torch.zeros(2, HV, K, rounding.chunk, dtype=torch.float64, device=device)  # keys: decayed only
            # Mean squares of the chunk's residuals, and of what each row of the inverse makes of them.
            residual, mixed_by = torch.zeros(2, HV, rounding.chunk, dtype=torch.float64, device=device)
        place = (step.token - spans[n].start) % rounding.chunk
        if place == 0:
            X, own = folded(W, residual)
            P.add_(D).baddbmm_(X, X.mT)
            diagonal(P).add_(own)
            F.add_(E)
            for x in (D, E, W, keys, residual, mixed_by):
                x.zero_()
            base = (final[n] / column[n][:, None]).square().mean(-1)  # [HV, K] the state at the chunk's start
        unit = column[n]
        kt, qt, bt, decay = step.k, step.q, step.beta[:, None], step.log_decay.exp()

        # Mean squares over V: the state before and after the update, and all that meets in the residual.
        before = (step.decayed / unit[:, None]).square().mean(-1)  # [HV, K]
        after = (step.state / unit[:, None]).square().mean(-1)
        base = decay.square() * base
        met = (step.v / unit).square().mean(-1, keepdim=True)
        met = met + (kt.square() * torch.maximum(before, base)).sum(-1, keepdim=True)  # [HV, 1]
        written = bt.square() * kt.square() * met  # [HV, K] what the update adds to the state
        asked, read_sum = (u2["state"] * partial_sums(x, S, unit) for x, S in ((kt, step.decayed), (qt, step.state)))

        # Row t of the inverse, then the residuals as they are now.
        W, keys = W.mul_(decay[:, :, None]), keys.mul_(decay[:, :, None])
        met_before = (bt * einsum("hi,hit->ht", kt, keys)).square() * mixed_by
        entries = -bt * einsum("hi,hit->ht", kt, W)  # [HV, chunk]
        W.baddbmm_(kt[:, :, None], entries[:, None, :])
        entries[:, place], W[:, :, place], residual[:, place] = bt[:, 0], bt * kt, met[:, 0]
        keys[:, :, place], mixed_by[:, place] = kt, (entries.square() * residual).sum(-1)

        # Kr is rounded element by element; the inverse along k, where it is made and where it is used.
        element = u2["operand"] * written
        # As does the sum over K that reads the state.
        made = (
            3 * u2["inverse"] * (met_before.sum(-1, keepdim=True) + bt.square() * met) + bt.square() * asked
        )  # [HV, 1]
        common = 3 * u2["inverse"] * mixed_by[:, place, None]  # [HV, 1]
        finite = torch.nan_to_num(step.log_decay, neginf=0.0)  # exp(-inf) is exact
        faded = u2["gate"] * (1 + finite.square()) * torch.maximum(before, base)
        floor = (rounding.flushed / unit).square().mean(-1, keepdim=True)  # [HV, 1]
        kept = u2["state"] * (torch.maximum(after, base) + written) + floor

        both = decay[:, :, None] * decay[:, None, :]
        P.mul_(both)
        w = einsum("hij,hj->hi", P, kt)
        u = bt * w - 0.5 * bt.square() * (kt * w).sum(-1, keepdim=True) * kt
        P.baddbmm_(torch.stack([kt, u], -1), torch.stack([made * kt - u, -kt], 1))
        D.mul_(both).baddbmm_((common * kt)[:, :, None], kt[:, None, :])
        diagonal(D).add_(element + faded + kept)

        if repeats:
            # An update past zero (beta |k|^2 > 1) turns the state's sign along k, and that of the errors to come with
            # it: they add up as if it did not turn.
            square = kt.square().sum(-1, keepdim=True)
            turned = torch.where(bt * square > 1, 2 / square - bt, bt)
            F.mul_(decay[:, :, None])
            F.baddbmm_((turned * kt)[:, :, None], kt[:, None, :] @ F, alpha=-1)
            again = repeated_k[at][:, None]
            E.mul_(decay[:, :, None])
            own = again * rounding.operand * (3 * written).sqrt() + repeated_a[at][:, None] * (3 * faded).sqrt()
            diagonal(E).add_(own)  # of its first K columns
            E[..., K] += again * (3 * common + 2 * rounding.operand**2 * bt.square() * met).sqrt() * kt

        # The output reads the state through Qd and through Aq R, then is rounded itself.
        read = (qt.square() * (torch.maximum(before, base) + after)).sum(-1)
        mixed = (einsum("hi,hit->ht", qt, W).square() * residual).sum(-1)
        coherent = F + E if repeats else F
        random = (qt * ((P + D) @ qt[:, :, None])[..., 0]).sum(-1)
        var_o[at] = (
            random
            + (qt[:, None, :] @ coherent)[:, 0].square().sum(-1)
            + rounding.lost**2 * residual.sum(-1) * qt.square().sum(-1)
            + 2 * u2["operand"] * read
            + 4 * u2["operand"] * mixed
            + read_sum[:, 0]
            + floor[:, 0] * qt.square().sum(-1)
            + u2["output"] * (step.o / unit).square().mean(-1)
        )
        o[at] = step.o
        final[n] = step.state
        if step.token + 1 == spans[n].stop:
            X, own = folded(W, residual)
            var_state[n] = diagonal(P) + diagonal(D) + X.square().sum(-1) + own + coherent.square().sum(-1)
    stored = ONE * rounding.stored_state**2 * (final / column[:, :, None]).square().mean(-1)
    # A decay below the smallest normal number is lost whole, however large what it multiplies. For fp64 the limit is
    # this function's own: it computes with squares, and those of smaller numbers are lost.
    in_fp64 = rounding.state < unit_roundoff(torch.float32)
    flushed = torch.finfo(torch.float64).tiny ** 0.5 if in_fp64 else torch.finfo(torch.float32).tiny
    sigma_o, sigma_state = var_o.sqrt() + flushed, (var_state + stored).sqrt() + flushed
    return Expected(o, final.transpose(-1, -2), sigma_o, sigma_state, column, sequence)


def _underflow(dtype: torch.dtype, column: Tensor) -> Tensor:
    """RMS over V, in units of the column, of rounding to the spacing of the smallest numbers of `dtype`."""
    # Kernels may flush what is below the smallest normal number to zero.
    return (torch.finfo(dtype).tiny / column).square().mean(-1).sqrt()


def _typical(ratio: Tensor) -> float:
    return float(ratio.square().mean().sqrt()) if ratio.numel() >= MANY else 0.0


def _compare(actual: Tensor, expected: Tensor, sigma: Tensor) -> tuple[float, Tensor, tuple[int, ...]]:
    """Errors [..., V] in units of the column against sigma [...]: worst ratio, all of them, and where the worst is."""
    error = (actual - expected).square().mean(-1).sqrt()
    ratio = torch.where(error > 0, error / sigma, 0.0)
    ratio = torch.where(torch.isfinite(error), ratio, torch.inf)
    if ratio.numel() == 0:
        return 0.0, ratio, ()
    worst = int(ratio.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
    return float(ratio.flatten()[worst]), ratio, where


def _rms_ratio(actual: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    error = (actual - expected).square().mean().sqrt()
    reference = expected.square().mean().sqrt()
    return float(error / reference) if reference > 0 else float(error)


def _comparable(o: Tensor, expected: Expected) -> Tensor:
    """An output in fp64: where it is infinite because its dtype has nothing larger, the expected number."""
    want = expected.o.to(o.dtype).double()
    o = o.double()
    return torch.where(torch.isinf(want) & (o == want), expected.o, o)


def _errors_of_o(o: Tensor, dtype: torch.dtype, expected: Expected) -> tuple[float, Tensor, tuple[int, ...]]:
    """Worst, all [B, T, HV] and where, of the errors in standard deviations of a comparable output of `dtype`."""
    padded = torch.cat([expected.column, torch.ones_like(expected.o[0, :1])])  # sequence -1 is padding
    unit = padded[expected.sequence]
    padding = (expected.sequence < 0)[..., None, None]
    o = torch.where(padding & (o != 0), torch.inf, o)  # padding is exactly zero
    return _compare(o / unit, expected.o / unit, expected.sigma_o + _underflow(dtype, unit))


def token_sigmas(o: Tensor, expected: Expected) -> Tensor:
    """The error of every token and head, RMS over V, in the standard deviations that were expected: [B, T, HV]."""
    return _errors_of_o(_comparable(o, expected), o.dtype, expected)[1]


def deviation(result: Output, expected: Expected) -> Deviation:
    """Compare a result with what the specification and the declared roundings allow.

    A value beyond the largest number of the result's dtype is expected as that dtype's infinity.
    """
    o, state = _comparable(result.o, expected), result.final_state
    if expected.o.numel():
        sigma_o, ratio, where_o = _errors_of_o(o, result.o.dtype, expected)
        typical = _typical(ratio[expected.sequence >= 0])
    else:
        sigma_o, where_o, typical = 0.0, (), 0.0
    rms_o = _rms_ratio(o, expected.o)
    if state is None or state.numel() == 0:
        return Deviation(sigma_o, 0.0, rms_o, 0.0, where_o, (), typical)
    unit = expected.column[:, :, None]
    sigma = expected.sigma_state + _underflow(state.dtype, expected.column)[..., None]
    actual = state.double().transpose(-1, -2)
    sigma_state, ratio, where_state = _compare(actual / unit, expected.final_state.transpose(-1, -2) / unit, sigma)
    typical = max(typical, _typical(ratio))
    rms_state = _rms_ratio(state.double(), expected.final_state)
    return Deviation(sigma_o, sigma_state, rms_o, rms_state, where_o, where_state, typical)
