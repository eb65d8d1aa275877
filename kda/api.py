"""The public calls: gather -> validate -> choose -> run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kda import dispatch, ops, plan, validate
from kda.problem import Implementation, Output, Problem

P = ParamSpec("P")
R = TypeVar("R")

#: Kinds of call that were validated and dispatched before, see `kda.plan`.
_PLANS = plan.Plans()


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
    output_final_state: bool = False,
    use_qk_l2norm: bool = True,
    use_beta_sigmoid: bool = True,
    allow_neg_eigval: bool = False,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Output:
    """Forward pass of Kimi Delta Attention: the gated delta rule with one decay per key channel.

    Per sequence and value head, with a state S of K x V, for every token t
    (Kimi Linear, arXiv:2510.26692, section 3)::

        S   = diag(exp(a_t)) S                         decay, first
        S   = S + beta_t * k_t (v_t - k_t^T S)^T       delta rule, against the decayed state
        o_t = scale * q_t^T S                          read, after the update

    The log decay a_t <= 0 (nats per token) comes from g, by which of the other arguments are given:

    ====================================  =====================================================
    given                                 a
    ====================================  =====================================================
    lower_bound                           lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
    A_log, no lower_bound                 -exp(A_log) * softplus(g + dt_bias)
    neither                               g
    ====================================  =====================================================

    The positional order is that of ``flash_kda.fwd``.

    Args:
        q: [B, T, H, K], bf16, fp16 or fp32 (fp64 with the PyTorch implementations). L2-normalised over K here
            (``x / sqrt(sum(x^2) + 1e-6)``) unless ``use_qk_l2norm=False``.
        k: [B, T, H, K], q's dtype. Normalised like q.
        v: [B, T, HV, V], q's dtype. HV is a multiple of H; value head i reads query/key head ``i // (HV // H)``.
        g: [B, T, HV, K], any float dtype. Raw gate, or the log decay itself.
        beta: [B, T, HV], any float dtype. Logit of the delta rule's weight, or the weight itself with
            ``use_beta_sigmoid=False``.
        scale: multiplies q only, after normalisation. Default ``K ** -0.5``.
        out: [B, T, HV, V], q's dtype: buffer for o, any strides, returned as ``Output.o``.
        A_log: HV elements in any shape such as [HV] or [1, 1, HV, 1], any float dtype.
        dt_bias: HV * K elements as [HV, K] or [HV * K], any float dtype.
        lower_bound: strongest log decay per token of the bounded gate; finite, <= 0.
        initial_state: [N, HV, V, K] (V first), fp32 or bf16. Zero if left out. Kept in fp32 between tokens.
        final_state: [N, HV, V, K]: buffer of initial_state's dtype, any strides, written in place and returned as
            ``Output.final_state``. May be the same tensor as initial_state.
        cu_seqlens: [N + 1] cumulative lengths of packed sequences, int32 or int64, on q's device; then B = 1.
            Starts with 0. Sequences may be empty. Rows from ``cu_seqlens[-1]`` on are padding: they are written as
            zeros and read by nothing.
        output_final_state: return the final state although no buffer was given. Its dtype is that of the buffer,
            else of initial_state, else fp32 (fp64 for fp64 inputs).
        use_qk_l2norm: normalise q and k over K.
        use_beta_sigmoid: beta is a logit.
        allow_neg_eigval: the weight is ``2 * sigmoid(beta)``.
        batch_invariant: a sequence's result is bitwise independent of the rest of the batch, and prefill in pieces at
            multiples of 64 tokens equals the one-shot call (fp32 states).
        impl: "auto", or a name of `kda.implementations()`; a name is strict.

    Returns:
        `Output(o, final_state)`; final_state is None unless a buffer or ``output_final_state=True`` asked for it.

    Raises:
        TypeError, ValueError: no implementation could run this; the message names the argument.
        kda.Unsupported: well-formed, but the implementation asked for, or every one ``auto`` may take, cannot run it.

    Gradients flow through the implementations "recurrent" and "chunked" by ordinary autograd.
    On a GPU the contents of cu_seqlens are trusted; set ``KDA_CHECK=1`` to have them checked on every call.
    """
    if torch.compiler.is_compiling() and not _differentiates(q, k, v, g, beta, A_log, dt_bias, initial_state):
        return _traced(
            (q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens),
            (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, batch_invariant, impl),
            out,
            final_state,
            output_final_state,
        )
    flags = (output_final_state, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, batch_invariant)
    tensors = (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    key = plan.key_of(tensors, scale, lower_bound, *flags, impl, dispatch.generation())
    known = _PLANS.find(key, present := plan.filled(tensors))
    if known is not None and (result := known.run(dispatch.implementation(known.impl), present, _run)) is not None:
        return result
    impl = validate.implementation_name(impl, tuple(dispatch.TABLE))
    problem = validate.forward(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        output_final_state=output_final_state,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        batch_invariant=batch_invariant,
    )
    implementation = dispatch.choose(problem.facts, impl)
    new = plan.plan_of(implementation.name, problem, present)
    if new is not None and known is None:
        _PLANS.add(key, new)
    return _run(implementation, problem)


ops.implement(fwd)


def _differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _traced(
    inputs: tuple[object, ...],
    flags: tuple[object, ...],
    out: Tensor | None,
    final_state: Tensor | None,
    output_final_state: bool,
) -> Output:
    """The call as one operator of a graph. What needs gradients is traced as what it is made of instead."""
    o, state = torch.ops.kda.fwd(*inputs, output_final_state or final_state is not None, *flags)
    if out is not None:
        o = out.copy_(o)
    if final_state is not None:
        state = final_state.copy_(state)
    return Output(o, state if output_final_state or final_state is not None else None)


def _run(implementation: Implementation, problem: Problem) -> Output:
    """Run it with autocast off: inputs are taken as they come, and products keep the precision declared for them."""
    device = problem.facts.device
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return implementation.fwd(problem)
    return implementation.fwd(problem)


def _same_arguments(like: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function that binds `*args, **kwargs` itself the signature of `like`, for readers and type checkers."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
        return function

    return decorate


_FWD = inspect.signature(fwd)


def gather(*args: object, **kwargs: object) -> tuple[Problem, str]:
    """The validated problem of a `fwd` call, and the implementation it names. Raises what `fwd` raises."""
    call = _FWD.bind(*args, **kwargs)
    call.apply_defaults()
    arguments = dict(call.arguments)
    impl = validate.implementation_name(arguments.pop("impl"), tuple(dispatch.TABLE))
    return validate.forward(**arguments), impl


@_same_arguments(fwd)
def explain(*args: object, **kwargs: object) -> dispatch.Explanation:
    """What `fwd` with the same arguments would run, and every reason against the others. Runs nothing.

    Returns:
        `Explanation(chosen, reasons, notes, auto)`; printing it gives one line per implementation.

    Raises:
        TypeError, ValueError: as `fwd`. A call that nothing can run is no error here: `chosen` is None.
    """
    problem, impl = gather(*args, **kwargs)
    return dispatch.explain_facts(problem.facts, impl)


def build(*, force: bool = False, verbose: bool = False) -> Path:
    """Compile the Hopper kernels if they are not built yet, so that ``auto`` takes them from now on.

    It needs nvcc, the CUTLASS headers, ninja and a C++ compiler, but no GPU; README.md says which and where from. The
    library is kept in the user's cache (``KDA_CACHE`` moves it) for every process and machine that sees it.

    Args:
        force: compile although it is there.
        verbose: print the compilers' commands and output to standard error.

    Returns:
        The path of the library.

    Raises:
        RuntimeError: a piece is missing, a compiler failed, or a kernel spills registers; the message says which.
    """
    return dispatch.build("cuda", force=force, verbose=verbose)
