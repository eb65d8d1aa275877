"""Compile the Triton kernels for architectures that need not be here, and print their resources.

Run as a program (`python tests/compile_kernels.py 90`): the tests interpret the kernels, and a process can do one only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda.triton import math
from kda.triton.config import (
    ANCHORED_K,
    BLOCK,
    MERGE_TILE,
    MERGE_V,
    MERGE_WARPS,
    SHARED_MEMORY,
    TABLE,
    TOKENS,
    Tiles,
    architecture,
)
from kda.triton.merge import merge_kernel
from kda.triton.prepare import FLAGS, prepare_kernel
from kda.triton.recur import recur_kernel

POINTERS = {
    "cu_seqlens": "*i32",
    "A_log": "*fp32",
    "dt_bias": "*fp32",
    "decay": "*fp32",
    "local": "*fp32",
    "transition": "*fp32",
    "sums": "*fp32",
    "rest": "*fp32",
    "initial": "*fp32",
    "final": "*fp32",
    "reads": "*i64",
    "writes": "*i64",
    "fresh": "*u8",
    "checkpoints": "*fp32",
    "checkpoint_indices": "*i64",
}
SCALARS = {"scale": "fp32", "lower_bound": "fp32", "anchor": "fp32", "beta_factor": "fp32"}
#: Last strides, which are 1 in any ordinary call.
UNIT = ("q_d", "k_d", "g_d", "v_d", "o_d", "i_k", "f_k", "c_k")


def compiled(kernel: Any, bf16: bool, capability: int, constants: dict[str, Any], warps: int, stages: int) -> Any:
    """The kernel for the usual call: aligned pointers, strides divisible by 16."""
    data = "*bf16" if bf16 else "*fp32"
    constants = {**constants, **{name: 1 for name in UNIT if name in kernel.arg_names}}
    tensors = {"q", "k", "v", "g", "beta", "out", "Kd", "Qd", "Ak", "Aq"}
    signature, aligned = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = data if name in tensors else POINTERS.get(name) or SCALARS.get(name) or "i32"
        if signature[name].startswith("*") or re.fullmatch(r"[qkgvoifc]_[bthnv]|K|V", name):
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(binary: Any) -> str:
    """Registers, stack and shared memory, as the disassembler of Triton's own package prints them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", printed))
    registers, stack = found.get("REG", "?"), found.get("STACK", "?")
    return f"{registers:>4} registers {stack:>6} B stack {binary.metadata.shared:>7} B shared"


def rows(capability: int, bf16: bool, K: int, tiles: Tiles) -> list[tuple[str, Any]]:
    """The kernels of one row of the table."""
    common = {"KW": K, "C": TOKENS, "BLOCK": BLOCK, "VARLEN": True, "WIDE": False, "INTERPRET": False}
    common["OPERAND"] = math.BF16 if bf16 else math.FP32
    prepare = dict(
        common,
        BK=tiles.block_k,
        ANCHORED=False,
        LEVELS=TOKENS.bit_length() - 1,
        GATE=math.SOFTPLUS,
        INVERSE=math.FP16 if bf16 else math.FP32,
        TWO_TERMS=not bf16,
    )
    anchored = dict(prepare, BK=min(K, ANCHORED_K), ANCHORED=True, GATE=math.BOUNDED)
    recur = dict(common, KP=K, BV=tiles.block_v, SPLIT=False, LOCAL=False, CHECKPOINTS=False)
    merge = {"BK": min(K, MERGE_TILE // K), "KP": K, "BV": MERGE_V, "VARLEN": True, "INTERPRET": False}
    first = {"prepare": prepare, "prepare, anchored": anchored} if bf16 else {"prepare": prepare}
    second = {"recur": recur, "recur, checkpoints": dict(recur, CHECKPOINTS=True)}
    if K >= 128:  # where room is scarce
        second["recur, local"] = dict(recur, SPLIT=True, LOCAL=True)
    walk = recur_kernel, tiles.recur_warps, tiles.recur_stages
    kinds = [(name, constants, (prepare_kernel, tiles.prepare_warps, 1)) for name, constants in first.items()]
    kinds += [(name, constants, walk) for name, constants in second.items()]
    if K >= 128:
        kinds.append(("merge", merge, (merge_kernel, MERGE_WARPS, 1)))
    return [
        (name, compiled(kernel, bf16, capability, constants, warps, stages))
        for name, constants, (kernel, warps, stages) in kinds
    ]


def main(capability: int, widths: list[int]) -> int:
    """Print a line per kernel; the exit status counts those that need too much shared memory, specialise a flag or
    multiply in fp16.
    """
    arch = architecture((capability // 10, capability % 10))
    over = 0
    for kernel, flags in (
        (prepare_kernel, FLAGS),
        (recur_kernel, ["has_initial", "has_final", "has_reads", "has_writes", "has_fresh"]),
    ):
        specialised = [p.name for p in kernel.params if p.name in flags and not p.do_not_specialize]
        if specialised or not set(flags) <= set(kernel.arg_names):
            print(f"{kernel.__name__}: a flag of 1 would be compiled by itself: {specialised}")
            over += 1
    for (row_arch, bf16, K), tiles in TABLE.items():
        if row_arch != arch or (widths and K not in widths):
            continue
        for name, binary in rows(capability, bf16, K, tiles):
            print(f"sm_{capability} {'bf16' if bf16 else 'fp32'} K {K:>3} {name:<20}{resources(binary)}", flush=True)
            over += binary.metadata.shared > SHARED_MEMORY[arch]
            if re.search(r"\bmul(\.\w+)*\.f16", binary.asm["ptx"]):
                print("  a product in fp16, whose factors were scaled in fp32: LLVM moved a conversion before it")
                over += 1
    return over


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [int(width) for width in sys.argv[2:]]))
