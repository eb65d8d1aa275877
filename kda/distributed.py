"""Context parallelism: `kda.fwd` on a packed batch whose tokens lie in contiguous slices on the ranks of a group.

Over the tokens of a rank a state goes through an affine map (`kda.transition`). So a rank does not have to wait until
the ranks before it are done: each computes what its own tokens do to the state of the sequence that goes on from there,
all of this is exchanged at once, and every rank applies the maps of those before it to find the state it begins from.

    first rank of a sequence      its state after these tokens, from its true initial state
    ranks in its middle           the transition (Phi, S_local) over their tokens
    every rank but the first      start = (...(state Phi_1 + S_1) Phi_2 + S_2 ...), then the ordinary forward pass

Who does which follows from the lengths alone, so all ranks know without asking: where no sequence crosses from one rank
to another nothing is exchanged, and Phi is computed and sent only if there is a rank in the middle of a sequence.

Not imported by `import kda`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from kda import api, dispatch
from kda.environment import switched_on
from kda.problem import Facts, Output, computed_in
from kda.transitions import applied, state_after, transition
from kda.validate import ranks as validate

__all__ = ["Piece", "fwd", "pieces"]


class Piece(NamedTuple):
    """The part of one sequence that lies on one rank.

    sequence: which one, of the whole batch.
    start, stop: its tokens, counted from the rank's first.
    begins: no earlier rank has tokens of the sequence; so its initial state is given here.
    ends:   no later rank has any; so its final state is found here.
    """

    sequence: int
    start: int
    stop: int
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Slices:
    """How packed sequences lie on ranks. Pure host logic: all ranks come to the same answers.

    offsets: [N + 1], cu_seqlens of the whole batch.
    bounds:  [ranks + 1], the tokens before each rank, and all.
    """

    offsets: list[int]
    bounds: list[int]

    def pieces(self, rank: int) -> list[Piece]:
        """In the order of the sequences. An empty one lies on the rank that has the next token, else on the last."""
        first, last = self.bounds[rank], self.bounds[rank + 1]
        found = []
        for n in range(bisect_left(self.offsets, first, 1) - 1, min(bisect_right(self.offsets, last), self._sequences)):
            start, stop = self.offsets[n], self.offsets[n + 1]
            at_the_end = rank == len(self.bounds) - 2 and start == last
            here = first <= start < last or at_the_end if start == stop else max(start, first) < min(stop, last)
            if here:
                inside = max(start, first) - first, min(stop, last) - first
                found.append(Piece(n, *inside, begins=start >= first, ends=stop <= last))
        return found

    @property
    def _sequences(self) -> int:
        return len(self.offsets) - 1

    def crossed(self) -> bool:
        """Whether any sequence has tokens on more than one rank."""
        places = ((bound, bisect_left(self.offsets, bound)) for bound in self.bounds)
        return any(at <= self._sequences and self.offsets[at] != bound for bound, at in places)

    def chained(self) -> bool:
        """Whether any rank has but tokens from the middle of a sequence: then its whole transition is needed."""
        return any(self._in_the_middle(first, last) for first, last in pairwise(self.bounds))

    def _in_the_middle(self, first: int, last: int) -> bool:
        n = bisect_right(self.offsets, first) - 1
        return first < last and n < self._sequences and self.offsets[n] < first and last < self.offsets[n + 1]

    def sources(self, rank: int) -> list[int]:
        """The ranks before, in order, that hold tokens of the sequence that this rank begins within; none if none."""
        here = self.pieces(rank)
        if not here or here[0].begins:
            return []
        start = self.offsets[here[0].sequence]
        return [s for s in range(rank) if self.bounds[s] < self.bounds[s + 1] and self.bounds[s + 1] > start]


def pieces(cu_seqlens: Tensor, split_sizes: Sequence[int], rank: int) -> list[Piece]:
    """The sequences with a part on a rank, in order: the rows of that rank's initial and final states in `fwd`.

    An empty sequence lies on the rank that has the token after it, and at the end of all tokens on the last rank.

    Args:
        cu_seqlens: [N + 1], int32 or int64, on the CPU: that of the whole batch.
        split_sizes: the number of tokens of every rank.
        rank: which of them.

    Raises:
        TypeError, ValueError: malformed; the message names the argument.
    """
    bounds = validate.bounds(split_sizes)
    validate.rank_of(rank, len(split_sizes))
    return Slices(validate.host_offsets(cu_seqlens, bounds[-1]), bounds).pieces(rank)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    split_sizes: Sequence[int] | None = None,
    group: distributed.ProcessGroup | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = True,
    use_beta_sigmoid: bool = True,
    allow_neg_eigval: bool = False,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Output:
    """`kda.fwd` of a packed batch, each rank of a process group with its slice of the tokens. Forward only.

    Every rank of the group calls it with the same `cu_seqlens`, `split_sizes`, heads, channels and dtype. A slice may
    begin and end anywhere and may be empty; a sequence may lie on any number of ranks. Arguments that are not below are
    those of `kda.fwd`; A_log, dt_bias, scale, bound and flags are the same on every rank.

    Args:
        q, k, v, g, beta, out: [1, T, ...] as in `kda.fwd`, T being this rank's tokens.
        initial_state: [M, HV, V, K]: a state for each of the M sequences with a part on this rank, in the order of
            `pieces`. Read for those that begin here; what it holds for one that began earlier does not matter.
        final_state: [M, HV, V, K]: buffer. Each state is that of its sequence after its last token on this rank: the
            final one where the sequence ends here.
        cu_seqlens: [N + 1] cumulative lengths of the whole batch, of all ranks, int32 or int64, on the CPU. Left out:
            one sequence of all tokens. Tokens from ``cu_seqlens[-1]`` on are padding.
        split_sizes: the number of tokens of every rank, in the group's order. As many as here on all, if left out.
        group: a process group whose backend takes the tensors' device (NCCL, Gloo). The default one if left out.

    Returns:
        `Output(o, final_state)`: this rank's tokens [1, T, HV, V] and states [M, HV, V, K].

    Raises:
        TypeError, ValueError, kda.Unsupported: as `kda.fwd`, and for what is said here; before anything is exchanged.
            The other ranks then wait for this one until their group's timeout.

    Where no sequence crosses from one rank to another, and so with one rank, the result is to the bit that of `kda.fwd`
    on the slice; as it is on any rank whose sequences all begin there. Where a sequence is cut, start states are put
    together in fp64 from transitions in fp32 (fp64 for fp64 inputs), whatever the states' dtype.

    One all_gather of [HV, V, K] numbers a rank, [HV, K + V, K] if a rank lies in the middle of a sequence. A rank there
    computes its transition first, which costs about two forward passes. Nothing waits for the device; lengths are read
    on the host, so a CUDA graph would keep those it was captured with. With ``KDA_CHECK=1``, on all ranks, they compare
    what they were given, and a difference is a ValueError on each.
    """
    rank, ranks = validate.membership(group)
    bounds = validate.own_tokens(q, split_sizes, rank, ranks)
    offsets = [0, bounds[-1]] if cu_seqlens is None else validate.host_offsets(cu_seqlens, bounds[-1])
    slices = Slices(offsets, bounds)
    here = slices.pieces(rank)
    validate.own_states({"initial_state": initial_state, "final_state": final_state}, len(here), rank)
    shared: dict[str, Any] = {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "batch_invariant": batch_invariant,
        "impl": impl,
    }
    call = shared | {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": scale,
        "out": out,
        "initial_state": initial_state,
        "final_state": final_state,
        "cu_seqlens": None if cu_seqlens is None and here else _local_offsets(here, cu_seqlens, q.device),
        "output_final_state": output_final_state,
    }
    problem, name = api.gather(**call)
    facts = problem.facts
    validate.no_gradient(facts.requires_grad)
    dispatch.choose(facts, name)
    if switched_on("KDA_CHECK"):
        _compare(slices, facts, group, ranks)
    if not slices.crossed():
        return api.fwd(**call)

    sources, sends = slices.sources(rank), bool(here) and not here[-1].ends
    exact = computed_in(facts.dtype)
    wide = dict(call, output_final_state=facts.final_state or sends)
    if facts.state_dtype != exact and (sources or sends):  # what is handed on keeps the precision it is computed in
        wide |= {"initial_state": None if initial_state is None else initial_state.to(exact), "final_state": None}
    rows = facts.V + (facts.K if slices.chained() else 0)  # those of phi, where one is needed, above those of the state
    packet = torch.zeros(facts.HV, rows, facts.K, dtype=exact, device=q.device)
    result = None
    if not sources:
        result = api.fwd(**wide)
        if sends and result.final_state is not None:
            packet[:, -facts.V :] = result.final_state[-1]
    elif sends:
        _pack(packet, here[-1], call, shared, wide["initial_state"])
    received = [torch.empty_like(packet) for _ in range(ranks)]
    distributed.all_gather(received, packet, group=group)
    if result is None:
        states = q.new_zeros(facts.N, facts.HV, facts.V, facts.K, dtype=exact)
        if initial_state is not None:
            states.copy_(initial_state)
        states[0] = _carried([received[source] for source in sources], facts.V)
        result = api.fwd(**dict(wide, initial_state=states))
    return _as_asked(result, facts, final_state)


def _local_offsets(here: list[Piece], cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """cu_seqlens of this rank's slice, on its device."""
    dtype = torch.int64 if cu_seqlens is None else cu_seqlens.dtype
    pinned = device.type == "cuda"  # a copy from other memory may wait for the device
    found = torch.tensor([0, *(piece.stop for piece in here)], dtype=dtype, device="cpu", pin_memory=pinned)
    return found.to(device, non_blocking=True)


