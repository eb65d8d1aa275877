"""Host side of the SM90 kernel: a `Problem` as the ABI's parameters, copies where a layout cannot be addressed."""

from __future__ import annotations

import torch
from torch import Tensor

from kda.cuda import library
from kda.cuda.params import DTYPES, FwdParams
from kda.problem import Output, Problem, aligned


def _input(x: Tensor) -> Tensor:
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def fwd(problem: Problem) -> Output:
    """`kda.fwd` in one launch. Memory beyond inputs and outputs: none, but for tensors that must be copied first."""
    facts = problem.facts
    q, k, v, g = (_input(x) for x in (problem.q, problem.k, problem.v, problem.g))
    B, T, HV, N = facts.B, facts.T, facts.HV, facts.N
    out = problem.out
    if out is None or not aligned(out):
        out = torch.empty(B, T, HV, facts.V, dtype=q.dtype, device=q.device)
    if N * HV == 0:
        out.zero_()
    initial, final = problem.initial_state, problem.final_state
    if initial is not None:
        initial = _input(initial)
    if facts.final_state and (final is None or not aligned(final)):
        final = torch.empty(N, HV, facts.V, facts.K, dtype=facts.state_dtype, device=q.device)

    cu_seqlens, A_log, dt_bias, beta = problem.layout.cu_seqlens, problem.A_log, problem.dt_bias, problem.beta
    p = FwdParams(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        g=g.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        q_stride=q.stride()[:3],
        k_stride=k.stride()[:3],
        v_stride=v.stride()[:3],
        g_stride=g.stride()[:3],
        beta_stride=beta.stride(),
        out_stride=out.stride()[:3],
        B=B,
        T=T,
        H=facts.H,
        HV=HV,
        N=N,
        scale=problem.scale,
        lower_bound=facts.lower_bound or 0.0,
        beta_dtype=DTYPES[beta.dtype],
        state_dtype=DTYPES[facts.state_dtype],
        use_qk_l2norm=facts.use_qk_l2norm,
        use_beta_sigmoid=facts.use_beta_sigmoid,
        allow_neg_eigval=facts.allow_neg_eigval,
    )
    if A_log is not None:
        p.A_log, p.A_log_stride, p.A_log_dtype = A_log.data_ptr(), A_log.stride(0), DTYPES[A_log.dtype]
    if dt_bias is not None:
        p.dt_bias, p.dt_bias_stride, p.dt_bias_dtype = dt_bias.data_ptr(), dt_bias.stride(), DTYPES[dt_bias.dtype]
    if initial is not None:
        p.initial_state, p.initial_stride = initial.data_ptr(), initial.stride()[:3]
    if final is not None:
        p.final_state, p.final_stride = final.data_ptr(), final.stride()[:3]
    if cu_seqlens is not None:
        p.cu_seqlens, p.cu_stride = cu_seqlens.data_ptr(), cu_seqlens.stride(0)
        p.cu_64 = cu_seqlens.dtype == torch.int64
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream(q.device).cuda_stream
        library.check(library.load().kda_fwd_sm90(p, stream))

    if problem.out is not None and out is not problem.out:
        out = problem.out.copy_(out)
    if problem.final_state is not None and final is not problem.final_state and final is not None:
        final = problem.final_state.copy_(final)
    return Output(out, final)
