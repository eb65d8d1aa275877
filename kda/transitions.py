"""What the tokens of a sequence do to any state that it begins from, as a value: `kda.transition`."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kda import api
from kda.validate import transitions as validate


def applied(initial_state: Tensor, phi: Tensor, state: Tensor) -> Tensor:
    """initial_state @ phi + state, in fp64 whatever the dtypes.

    There no setting of torch (TF32, reduced precision on a CPU) and no autocast touches a product; and next to a
    sequence's tokens, matrices of K x K cost nothing.
    """
    return initial_state.double() @ phi.double() + state.double()


class Transition(NamedTuple):
    """The map from the state a sequence begins from to the one it ends in: affine, whatever the tokens.

    phi:   [N, HV, K, K], fp32 (fp64 for fp64 inputs). ``phi[n, h, i, j]`` is what a 1 in key channel i of the state
           before adds to key channel j of the state after.
    state: [N, HV, V, K], phi's dtype: the state after, for one of zeros before.

    States are V first, so that ``final_state = initial_state @ phi + state``. Written with S of K x V, as the formulas
    of `kda.fwd` are, this is ``S -> Phi S + S_local`` with phi = Phi^T and state = S_local^T, where Phi is the product
    of ``(I - beta_t k_t k_t^T) diag(exp(a_t))`` over the tokens, the last one leftmost.
    """

    phi: Tensor
    state: Tensor

    def apply(self, initial_state: Tensor) -> Tensor:
        """The states after the tokens: [N, HV, V, K] in phi's dtype, computed in fp64.

        Args:
            initial_state: [N, HV, V, K], any float dtype.

        Raises:
            TypeError, ValueError: shape, dtype or device do not fit.
        """
        validate.start(initial_state, self.state)
        return applied(initial_state, *self).to(self.state.dtype)

    def then(self, later: Transition) -> Transition:
        """The transition over the tokens of this one and then those of `later`, computed in fp64.

        Args:
            later: of the same sequences' next tokens.

        Raises:
            TypeError, ValueError: it is no Transition, or its shapes, dtype or device are not those of this one.
        """
        validate.successor(later, self)
        phi = self.phi.double() @ later.phi.double()
        return Transition(phi.to(self.phi.dtype), later.apply(self.state))


def state_after(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **call: Any) -> Tensor:
    """[N, HV, V, K]: the states that tokens lead to; `call` has other arguments of `kda.fwd`.

    Queries have no part in it, so k stands for them, and o is dropped.
    """
    return cast(Tensor, api.fwd(k, k, v, g, beta, output_final_state=True, **call).final_state)


def transition(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    use_qk_l2norm: bool = True,
    use_beta_sigmoid: bool = True,
    allow_neg_eigval: bool = False,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Transition:
    """What each sequence's tokens do to any state that it begins from.

    The recurrence of `kda.fwd` is affine in the state, so over any number of tokens it is one matrix per head and one
    state: the same recurrence from a state of zeros, and, without values, from the identity. Transitions compose, so
    parts of a sequence can be processed at once and put together afterwards (`kda.distributed` does)::

        whole = kda.transition(*first, **gate).then(kda.transition(*second, **gate))
        state = whole.apply(initial_state)

    Args:
        k: [B, T, H, K], bf16, fp16 or fp32 (fp64 with the PyTorch implementations).
        v: [B, T, HV, V], k's dtype.
        g: [B, T, HV, K], any float dtype.
        beta: [B, T, HV], any float dtype.
        A_log, dt_bias, lower_bound, cu_seqlens, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, batch_invariant:
            as in `kda.fwd`.
        impl: "auto", or a name of `kda.implementations()`; a name is strict. It has to take V = K too.

    Returns:
        `Transition(phi, state)` of N sequences. An empty sequence has the identity and a state of zeros.

    Raises:
        TypeError, ValueError: no implementation could run this. Messages that speak of q mean k, which stands for it.
        kda.Unsupported: well-formed, but the implementation asked for, or every one ``auto`` may take, cannot run it.

    It costs two calls of `kda.fwd`, which round as they do. Gradients flow where they do in `kda.fwd`.
    """
    validate.key(k, cu_seqlens)
    rest = {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
        "cu_seqlens": cu_seqlens,
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "batch_invariant": batch_invariant,
        "impl": impl,
    }
    state = state_after(k, v, g, beta, **rest)
    N, HV, _, K = state.shape
    identity = torch.eye(K, dtype=state.dtype, device=state.device).repeat(N, HV, 1, 1)
    no_values = v.new_zeros(K).expand(*v.shape[:-1], K)
    return Transition(state_after(k, no_values, g, beta, initial_state=identity, **rest), state)