def _pack(packet: Tensor, last: Piece, call: dict[str, Any], shared: dict[str, Any], states: Tensor | None) -> None:
    """Fill the packet of a rank that has to send before it knows where it begins: its last sequence alone."""
    tokens = {name: call[name][:, last.start :] for name in ("k", "v", "g", "beta")}
    V = call["v"].shape[-1]
    if last.begins:
        packet[:, -V:] = state_after(**tokens, **shared, initial_state=None if states is None else states[-1:])[0]
    else:
        packet[:, :-V], packet[:, -V:] = (x[0] for x in transition(**tokens, **shared))


def _carried(packets: list[Tensor], V: int) -> Tensor:
    """[HV, V, K] in fp64: the state that the first packet holds, after the transitions of the others."""
    state = packets[0][:, -V:].double()
    for packet in packets[1:]:
        state = applied(state, packet[:, :-V], packet[:, -V:])
    return state


def _as_asked(result: Output, facts: Facts, buffer: Tensor | None) -> Output:
    """The result with final states only where they are asked for, in the dtype and buffer that they are asked in."""
    state = result.final_state
    if state is None or not facts.final_state:
        return Output(result.o, None)
    if buffer is None:
        return Output(result.o, state.to(facts.state_dtype))
    return Output(result.o, buffer if state is buffer else buffer.copy_(state))


def _compare(slices: Slices, facts: Facts, group: distributed.ProcessGroup | None, ranks: int) -> None:
    """Raises ValueError on every rank if they were not given the same."""
    own = {
        "split_sizes": slices.bounds,
        "cu_seqlens": slices.offsets,
        "v": {"HV": facts.HV, "V": facts.V, "dtype": facts.dtype},
        "q": {"H": facts.H, "K": facts.K},
    }
    views: list[dict[str, Any]] = [{}] * ranks
    distributed.all_gather_object(views, own, group=group)
    validate.agreement(views)
