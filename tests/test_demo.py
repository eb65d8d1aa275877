"""`python -m kda demo` in miniature: its documents, its layer, and that it notices a wrong continuation."""

from __future__ import annotations

import io
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kda import dispatch
from kda.api import fwd
from kda.cli import demo
from kda.problem import Output

CPU = torch.device("cpu")
TINY = demo.Sizes(d_model=16, H=2, K=16, V=8, rank=4)
HELD_BACK = 8

#: Empty, two that are decoded to their end before the others, more than a chunk, and one in between.
TEXTS = (b"", b"pass", b"x = y[0]", b"# a comment of some length\n" + b"y += x\n" * 6, b"import this\n" * 3)
DOCUMENTS = [demo.Document(f"{n}.py", text) for n, text in enumerate(TEXTS)]
LENGTHS = [len(text) for text in TEXTS]


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def tiny_call(texts: tuple[bytes, ...] = TEXTS) -> dict[str, Any]:
    return demo.layer_call(demo.make_layer(TINY, CPU), texts)


def test_documents_are_the_standard_librarys_own_bytes() -> None:
    found = demo.documents()
    lengths = sorted(len(document.text) for document in found)
    assert [document.name for document in found] == list(demo.DOCUMENTS)
    assert lengths[0] == 0
    assert lengths[-1] > 50 * lengths[1] > 0
    assert sum(lengths) <= demo.MAX_TOKENS
    for document in found:
        assert document.text == Path(sysconfig.get_paths()["stdlib"], document.name).read_bytes()


def test_documents_keep_to_the_limit_and_skip_what_is_not_there() -> None:
    found = demo.documents(("no such file.py", *demo.DOCUMENTS), max_tokens=1200)
    assert found
    assert sum(len(document.text) for document in found) <= 1200


def test_short_convolution_is_that_of_each_document_alone() -> None:
    noise = torch.Generator().manual_seed(0)
    lengths, width, channels = (5, 0, 1, 9, 3), 4, 6
    x = torch.randn(sum(lengths), channels, generator=noise)
    taps = torch.randn(channels, width, generator=noise)
    position = torch.cat([torch.arange(n) for n in lengths])
    packed = demo.short_convolution(x, taps, position)
    alone = []
    for document in (part for part in x.split(lengths) if len(part)):
        padded = torch.nn.functional.pad(document.T[None], (width - 1, 0))
        alone.append(torch.nn.functional.conv1d(padded, taps[:, None], groups=channels)[0].T)
    torch.testing.assert_close(packed, torch.nn.functional.silu(torch.cat(alone)))


def test_short_convolution_lets_nothing_through_from_the_document_before() -> None:
    x = torch.ones(7, 2)
    x[:3] = torch.nan
    position = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    result = demo.short_convolution(x, torch.ones(2, 4), position)
    assert result[:3].isnan().all()
    assert result[3:].isfinite().all()


def test_layer_inputs_of_a_document_do_not_depend_on_the_others() -> None:
    """Bitwise, on both sides of the changed document; its own inputs do change."""
    changed = (*TEXTS[:3], TEXTS[3][::-1], *TEXTS[4:])
    start = sum(LENGTHS[:3])
    stop = start + LENGTHS[3]
    one, other = tiny_call(), tiny_call(changed)
    for name in ("q", "k", "v", "g", "beta"):
        assert one[name].dtype == torch.bfloat16
        assert torch.equal(one[name][:, :start], other[name][:, :start])
        assert torch.equal(one[name][:, stop:], other[name][:, stop:])
        assert not torch.equal(one[name][:, start:stop], other[name][:, start:stop])


def test_layer_is_seeded() -> None:
    one, other = tiny_call(), tiny_call()
    assert all(torch.equal(one[name], other[name]) for name in one if isinstance(one[name], torch.Tensor))


def test_miniature_run_agrees() -> None:
    out = console()
    assert demo.demonstrate(out, DOCUMENTS, TINY, HELD_BACK, CPU)
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    assert "chosen by auto" in printed
    assert "The continuation equals the one-shot outputs for chunked and recurrent" in printed
    assert all(name in printed for name in dispatch.TABLE)


@pytest.mark.parametrize("held_back", [0, 1, 1000])
def test_any_number_of_tokens_may_be_held_back(held_back: int) -> None:
    assert demo.demonstrate(console(), DOCUMENTS, TINY, held_back, CPU)


def test_empty_documents_alone_agree() -> None:
    assert demo.demonstrate(console(), DOCUMENTS[:1] * 2, TINY, HELD_BACK, CPU)


def zero_states(**call: Any) -> Output:
    """A continuation that forgets what came before."""
    if call.get("initial_state") is not None:
        call["initial_state"] = torch.zeros_like(call["initial_state"])
    return fwd(**call)


def lose_finished(**call: Any) -> Output:
    """States of sequences that take no part in a step are lost."""
    result = fwd(**call)
    if call.get("initial_state") is not None and result.final_state is not None:
        result.final_state[call["cu_seqlens"].diff() == 0] = 0
    return result


def swap_states(**call: Any) -> Output:
    """Every sequence goes on from its neighbour's state."""
    if call.get("initial_state") is not None:
        call["initial_state"] = call["initial_state"].roll(1, 0)
    return fwd(**call)


def coarse_states(**call: Any) -> Output:
    """States lose precision between the tokens: kept in bf16."""
    if call.get("initial_state") is not None:
        call["initial_state"] = call["initial_state"].bfloat16().float()
    return fwd(**call)


@pytest.mark.parametrize("fault", [zero_states, lose_finished, swap_states, coarse_states])
def test_a_wrong_continuation_is_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fwd", fault)
    rows = demo.compare(console(), tiny_call(), LENGTHS, HELD_BACK)
    ran = [row for row in rows if row.one_shot is not None]
    assert ran
    for row in ran:
        assert row.one_shot is not None
        assert row.continued is not None
        assert row.one_shot.accepted
        assert not row.continued.accepted
    assert not demo.verdict(rows)[0]
    assert not demo.demonstrate(console(), DOCUMENTS, TINY, HELD_BACK, CPU)


def test_a_token_that_no_piece_wrote_is_noticed() -> None:
    pieces = demo.prefill_and_decode(tiny_call(), [*LENGTHS[:-1], LENGTHS[-1] - 1], HELD_BACK, "chunked", "auto")
    assert pieces.o[:, -1].isnan().all()
    assert pieces.o[:, :-1].isfinite().all()


def test_the_number_of_threads_is_given_back() -> None:
    before = torch.get_num_threads()
    demo.compare(console(), tiny_call(), LENGTHS, HELD_BACK)
    assert torch.get_num_threads() == before


def test_nothing_that_ran_is_no_agreement() -> None:
    assert not demo.verdict([demo.Row("cuda", "cannot")])[0]


def test_interpreted_kernels_are_not_run() -> None:
    rows = demo.compare(console(), tiny_call(), LENGTHS, HELD_BACK)
    assert [row.name for row in rows] == list(dispatch.TABLE)
    for row in rows:
        assert (row.one_shot is None) == (row.name in dispatch.AUTO["cuda"])
