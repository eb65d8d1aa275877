"""Judge `kda.convert` against plain Python loops over single elements, and by going back where one came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

from kda import convert
from kda.testing.cases import Printed
from kda.testing.judge import Finding, reproducer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool}

#: How the tensors lie in memory: as one block, as every second element, expanded along the first axis.
LAYOUTS = ("contiguous", "every-second", "expanded")


@dataclass(frozen=True, repr=False)
class ConvertCase(Printed):
    """A mask, and tensors that fit it. Its repr is the reproducer.

    mask:     a text for each row, 1 where there is a token; all of one length.
    trailing: what follows [B, T] in the shape that is packed.
    state:    shape of the state that is transposed.
    dtype, layout: of both.
    index_dtype: of cu_seqlens.
    cut:      T of the padding mask.
    """

    mask: tuple[str, ...] = ()
    trailing: tuple[int, ...] = ()
    state: tuple[int, ...] = (1, 1)
    dtype: str = "float32"
    layout: str = "contiguous"
    index_dtype: str = "int32"
    cut: int = 0

    def __post_init__(self) -> None:
        if not all(isinstance(row, str) and set(row) <= {"0", "1"} for row in self.mask):
            raise ValueError(f"mask: expected texts of 0 and 1, got {self.mask}")
        if len({len(row) for row in self.mask}) > 1:
            raise ValueError(f"mask: expected rows of one length, got {self.mask}")
        if not all(type(n) is int and n >= 0 for n in (*self.trailing, *self.state, self.cut)) or len(self.state) < 2:
            raise ValueError(
                f"expected sizes, two or more for the state, got {self.trailing}, {self.state}, {self.cut}"
            )
        for name, allowed in (("dtype", DTYPES), ("layout", LAYOUTS), ("index_dtype", ("int32", "int64"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")


def _tensor(case: ConvertCase, shape: tuple[int, ...], device: str) -> Tensor:
    """Numbers that are all different, as far as the dtype and the layout allow."""
    count = torch.Size(shape).numel()
    x = (torch.arange(1, count + 1) % 251).to(DTYPES[case.dtype]).reshape(shape).to(device)
    if case.layout == "every-second":
        return torch.stack([x, x], -1)[..., 0]
    if case.layout == "expanded" and shape[0]:
        return x[:1].expand(shape)
    return x


def _expect(
    wrong: list[str], what: str, actual: Tensor, expected: Sequence[object], like: Tensor, shape: list[int]
) -> None:
    """`expected` has the elements in order, or the rows of `actual`'s first axis, as lists."""
    if list(actual.shape) != shape or actual.dtype != like.dtype or actual.device != like.device:
        wrong.append(f"{what} is {list(actual.shape)} {actual.dtype}, expected {shape} {like.dtype}")
    elif actual.tolist() != [*expected]:
        wrong.append(f"{what} has other elements than the loop's")


def _judge_masks(case: ConvertCase, device: str) -> list[str]:
    wrong: list[str] = []
    B, T = len(case.mask), len(case.mask[0]) if case.mask else 0
    mask = torch.tensor([[c == "1" for c in row] for row in case.mask], dtype=torch.bool, device=device).reshape(B, T)
    x = _tensor(case, (B, T, *case.trailing), device)
    here = [(b, t) for b in range(B) for t in range(T) if case.mask[b][t] == "1"]
    rows, counts = x.tolist(), [row.count("1") for row in case.mask]

    offsets = convert.cu_seqlens(mask)
    _expect(
        wrong, "cu_seqlens", offsets, [*accumulate(counts, initial=0)], mask.new_empty(0, dtype=torch.int32), [B + 1]
    )
    packed = convert.pack(x, mask)
    _expect(wrong, "pack", packed, [[rows[b][t] for b, t in here]], x, [1, len(here), *case.trailing])

    zero = torch.zeros(case.trailing, dtype=x.dtype).tolist()
    back = [[rows[b][t] if case.mask[b][t] == "1" else zero for t in range(T)] for b in range(B)]
    unpacked = convert.unpack(packed, mask)
    _expect(wrong, "unpack(pack)", unpacked, back, x, list(x.shape))
    if not torch.equal(convert.pack(unpacked, mask), packed):
        wrong.append("pack(unpack) is not what was packed")
    if x.tolist() != rows:
        wrong.append("the input has changed")

    lengths = offsets.to(getattr(torch, case.index_dtype))
    left = convert.padding_mask(lengths, case.cut)
    loop = [[t < n for t in range(case.cut)] for n in counts]
    _expect(wrong, "padding_mask", left, loop, mask, [B, case.cut])
    if max(counts, default=0) <= case.cut and not torch.equal(convert.cu_seqlens(left), offsets):
        wrong.append("cu_seqlens(padding_mask) is not what the mask was made from")
    if x.is_floating_point():
        leaf = x.detach().clone().requires_grad_()
        convert.unpack(convert.pack(leaf, mask), mask).sum().backward()
        if leaf.grad is not None:
            each = [[torch.full(case.trailing, float(c == "1")).tolist() for c in row] for row in case.mask]
            _expect(wrong, "the gradient through pack and unpack", leaf.grad, each, x, list(x.shape))
        else:
            wrong.append("no gradient comes through pack and unpack")
    return wrong


def _judge_state(case: ConvertCase, device: str) -> list[str]:
    wrong: list[str] = []
    state = _tensor(case, case.state, device)
    turned = convert.transpose_state(state)
    *lead, K, V = case.state
    if list(turned.shape) != [*lead, V, K] or turned.dtype != state.dtype or not turned.is_contiguous():
        wrong.append(f"transpose_state is {list(turned.shape)}, {turned.dtype}, strides {turned.stride()}")
    elif any(turned[(*i, v, k)] != state[(*i, k, v)] for *i, k, v in product(*map(range, case.state))):
        wrong.append("transpose_state has other elements than the loop's")
    if not torch.equal(convert.transpose_state(turned), state):
        wrong.append("transpose_state twice is not what it was")
    return wrong


def judge(case: ConvertCase) -> str:
    """What is wrong: an empty text if nothing is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "; ".join([*_judge_masks(case, device), *_judge_state(case, device)])


def check(case: ConvertCase, impl: str = "") -> float:
    """0: these are moves, which do not round. Raises `Finding` with the reproducer when anything is wrong."""
    if wrong := judge(case):
        raise Finding(reproducer(case, impl, f"convert: {wrong}"))
    return 0.0
