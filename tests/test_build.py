"""From sources to a library: what is kept, what is refused, that one process compiles and nobody sees half a build.

A shell script stands in for nvcc; `test_library.py` has the real one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from machines import Machine, release, sentence

import kda.numerics
from kda.cuda import build, toolchain
from kda.problem import Missing

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are built on Linux")


# The key.


def test_the_key_is_that_of_the_content(machine, monkeypatch):
    keys = [build.source_key(machine.source)]

    def changed() -> bool:
        keys.append(build.source_key(machine.source))
        return len(set(keys)) == len(keys)

    assert build.source_key(machine.source) == keys[0]
    for name in ("one.cu~", ".one.cu.swp", "#one.cu#"):
        (machine.source / "csrc" / name).write_text("an editor's copy")
    assert build.source_key(machine.source) == keys[0]
    (machine.source / "csrc" / "one.cu").write_text("1 ")
    assert changed()
    (machine.source / "include" / "kda" / "new.cuh").write_text("")
    assert changed()
    (machine.source / "include" / "kda" / "new.cuh").rename(machine.source / "include" / "kda" / "newer.cuh")
    assert changed()
    monkeypatch.setattr(build, "COMPILE", (*build.COMPILE, "-G"))
    assert changed()
    monkeypatch.setattr(kda.numerics, "L2NORM_EPS", 1e-5)
    assert changed()
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert changed()
    copy = machine.source.parent / "copy"
    shutil.copytree(machine.source, copy)
    assert build.source_key(copy) == keys[-1]


def test_other_tools_build_again_and_what_was_built_stays_good_without_any(machine, monkeypatch):
    first = machine.build()
    assert machine.build() == first
    assert machine.compilations() == 2
    machine.tell(version=release("13.1"))
    second = machine.build()
    (machine.cutlass / "cutlass" / "version.h").write_text("#define CUTLASS_MAJOR 5\n")
    third = machine.build()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O1")
    fourth = machine.build()
    assert len({first, second, third, fourth}) == 4
    assert machine.compilations() == 8
    assert machine.built() == fourth
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    assert machine.build() == third
    assert machine.built() == third, "the last one asked for"
    monkeypatch.setenv("CUDA_HOME", str(machine.bin / "nowhere"))
    assert machine.built() == machine.build() == third
    with pytest.raises(Missing, match="CUDA_HOME"):
        machine.build(force=True)


def test_the_numbers_of_the_kernels_are_those_of_python(tmp_path):
    header = kda.numerics.cuda_header()
    for name in ("LOG2E", "L2NORM_EPS", "CHUNK", "LOG_DECAY_FLOOR", "MAX_EXP", "EXPONENT_BITS"):
        (line,) = [line for line in header.splitlines() if f" {name} = " in line]
        kind, text = line.removeprefix("inline constexpr ").split()[0], line.rsplit(" ", 1)[1].rstrip(";")
        value = getattr(kda.numerics, name)
        assert kind == type(value).__name__
        assert type(value)(text.removesuffix("f")) == value
    if shutil.which("g++"):
        (tmp_path / "numerics.h").write_text(header)
        unit = f'#include "numerics.h"\nstatic_assert(kda::CHUNK == {kda.numerics.CHUNK} && kda::LOG2E > 1.4f);\n'
        (tmp_path / "unit.cpp").write_text(unit)
        command = ["g++", "-std=c++17", "-Wall", "-Werror", "-fsyntax-only", str(tmp_path / "unit.cpp")]
        subprocess.run(command, check=True, timeout=60)


# The cache.


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KDA_CACHE", "~/mine")
    assert build.cache_directory() == tmp_path / "mine"
    monkeypatch.setenv("KDA_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_directory() == tmp_path / "xdg" / "kda"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert build.cache_directory() == tmp_path / ".cache" / "kda"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(build.Path, "home", homeless)
    with pytest.raises(Missing, match="set KDA_CACHE"):
        build.cache_directory()


def test_looking_makes_nothing(machine):
    assert machine.built() is None
    assert build.unavailable() is not None
    assert not machine.cache.exists()
    assert machine.compilations() == 0
    assert not (machine.bin / "calls").exists(), "nvcc was not even asked for its version"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_the_cache_is_made_for_its_owner_alone(machine, umask):
    before = os.umask(umask)
    try:
        path = machine.build()
    finally:
        os.umask(before)
    for folder in (machine.cache, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert machine.built() == path


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777, 0o755, 0o500])
def test_a_cache_that_others_can_write_is_refused(machine, mode):
    path = machine.build()
    machine.cache.chmod(mode)
    if mode in (0o755, 0o500):
        assert machine.built() == path
        assert machine.build() == path
        return
    for step in (machine.built, machine.build):
        with pytest.raises(build.UnsafeCache, match="written by other users") as caught:
            step()
        assert sentence(str(caught.value))
        assert str(machine.cache) in str(caught.value)
    assert "written by other users" in str(build.unavailable())


def test_a_cache_of_another_user_is_refused(machine, monkeypatch):
    machine.build()
    if os.geteuid() == 0:
        os.chown(machine.cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for step in (machine.built, machine.build):
        with pytest.raises(build.UnsafeCache, match="belongs to user"):
            step()


def test_a_cache_that_cannot_be_made(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(Missing, match=r"cannot be made.*set KDA_CACHE"):
        machine.build()


# Building.


def test_what_a_build_leaves(machine):
    told: list[tuple[int, int, str]] = []
    path = machine.build(progress=lambda *step: told.append(step))
    names = {entry.name for entry in path.parent.iterdir()}
    assert {build.LIBRARY, build.MANIFEST, build.RESOURCES, "compile_commands.json", "build.log", "include"} <= names
    assert not [name for name in names if name.endswith(".o")]
    assert (path.parent / "include" / "kda" / "numerics.h").read_text() == kda.numerics.cuda_header()
    assert machine.left() == []
    assert told[0] == (0, 3, "compiling the Hopper kernels")
    assert [step[:2] for step in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    commands = json.loads((path.parent / "compile_commands.json").read_text())
    assert {Path(entry["file"]).name for entry in commands} == {"one.cu", "two.cu"}
    for entry in commands:
        assert entry["directory"] == str(path.parent)
        assert all(flag in entry["command"] for flag in ("-std=c++17", "-lineinfo", "code=sm_90a", "-Iinclude"))
    assert json.loads((path.parent / build.MANIFEST).read_text())["nvcc"] == "13.0.88"


def test_one_line_is_logged_when_a_compilation_begins_and_none_when_it_need_not(machine, caplog):
    with caplog.at_level(logging.WARNING, "kda"):
        machine.build()
        machine.build()
    assert len(caplog.messages) == 1
    assert "compiling the Hopper kernels, once" in caplog.messages[0]


def test_nobody_sees_half_a_build(machine):
    seen: list[Path | None] = []
    first = machine.build(progress=lambda *step: seen.append(machine.built()))
    assert set(seen) == {None}
    before = first.read_text()
    seen.clear()
    assert machine.build(force=True, progress=lambda *step: seen.append(machine.built())) == first
    assert set(seen) == {first}
    assert first.read_text() != before
    assert machine.left() == []


def test_the_loser_of_a_race_keeps_the_winners(machine):
    """As on a file system whose locks do not reach other machines."""

    def overtaken(done: int, total: int, what: str) -> None:
        if done == total:
            folder = machine.cache / f"{build.source_key(machine.source)}-{tools()}"
            folder.mkdir()
            for name in (build.LIBRARY, build.MANIFEST):
                (folder / name).write_text("the winner's")

    def tools() -> str:
        return build.tools_key(toolchain.versions(toolchain.find()))

    path = machine.build(progress=overtaken)
    assert path.read_text() == "the winner's"
    assert machine.left() == []


def test_a_source_that_changes_meanwhile(machine):
    """The key was that of the old text, the binary may be of the new one."""

    def edit(done: int, total: int, what: str) -> None:
        (machine.source / "csrc" / "one.cu").write_text(f"edited {done}")

    with pytest.raises(build.BuildFailed, match="was changed during the compilation; build again"):
        machine.build(progress=edit)
    assert list(machine.cache.glob("*/")) == machine.left() == []


def test_what_killed_builders_left_is_removed(machine):
    """At once if it is this machine's; another machine's may be in use where locks do not reach it, for a day."""
    final = machine.build().parent
    here, there, old = (machine.cache / f".{final.name}.{name}.x" for name in (build.platform.node(), "there", "old"))
    for folder in (here, there, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    machine.build(force=True)
    assert machine.left() == [there]


def test_a_build_that_lost_its_library_is_made_again(machine):
    path = machine.build()
    path.unlink()
    assert machine.built() is None
    assert machine.build() == path
    assert path.is_file()


def test_verbose_prints_what_the_compilers_print(machine, capfd):
    machine.tell(output="ptxas info : hello\n")
    machine.build(verbose=True)
    printed = capfd.readouterr().err
    assert "ptxas info : hello" in printed
    assert str(machine.bin / "nvcc") in printed


def test_a_compiler_that_fails(machine):
    machine.tell(output="one.cu(3): error: expected a ;\n", status=2)
    with pytest.raises(build.BuildFailed, match=r"do not compile(.|\n)*error: expected a ;"):
        machine.build()
    assert machine.built() is None
    assert machine.left() == []
    machine.tell(output="", status=0)
    assert machine.build().is_file()


def test_an_interrupted_build_leaves_nothing(machine):
    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.build(progress=interrupt)
    assert machine.left() == []
    assert machine.build().is_file()


# Many processes.

BUILD = "import sys; from pathlib import Path; from kda.cuda import build; print(build.build(source=Path(sys.argv[1])))"


@pytest.fixture
def start(machine) -> Iterator:
    """Begin a build in a process group of its own; the groups end with the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", BUILD, str(machine.source)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        return processes[-1]

    yield begin
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_of_two_processes_one_compiles(machine, start):
    machine.tell(delay=0.5)
    processes = [start(), start()]
    printed = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == {str(machine.built())}
    assert machine.compilations() == 2, "each of the two files once"


