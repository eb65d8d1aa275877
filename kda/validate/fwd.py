"""The arguments of `kda.fwd`."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from kda.environment import switched_on
from kda.problem import GateKind, Layout, Problem, computed_in
from kda.validate.inputs import check_inputs
from kda.validate.layouts import offsets
from kda.validate.memory import extent, require_writable, same
from kda.validate.require import require_dtype, require_no_capture, require_shape, require_state_dtype


def _cu_seqlens(value: Tensor, q: Tensor) -> None:
    offsets(value)
    if q.shape[0] != 1:
        raise ValueError(
            f"q: expected batch 1 with cu_seqlens, got {q.shape[0]}; pack the sequences along T: "
            "x.flatten(0, 1).unsqueeze(0)"
        )


def contents(q: Tensor, g: Tensor, kind: GateKind, cu_seqlens: Tensor | None) -> None:
    """What only the contents can tell: free on a CPU, a synchronisation elsewhere (done under KDA_CHECK=1 alone)."""
    if cu_seqlens is None and kind is not GateKind.GIVEN:
        return
    checking = switched_on("KDA_CHECK")
    if checking:
        require_no_capture(q)
    if cu_seqlens is not None and (checking or q.device.type == "cpu"):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0:
            raise ValueError(f"cu_seqlens: expected to start with 0, got {offsets[0]}; prepend a 0")
        for n, (start, stop) in enumerate(pairwise(offsets)):
            if stop < start:
                raise ValueError(
                    f"cu_seqlens: expected not to decrease, got {start} then {stop} at index {n + 1}; "
                    "it holds cumulative offsets, not lengths"
                )
        if offsets[-1] > q.shape[1]:
            raise ValueError(f"cu_seqlens: expected to end at most at T = {q.shape[1]}, got {offsets[-1]}")
    if checking and kind is GateKind.GIVEN:
        inside = g if cu_seqlens is None else g[:, : int(cu_seqlens[-1])]  # padding may hold anything
        if bool((inside > 0).any()):
            raise ValueError(
                f"g: expected log decays <= 0 when neither lower_bound nor A_log is given, got {inside.max().item()}; "
                "pass the activated gate, or A_log for the raw one"
            )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    batch_invariant: bool,
) -> Problem:
    """The arguments of `kda.fwd` as a `Problem`. Raises ValueError or TypeError before anything is written."""
    optional: dict[str, Tensor | None] = {
        "out": out,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "final_state": final_state,
        "cu_seqlens": cu_seqlens,
    }
    flags = {
        "output_final_state": output_final_state,
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "batch_invariant": batch_invariant,
    }
    given = check_inputs({"q": q, "k": k, "v": v, "g": g, "beta": beta}, optional, flags, scale, lower_bound, "B")

    # Layout.
    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, q)
    layout = Layout(given.B, given.T, cu_seqlens)
    N = layout.sequences

    # States and buffers.
    state_dtype = computed_in(q.dtype)
    for name, state in (("initial_state", initial_state), ("final_state", final_state)):
        if state is None:
            continue
        require_shape(name, state, "[N, HV, V, K]", (N, given.HV, given.V, given.K), "V comes before K")
        require_state_dtype(name, state, q)
    if final_state is not None:
        state_dtype = final_state.dtype
        if initial_state is not None:
            require_dtype("initial_state", initial_state, state_dtype, "final_state's")
    elif initial_state is not None:
        state_dtype = initial_state.dtype

    inputs = {name: t for name, t in given.tensors.items() if name not in ("out", "final_state")}
    if out is not None:
        require_shape("out", out, "[B, T, HV, V]", (given.B, given.T, given.HV, given.V))
        require_dtype("out", out, q.dtype, "q's")
    written = out is not None or final_state is not None
    extents = {name: extent(x) for name, x in given.tensors.items()} if written else {}
    for name, buffer in (("out", out), ("final_state", final_state)):
        if buffer is None:
            continue
        if given.graded:
            raise ValueError(
                f"{name}: expected no buffer while {', '.join(given.graded)} requires grad, got one; results written "
                "in place cannot be differentiated. Leave the buffer out, or call under torch.no_grad()"
            )
        readers = dict(inputs)
        if name == "final_state":
            if initial_state is not None and same(final_state, initial_state):
                readers.pop("initial_state")  # updating a state in place is a normal thing to do
            if out is not None:
                readers["out"] = out
        require_writable(name, buffer, readers, extents)
    contents(q, g, given.gate, cu_seqlens)

    facts = given.facts(
        N=N,
        varlen=cu_seqlens is not None,
        state_dtype=state_dtype,
        initial_state=initial_state is not None,
        final_state=output_final_state or final_state is not None,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        batch_invariant=batch_invariant,
    )
    return Problem(
        **given.fields(),
        out=out,
        initial_state=None if initial_state is None else given.plain("initial_state"),
        final_state=final_state,
        layout=layout,
        facts=facts,
    )
