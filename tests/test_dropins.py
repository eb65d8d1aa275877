"""Callers that were written for something else: FlashKDA's signature, K-first states, padded batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from targets import device, implementations

import kda
from kda import api, convert, plan, validate
from kda.testing.cases import Case, arguments

CASE = Case(lengths=(20, 0, 5), H=2, K=32, V=32, dtype="float32")

#: As a program that uses FlashKDA has it: by position, into buffers of its own.
FLASH_KDA = """
def prefill(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
    out, final_state = torch.empty_like(v), torch.empty_like(initial_state)
    scale = q.shape[-1] ** -0.5
    flash_kda.fwd(
        q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens
    )
    return out, final_state
"""


@pytest.mark.parametrize("impl", implementations(but="cuda"))
def test_a_program_for_flash_kda(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with the import changed; its results are in its buffers."""
    call = arguments(CASE, device(impl))
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "initial_state", "cu_seqlens")
    module = {"torch": torch, "flash_kda": kda}
    exec(compile(FLASH_KDA, "program", "exec"), module)
    out, final = module["prefill"](*(call[name] for name in names))  # type: ignore[operator]
    expected = kda.fwd(**call, impl="recurrent")
    torch.testing.assert_close(out, expected.o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, expected.final_state, rtol=1e-4, atol=1e-5)


def test_a_caller_of_fla_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla asks before every call: what has run is not validated for the answer, and what differs is."""
    from kda.integrations import fla

    validated: list[int] = []
    original = validate.forward
    monkeypatch.setattr(validate, "forward", lambda *args, **flags: validated.append(1) or original(*args, **flags))
    monkeypatch.setattr(api, "_PLANS", plan.Plans())
    inputs = arguments(CASE)
    call = {name: inputs[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")}
    call |= {"cu_seqlens": inputs["cu_seqlens"], "use_gate_in_kernel": True}
    for name in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "output_final_state"):
        call[name] = True
    for state in (None, inputs["initial_state"], convert.transpose_state(inputs["initial_state"])):
        given = call | {"initial_state": state, "state_v_first": True}
        before = len(validated)
        for n in range(3):
            assert fla.verify(**given) == (True, None)
            fla.chunk_kda(**given)
            assert len(validated) - before <= 2, n
    before = len(validated)
    assert not fla.verify(**(call | {"k": call["k"][:, 1:]}))[0]
    assert fla.verify(**(call | {"scale": 0.5})) == (True, None)
    assert len(validated) == before + 2


def test_states_of_the_other_layout() -> None:
    call = arguments(CASE)
    expected = kda.fwd(**call)
    k_first = convert.transpose_state(call["initial_state"])
    assert k_first.shape == (3, 2, 32, 32)
    assert k_first.is_contiguous()
    assert torch.equal(k_first[1, 0, 3], call["initial_state"][1, 0, :, 3])
    again = kda.fwd(**{**call, "initial_state": convert.transpose_state(k_first)})
    assert torch.equal(again.final_state, expected.final_state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state: expected at least the dimensions K and V"):
        convert.transpose_state(torch.zeros(3))


@pytest.mark.parametrize("left", [False, True])
def test_padded_batches(left: bool) -> None:
    """Padding on either side, packed, run, and put back: what every row gives on its own, and zero elsewhere."""
    lengths, T = (20, 0, 5, 33), 33
    call = arguments(replace(CASE, lengths=(T,) * 4, packed=False))
    columns, ends = torch.arange(T), torch.tensor(lengths)[:, None]
    mask = columns >= T - ends if left else columns < ends
    offsets = convert.cu_seqlens(mask)
    assert offsets.tolist() == [0, 20, 20, 25, 58]
    assert offsets.dtype == torch.int32
    tokens = ("q", "k", "v", "g", "beta")
    packed = kda.fwd(**{**call, **{name: convert.pack(call[name], mask) for name in tokens}, "cu_seqlens": offsets})
    o = convert.unpack(packed.o, mask)
    for n, length in enumerate(lengths):
        inside = {name: call[name][n : n + 1, mask[n]] for name in tokens}
        alone = kda.fwd(**{**call, **inside, "initial_state": call["initial_state"][n : n + 1]})
        torch.testing.assert_close(o[n : n + 1, mask[n]], alone.o)
        torch.testing.assert_close(packed.final_state[n : n + 1], alone.final_state)  # type: ignore[index]
        assert not o[n, ~mask[n]].any()
        assert int(mask[n].sum()) == length
    if not left:
        assert torch.equal(convert.padding_mask(offsets, T), mask)
    assert torch.equal(convert.padding_mask(offsets, 6).sum(1), torch.tensor([6, 0, 5, 6]))


def test_what_is_wrong_with_a_conversion() -> None:
    mask, x = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, 4)
    for call, error, message in (
        (lambda: convert.cu_seqlens(mask.int()), TypeError, "mask: expected dtype bool"),
        (lambda: convert.cu_seqlens(mask[0]), ValueError, r"mask: expected shape \[B, T\], got \[3\]"),
        (lambda: convert.pack(x[:, :2], mask), ValueError, r"x: expected shape \[B, T, ...\]"),
        (lambda: convert.unpack(x, mask), ValueError, r"x: expected shape \[1, tokens, ...\] = \[1, 6, ...\]"),
        (lambda: convert.padding_mask(x, 3), TypeError, "cu_seqlens: expected dtype int32 or int64"),
    ):
        with pytest.raises(error, match=message):
            call()
