"""The public calls: gather -> validate -> choose -> run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kda import dispatch, ops, plan, validate
from kda.problem import TENSORS, Facts, Implementation, Output, Problem, StepProblem

#: The flags of `fwd`, in its order.
FLAGS = ("output_final_state", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "batch_invariant")

P = ParamSpec("P")
R = TypeVar("R")

#: Kinds of call that were validated and dispatched before, see `kda.plan`.
_PLANS: plan.Plans[plan.Plan] = plan.Plans()
_STEP_PLANS: plan.Plans[plan.StepPlan] = plan.Plans()


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
    state_pool: Tensor | None = None,
    state_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    fresh: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    checkpoint_every: int | None = None,
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
            multiples of 64 tokens equals the one-shot call (fp32 states). So no sequence is cut into segments that run
            side by side, as kernels do with few long ones (where, depends on shapes and cu_seqlens alone).
        state_pool: [slots, HV, V, K], fp32 or bf16, any strides: states in place of initial_state and final_state,
            updated where they are. Then ``Output.final_state`` is None.
        state_indices: [N] integers, any strides: the slot of state_pool that sequence n begins from, and ends in
            unless `write_indices` says otherwise. Sequence n has slot n if left out. Negative: padding, whose o is
            zero, and for which nothing is written.
        write_indices: [N] integers: the slot to end in instead. Negative: none.
        fresh: [N] bool: begin from zero, whatever the slot holds.
        checkpoints: [slots, HV, V, K], fp32 or bf16, any strides: receives states on the way, with or without a pool;
            may be state_pool itself.
        checkpoint_indices: [N, M] integers: the slot of checkpoints for the state of sequence n after
            ``(m + 1) * checkpoint_every`` tokens, which equals, to the bit, the final state of the call on that prefix.
            Negative: none. Nothing is written for what lies beyond a sequence's end.
        checkpoint_every: tokens, a multiple of 64.
        impl: "auto", or a name of `kda.implementations()`; a name is strict.

    Returns:
        `Output(o, final_state)`; final_state is None unless a buffer or ``output_final_state=True`` asked for it.

    Raises:
        TypeError, ValueError: no implementation could run this; the message names the argument.
        kda.Unsupported: well-formed, but the implementation asked for, or every one ``auto`` may take, cannot run it.

    Gradients flow through the implementations "recurrent" and "chunked" by ordinary autograd.
    No slot may be written twice in a call, nor read by one sequence and written by another. On a GPU the contents of
    cu_seqlens and of indices are trusted (what lies beyond a pool counts as negative); set ``KDA_CHECK=1`` to have them
    checked on every call.
    """
    slots = (state_pool, state_indices, write_indices, fresh, checkpoints, checkpoint_indices)
    if torch.compiler.is_compiling() and not _differentiates(q, k, v, g, beta, A_log, dt_bias, initial_state):
        return _traced(
            (q, k, v, g, beta, scale, A_log, dt_bias, lower_bound, initial_state, cu_seqlens),
            (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, batch_invariant, impl),
            out,
            final_state,
            output_final_state,
            (*slots, checkpoint_every),
        )
    flags = (output_final_state, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, batch_invariant)
    tensors = (q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens, *slots)
    key = plan.key_of(q, cu_seqlens, scale, lower_bound, *flags, checkpoint_every, impl, dispatch.generation())
    known = _PLANS.find(key, plan.told_apart(present := plan.filled(tensors)))
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
        state_pool=state_pool,
        state_indices=state_indices,
        write_indices=write_indices,
        fresh=fresh,
        checkpoints=checkpoints,
        checkpoint_indices=checkpoint_indices,
        checkpoint_every=checkpoint_every,
    )
    implementation = dispatch.choose(problem.facts, impl)
    result = _run(implementation, problem)
    if known is None and (new := plan.plan_of(implementation.name, problem, present)) is not None:
        _PLANS.add(key, new)  # with what the implementation keeps in its memo
    return result