def test_of_many_threads_one_compiles(machine):
    machine.tell(delay=0.2)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: machine.build(), range(8)))
    assert set(paths) == {machine.built()}
    assert machine.compilations() == 2


def test_a_killed_builder_holds_nobody_up(machine, start):
    machine.tell(delay=30)
    process = start()
    wait_for(lambda: machine.compilations() == 2)
    os.kill(process.pid, signal.SIGKILL)  # its compilers live on
    process.wait()
    assert machine.built() is None
    assert len(machine.left()) == 1
    machine.tell(delay=0)
    begin = time.monotonic()
    path = machine.build()
    assert time.monotonic() - begin < 20
    assert path.is_file()
    assert machine.left() == []


# The wheel's library.


def carry(machine: Machine) -> Path:
    """Put a built library into the package, as a wheel does."""
    path = machine.build()
    lib = machine.source / "lib"
    lib.mkdir()
    for name in (build.LIBRARY, build.MANIFEST, build.RESOURCES):
        shutil.copyfile(path.parent / name, lib / name)
    shutil.rmtree(machine.cache)
    return lib / build.LIBRARY


def test_a_carried_library_needs_no_tools_and_no_cache(machine, monkeypatch):
    carried = carry(machine)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert machine.built() == machine.build() == carried
    machine.cache.mkdir(mode=0o700)
    assert machine.built() == carried
    machine.cache.chmod(0o777)
    assert machine.built() == machine.build() == carried, "the cache is not looked into"


def test_a_carried_library_of_other_sources_is_no_library(machine):
    carry(machine)
    (machine.source / "csrc" / "one.cu").write_text("changed")
    assert machine.built() is None


def test_who_builds_beside_a_carried_library_gets_his_own(machine):
    carried = carry(machine)
    assert machine.build() == carried
    own = machine.build(force=True)
    assert own != carried
    assert machine.built() == machine.build() == own
