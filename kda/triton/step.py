"""Decode: a few tokens for each of many states, by the recurrence itself. One program per row, head and block of V.

All of it is fp32, and no row sees another. The state is read once and written once: that is what it costs.

The same bits from every variant that Triton compiles: products and sums are fused where the code says so and nowhere
else. (One token is a variant of its own, whose loads all come at once; left to the compiler, the state after one of two
tokens was not that after one alone.)
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda.devices import current_stream
from kda.problem import STEP_TENSORS, Apart, Mark, StepProblem, new_output
from kda.triton.config import power_of_two
from kda.triton.forward import GATES, strides
from kda.triton.launch import aligned, launch
from kda.triton.math import cast, exp, log_decay, sigmoid, slot_at, slot_to_read, unit_factor

#: Columns of V per program and its warps (NOTES.md): the same for every batch, so that no sum depends on
#: the batch. The interpreter's time is by the program.
BLOCK_V, WARPS = 8, 1
INTERPRETED_BLOCK_V = 64

#: Tensors whose strides the kernel is given, in its order, and how many.
_STRIDED = {
    "q": 4,
    "k": 4,
    "v": 4,
    "g": 4,
    "beta": 3,
    "out": 4,
    "state": 4,
    "state_indices": 1,
    "write_indices": 1,
    "token_indices": 2,
    "fresh": 1,
}
_V, _OUT = STEP_TENSORS.index("v"), STEP_TENSORS.index("out")


@triton.jit
def _store(state, slot, s_n, tile, S, in_v, in_k, INTERPRET: tl.constexpr):
    """A block of V of one head's state into a slot of the pool."""
    at = state + slot * s_n + tile
    tl.store(at, cast(S, state.dtype.element_ty, INTERPRET), mask=in_v[:, None] & in_k[None, :])


