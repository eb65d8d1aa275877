"""Machines of the tests' own to build on: one whose nvcc is a script that does as it is told, one with nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kda.cuda import build, toolchain

#: What a build reads of the environment.
SETTINGS = ("CUDA_HOME", "CUTLASS_HOME", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "KDA_NO_JIT")

NVCC = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/calls"
if [ "$1" = --version ]; then cat "$here/version"; exit 0; fi
sleep "$(cat "$here/delay")"
cat "$here/output"
for last; do :; done
echo built >> "$here/calls"; wc -l < "$here/calls" > "$last"
exit "$(cat "$here/status")"
"""


@dataclass(frozen=True)
class Machine:
    """A machine of the tests' own: its nvcc, which does as it is told, its CUTLASS, its cache, and sources."""

    bin: Path
    cutlass: Path
    cache: Path
    source: Path

    def tell(self, **knobs: object) -> None:
        """What nvcc does from now on: version, delay, output, status."""
        for name, value in knobs.items():
            (self.bin / name).write_text(str(value))

    def compilations(self) -> int:
        """How often nvcc was asked to compile a file."""
        calls = self.bin / "calls"
        return sum(" -c " in line for line in calls.read_text().splitlines()) if calls.exists() else 0

    def build(self, **options) -> Path:
        return build.build(source=self.source, **options)

    def built(self) -> Path | None:
        return build.built(self.source)

    def left(self) -> list[Path]:
        """Temporary directories of builds."""
        return [path for path in self.cache.glob(".*") if path.is_dir()]


def release(number: str) -> str:
    return f"Cuda compilation tools, release {number}, V{number}.88\n"


def script(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """A program at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def headers(folder: Path, version: tuple[int, int, int] = (4, 2, 0)) -> Path:
    """CUTLASS' version header below `folder`."""
    path = folder / "cutlass" / "version.h"
    path.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    path.write_text("".join(f"#define CUTLASS_{part} {number}\n" for part, number in parts))
    return folder


def sentence(text: str) -> bool:
    """Words, and a period at the end."""
    return text.endswith(".") and len(text.split()) >= 3 and "\n" not in text


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with all the pieces, first on the PATH."""
    there = Machine(tmp_path / "bin", headers(tmp_path / "cutlass"), tmp_path / "the cache: $1", tmp_path / "the $rc")
    script(there.bin / "nvcc", NVCC)
    there.tell(version=release("13.0"), delay=0, output="", status=0)
    for name, text in {"csrc/one.cu": "1", "csrc/two.cu": "2", "include/kda/abi.h": "#define KDA_ABI 7\n"}.items():
        (there.source / name).parent.mkdir(parents=True, exist_ok=True)
        (there.source / name).write_text(text)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{there.bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUTLASS_HOME", str(there.cutlass))
    monkeypatch.setenv("KDA_CACHE", str(there.cache))
    script(there.bin / "g++")
    return there


def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with no piece at all. Returns the one directory of its PATH."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA", tmp_path / "cuda")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *args: str(tmp_path / "scripts"))
    return path