def planned(call: Mapping[str, Any]) -> bool:
    """Whether a call like `fwd(**call)` has run before, so that this one will too. Every flag has to be in `call`."""
    tensors = tuple(call.get(name) for name in TENSORS)
    flags = (call[name] for name in FLAGS)
    rest = (call["scale"], call["lower_bound"], *flags, call.get("checkpoint_every"), call["impl"])
    key = plan.key_of(tensors[0], call.get("cu_seqlens"), *rest, dispatch.generation())
    return _PLANS.find(key, plan.told_apart(plan.filled(tensors))) is not None


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    *,
    state_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    token_indices: Tensor | None = None,
    fresh: Tensor | None = None,
    use_qk_l2norm: bool = True,
    use_beta_sigmoid: bool = True,
    allow_neg_eigval: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Decode: T new tokens (one, or a few to verify) for each of N sequences, whose states live in a pool.

    The same formulas as `fwd`, token by token in fp32; the pool is updated in place. No row sees another, to the bit.

    Args:
        q, k: [N, T, H, K].
        v: [N, T, HV, V]. Dtypes of these and the rest as in `fwd`.
        g: [N, T, HV, K].
        beta: [N, T, HV].
        state: [slots, HV, V, K], fp32 or bf16: the pool. Any strides, so slots may be rows of a larger tensor.
        scale, A_log, dt_bias, lower_bound, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval: as in `fwd`.
        out: [N, T, HV, V], q's dtype: buffer for o, any strides, which is returned.
        state_indices: [N] integers, any strides: the slot that row n reads, and writes after its last token unless
            `write_indices` says otherwise. Row n has slot n if left out. Negative: padding, whose o is zero, and for
            which nothing is written.
        write_indices: [N] integers: the slot to write instead. Negative: none.
        token_indices: [N, T] integers: slots that receive the state after each token. Negative: none. With
            ``write_indices`` of -1 a speculative decoder keeps the committed state and commits any prefix later.
        fresh: [N] bool: start from zero, whatever the slot holds.
        impl: "auto", or a name of `kda.implementations()`; a name is strict.

    Returns:
        o: [N, T, HV, V].

    Raises:
        TypeError, ValueError: no implementation could run this; the message names the argument.
        kda.Unsupported: well-formed, but the implementation asked for, or every one ``auto`` may take, cannot run it.

    No slot may be written twice in a call, nor read by one row and written by another: with ``KDA_CHECK=1`` a
    ValueError. Indices beyond the pool are a ValueError on a CPU and with ``KDA_CHECK=1``, else they count as negative.
    Nothing here can be differentiated.
    """
    if torch.compiler.is_compiling() and not _differentiates(q, k, v, g, beta, A_log, dt_bias, state):
        traced: Tensor = torch.ops.kda.step(
            *(q, k, v, g, beta, state, scale, A_log, dt_bias, lower_bound),
            *(state_indices, write_indices, token_indices, fresh),
            *(use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, impl),
        )
        return traced if out is None else out.copy_(traced)
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
    given: tuple[Tensor | None, ...] = (q, k, v, g, beta, state, out, A_log, dt_bias, state_indices)
    if write_indices is not None or token_indices is not None or fresh is not None:
        given = (*given, write_indices, token_indices, fresh)  # else a microsecond less to be looked at
    key = plan.key_of(q, state, scale, lower_bound, *flags, impl, dispatch.generation(), len(given))
    known = _STEP_PLANS.find(key, tensors := plan.filled(given))
    if known is not None:
        done = known.run(dispatch.implementation(known.impl), tensors, _run_step)
        if done is not None:
            return done
    impl = validate.implementation_name(impl, tuple(dispatch.TABLE))
    problem = validate.step(
        q,
        k,
        v,
        g,
        beta,
        state,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        state_indices=state_indices,
        write_indices=write_indices,
        token_indices=token_indices,
        fresh=fresh,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
    )
    implementation = dispatch.choose(problem.facts, impl)
    o = _run_step(implementation, problem)
    if known is None and (new := plan.step_plan_of(implementation.name, problem, tensors)) is not None:
        _STEP_PLANS.add(key, new)
    return o


def _run_step(implementation: Implementation, problem: StepProblem) -> Tensor:
    if implementation.step is None:
        raise RuntimeError(f"{implementation.name} has no step, and gave no reason against one")
    with _without_autocast(problem.facts.device):
        return implementation.step(problem)


ops.implement(fwd, step)
_STEP = inspect.signature(step)


def step_facts(*args: object, **kwargs: object) -> Facts:
    """The facts of a `step` call, validated. Raises what `step` raises."""
    call = _STEP.bind(*args, **kwargs)
    call.apply_defaults()
    arguments = dict(call.arguments)
    validate.implementation_name(arguments.pop("impl"), tuple(dispatch.TABLE))
    return validate.step(**arguments).facts


def _differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _traced(
    inputs: tuple[object, ...],
    flags: tuple[object, ...],
    out: Tensor | None,
    final_state: Tensor | None,
    output_final_state: bool,
    slots: tuple[object, ...],
) -> Output:
    """The call as one operator of a graph. What needs gradients is traced as what it is made of instead."""
    arguments = (*inputs, output_final_state or final_state is not None, *flags)
    if all(x is None for x in slots):
        o, state = torch.ops.kda.fwd(*arguments)
    else:
        o, state = torch.ops.kda.fwd_pool(*arguments, *slots)
    if out is not None:
        o = out.copy_(o)
    if final_state is not None:
        state = final_state.copy_(state)
    return Output(o, state if output_final_state or final_state is not None else None)


def _run(implementation: Implementation, problem: Problem) -> Output:
    """Run it with autocast off: inputs are taken as they come, and products keep the precision declared for them."""
    with _without_autocast(problem.facts.device):
        return implementation.fwd(problem)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


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