@triton.jit(
    do_not_specialize=[
        "slots",
        "HV",
        "has_A_log",
        "has_dt_bias",
        "has_reads",
        "has_writes",
        "has_tokens",
        "has_fresh",
        "sigmoid_beta",
        "normalise",
    ]
)
def step_kernel(
    q,  # [N, T, H, K]
    k,
    v,  # [N, T, HV, V]
    g,  # [N, T, HV, K]
    beta,  # [N, T, HV]
    state,  # [slots, HV, V, K]
    out,  # [N, T, HV, V]
    A_log,  # [HV]; this and what follows: any pointer of its kind where there is none
    dt_bias,  # [HV, K]
    reads,  # [N]
    writes,  # [N]
    tokens,  # [N, T]
    fresh,  # [N], bytes
    scale,
    lower_bound,
    beta_scale,
    q_n,
    q_t,
    q_h,
    q_d,
    k_n,
    k_t,
    k_h,
    k_d,
    v_n,
    v_t,
    v_h,
    v_d,
    g_n,
    g_t,
    g_h,
    g_d,
    b_n,
    b_t,
    b_h,
    o_n,
    o_t,
    o_h,
    o_d,
    s_n,
    s_h,
    s_v,
    s_k,
    reads_n,
    writes_n,
    tokens_n,
    tokens_t,
    fresh_n,
    slots,
    T,
    HV,
    GROUP,
    has_A_log,
    has_dt_bias,
    has_reads,
    has_writes,
    has_tokens,
    has_fresh,
    sigmoid_beta,
    normalise,
    K,
    V,
    KP: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    blocks = tl.cdiv(V, BV)
    task = tl.program_id(0) // blocks
    n = (task // HV).to(tl.int64)
    hv = task % HV
    h = (hv // GROUP).to(tl.int64)
    hv = hv.to(tl.int64)
    d = tl.arange(0, KP).to(tl.int64)
    c = tl.program_id(0) % blocks * BV + tl.arange(0, BV).to(tl.int64)
    read = slot_to_read(reads, reads_n, n, slots, has_reads)
    write = tl.where(has_writes != 0, slot_at(writes, n * writes_n, slots, has_writes), read)
    active = read >= 0
    # Masks by limits: the interpreter does not combine a scalar with a block of truth values.
    channels, columns = tl.where(active, K, 0), tl.where(active, V, 0)
    known = tl.where(tl.load(fresh + n * fresh_n, mask=has_fresh != 0, other=0) == 0, columns, 0)
    in_k, in_v = d < channels, c < columns

    tile = hv * s_h + c[:, None] * s_v + d[None, :] * s_k
    S = tl.load(state + read * s_n + tile, mask=(c < known)[:, None] & in_k[None, :], other=0.0).to(tl.float32)
    rate = tl.load(A_log + hv, mask=has_A_log != 0, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + hv * K + d, mask=d < tl.where(has_dt_bias != 0, channels, 0), other=0.0).to(tl.float32)

    for step in range(T):
        t = step + tl.zeros((), tl.int64)
        row = n * q_n + t * q_t + h * q_h
        qt = tl.load(q + row + d * q_d, mask=in_k, other=0.0).to(tl.float32)
        row = n * k_n + t * k_t + h * k_h
        kt = tl.load(k + row + d * k_d, mask=in_k, other=0.0).to(tl.float32)
        row = n * g_n + t * g_t + hv * g_h
        gt = tl.load(g + row + d * g_d, mask=in_k, other=0.0).to(tl.float32)
        row = n * v_n + t * v_t + hv * v_h
        vt = tl.load(v + row + c * v_d, mask=in_v, other=0.0).to(tl.float32)
        bt = tl.load(beta + n * b_n + t * b_t + hv * b_h, mask=active, other=0.0).to(tl.float32)

        qt *= unit_factor(qt, normalise) * scale
        kt *= unit_factor(kt, normalise)
        bt = tl.where(sigmoid_beta != 0, sigmoid(bt), bt) * beta_scale
        decay = exp(log_decay(gt[None, :], rate, bias, lower_bound, GATE))

        S *= decay
        residual = vt - tl.sum(S * kt[None, :], 1)
        S = tl.fma((bt * residual)[:, None], kt[None, :], S)
        o = tl.sum(S * qt[None, :], 1)  # of padding: zero, as its queries are
        row = n * o_n + t * o_t + hv * o_h
        tl.store(out + row + c * o_d, cast(o, out.dtype.element_ty, INTERPRET), mask=c < V)

        after = slot_at(tokens, n * tokens_n + t * tokens_t, slots, has_tokens)
        _store(state, after, s_n, tile, S, c < tl.where(after >= 0, columns, 0), in_k, INTERPRET)
    _store(state, write, s_n, tile, S, c < tl.where(write >= 0, columns, 0), in_k, INTERPRET)


def step(problem: StepProblem) -> Tensor:
    """`kda.step` in one launch and no memory but `out`."""
    facts, state = problem.facts, problem.state
    v = problem.v
    out = new_output(v) if problem.out is None else problem.out
    if facts.B * facts.HV == 0:
        return out
    given: dict[str, Tensor | None] = {name: getattr(problem, name) for name in STEP_TENSORS}
    given["out"] = out
    indices = [given[name] for name in ("state_indices", "write_indices", "token_indices")]
    any_indices = next((x for x in indices if x is not None), state)
    if problem.fresh is not None:
        given["fresh"] = problem.fresh.view(torch.uint8)
    tensors = [x if x is not None else any_indices if name.endswith("indices") else state for name, x in given.items()]
    block_v = INTERPRETED_BLOCK_V if facts.triton_interpreter else BLOCK_V
    numbers = (
        problem.scale,
        facts.lower_bound or 0.0,
        2.0 if facts.allow_neg_eigval else 1.0,
        *(stride for name in _STRIDED for stride in strides(given[name], _STRIDED[name])),
        facts.N,
        facts.T,
        facts.HV,
        facts.HV // facts.H,
        *(int(given[name] is not None) for name in STEP_TENSORS[_OUT + 1 :]),
        int(facts.use_beta_sigmoid),
        int(facts.use_qk_l2norm),
        facts.K,
        facts.V,
    )
    constants = dict(KP=power_of_two(facts.K), BV=block_v, GATE=GATES[facts.gate], INTERPRET=facts.triton_interpreter)
    programs = facts.B * facts.HV * triton.cdiv(facts.V, block_v)
    on_device = torch.cuda.device(v.device) if v.is_cuda else contextlib.nullcontext()
    with on_device:
        made = launch(step_kernel, programs, tensors, numbers, constants, num_warps=WARPS, enable_fp_fusion=False)
    if made is not None:
        problem.memo.setdefault("triton", made)
    return out


def again(memo: dict[str, Any], tensors: list[Tensor], apart: Apart) -> Tensor | None:
    """`step` of a repeated call; None where another kernel is called for."""
    known, out, stream = memo.get("triton"), tensors[_OUT], current_stream(tensors[0].device)
    addresses = [x.data_ptr() for x in tensors] + [0] * (len(STEP_TENSORS) - len(tensors))
    if known is None or stream is None or not aligned(addresses) or not apart(tensors):
        return None
    if type(out) is Mark:
        out = new_output(tensors[_V])
        addresses[_OUT] = out.data_ptr()
    known(addresses, stream)
    return out
