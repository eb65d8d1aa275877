"""What ptxas says a kernel takes, and what of that a build may not have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

#: Notes of ptxas that undo the design: wgmma one after the other, or a setmaxnreg that is ignored.
NOTES = re.compile(r"\((C75\d\d)\) *(.*)")
MANGLED = re.compile(r"\b_Z\w+")


@dataclass(frozen=True)
class Resources:
    """One kernel, or a device function that was not inlined, as ptxas prints it.

    registers: per thread at launch; 0 for a device function, whose registers its kernels count.
    stack, spill_stores, spill_loads: bytes per thread.
    shared:    static shared memory, bytes per block.
    """

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    barriers: int


def short(name: str) -> str:
    """A demangled name without return type, namespaces of ours and parameters: `fwd_kernel<true, 128>`."""
    head = name.removeprefix("void ")
    depth = 0
    for position, letter in enumerate(head):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and not head.startswith("(anonymous namespace)", position):
            head = head[:position]
            break
    return re.sub(r"\bkda::|\(anonymous namespace\)::", "", head)


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Mangled -> short name, by c++filt (it comes with the linker that nvcc needs); as it is without one."""
    mangled = list(dict.fromkeys(names))
    tool = shutil.which("c++filt")
    if not mangled or tool is None:
        return {name: name for name in mangled}
    done = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True, check=True, timeout=60)
    return dict(zip(mangled, map(short, done.stdout.splitlines()), strict=True))


def parse(output: str) -> list[Resources]:
    """The table of a compiler's output under `-Xptxas=-v`, in its order."""
    rows: dict[str, dict[str, int]] = {}
    entry = name = ""
    for line in output.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            entry = found[1]
        elif found := re.search(r"Function properties for '?([^'\s]+)", line):
            name = found[1]
            rows.setdefault(name, {})
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            rows[name] |= {"stack": int(found[1]), "spill_stores": int(found[2]), "spill_loads": int(found[3])}
        elif found := re.search(r"Used (\d+) registers", line):
            row = rows.setdefault(entry, {})
            row["registers"] = int(found[1])
            for field, pattern in {"barriers": r"used (\d+) barriers", "shared": r"(\d+) bytes smem"}.items():
                if more := re.search(pattern, line):
                    row[field] = int(more[1])
            if more := re.search(r"(\d+) bytes cumulative stack size", line):
                row["stack"] = max(int(more[1]), row.get("stack", 0))
    names = demangle(rows)
    nothing = dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "shared", "barriers"), 0)
    return [Resources(names[name], **{**nothing, **row}) for name, row in rows.items()]


def objections(output: str) -> list[str]:
    """Everything in a compiler's output that a build may not have, a line each; empty if it is as it should be."""
    found = []
    for row in parse(output):
        figures = {"stack frame": row.stack, "spill stores": row.spill_stores, "spill loads": row.spill_loads}
        found += [f"{row.kernel}: {size} bytes of {what}" for what, size in figures.items() if size]
    notes = [f"{code}: {text}" for code, text in dict.fromkeys(NOTES.findall(output))]  # ptxas repeats itself
    names = demangle(name for note in notes for name in MANGLED.findall(note))
    return found + [MANGLED.sub(lambda match: names[match[0]], note) for note in notes]


def save(rows: Iterable[Resources], path: Path) -> None:
    """Write the table to `path` as JSON."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def read(path: Path) -> list[Resources]:
    """The table that `save` wrote."""
    return [Resources(**row) for row in json.loads(path.read_text())]
