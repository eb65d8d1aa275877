"""The one real compilation of the suite (fixture `library`): what came out, the command, the wheel that carries it."""

from __future__ import annotations

import ctypes.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kda.cuda
from kda import api, dispatch, validate
from kda.cuda import build, resources
from kda.numerics import cuda_header
from kda.problem import STEP_TENSORS, TENSORS, Missing
from kda.testing.cases import Case, arguments

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are built on Linux")


# The real library.


def test_what_the_kernels_take(library):
    rows = resources.read(library.parent / build.RESOURCES)
    for row in rows:
        assert (row.stack, row.spill_stores, row.spill_loads) == (0, 0, 0), row
        assert row.registers <= 255, row
        assert row.shared <= 227 * 1024, row
    assert rows
    assert json.loads((library.parent / build.MANIFEST).read_text())["seconds"] < 240


def tool(*command: str | Path) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_what_the_library_needs(library):
    """The C and C++ runtimes: no torch, no CUDA runtime, no driver."""
    lines = [line for line in tool("readelf", "-d", library).splitlines() if "(NEEDED)" in line]
    needed = {line.split("[")[1].split(".so")[0] for line in lines}
    assert "libc" in needed
    allowed = {"libc", "libm", "libdl", "libpthread", "librt", "libstdc++", "libgcc_s"}
    assert {name for name in needed if not name.startswith("ld-linux")} <= allowed


def test_what_the_library_exports(library):
    lines = tool("nm", "-D", "--defined-only", library).splitlines()
    names = {line.split()[-1] for line in lines}
    header = (build.SOURCE / "include" / "kda" / "abi.h").read_text()
    assert names == set(re.findall(r"^\w[\w *]*\b(kda_\w+)\(", header, re.M))


def test_the_structures_are_those_of_the_header(tmp_path):
    """Every field lies where the C compiler puts it, and none is left out."""
    from kda.cuda.library import REFUSED
    from kda.cuda.params import DTYPES, GATES, FwdParams, StepParams

    lines = ["#include <stddef.h>", '#include "kda/abi.h"']
    for structure, name_in_c in ((FwdParams, "kda_fwd_params"), (StepParams, "kda_step_params")):
        lines.append(f'_Static_assert(sizeof(struct {name_in_c}) == {ctypes.sizeof(structure)}, "size");')
        for name, *_ in structure._fields_:
            field = getattr(structure, name)
            offset, size = f"offsetof(struct {name_in_c}, {name})", f"sizeof(((struct {name_in_c}*)0)->{name})"
            lines.append(f'_Static_assert({offset} == {field.offset} && {size} == {field.size}, "{name}");')
    for gate, number in GATES.items():
        lines.append(f'_Static_assert(KDA_{gate.name} == {number}, "{gate}");')
    for dtype, number in DTYPES.items():
        short = str(dtype).removeprefix("torch.").replace("bfloat", "BF").replace("float", "FP").upper()
        lines.append(f'_Static_assert(KDA_{short} == {number}, "{dtype}");')
    lines.append(f'_Static_assert(KDA_REFUSED == {REFUSED}, "KDA_REFUSED");')
    (tmp_path / "fields.c").write_text("\n".join([*lines, ""]))
    tool("gcc", "-std=c11", "-fsyntax-only", f"-I{build.SOURCE / 'include'}", tmp_path / "fields.c")


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """`kda::refused` of extents.h, of a call as the kernel is given it."""
    from kda.cuda import fwd, step

    folder = tmp_path_factory.mktemp("extents")
    lines = ['#include "kda/extents.h"']
    for call in ("fwd", "step"):
        lines.append(f'extern "C" int {call}(const kda_{call}_params* p) {{ return kda::refused(*p); }}')
    (folder / "kda").mkdir()
    (folder / "kda" / "numerics.h").write_text(cuda_header())
    (folder / "extents.cc").write_text("\n".join([*lines, ""]))
    flags = [
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{build.SOURCE / 'include'}",
        f"-I{folder}",
    ]
    tool("g++", *flags, folder / "extents.cc", "-o", folder / "extents.so")
    compiled = ctypes.CDLL(str(folder / "extents.so"))
    compiled.fwd.argtypes = compiled.step.argtypes = [ctypes.c_char_p]

    def ask(call):
        call = {"out": torch.empty_like(call["v"]), **call}
        if "state" in call:
            flags = {name: call.get(name) for name in ("scale", "token_indices", "write_indices", "fresh")}
            problem, host, names = validate.step(**{**flags, **call}), step, STEP_TENSORS
        else:
            problem, host, names = api.gather(**call)[0], fwd, TENSORS
        tensors = {name: call.get(name) for name in names}
        addresses = [0 if x is None else x.data_ptr() for x in tensors.values()]
        if host is step:
            return bool(compiled.step(step._ADDRESSES.pack(*addresses) + step._parameters(problem, tensors)))
        known = fwd.Known(bytes(fwd._parameters(problem, tensors))[fwd._ADDRESSES.size :], workspace=0)
        return bool(compiled.fwd(known.addressed(addresses, problem.q.device)[0]))

    return ask


#: Tensors of a call that cannot be there together.
STATES, SLOTS = {"initial_state", "final_state"}, {"state_pool", "state_indices", "write_indices", "fresh"}
BUFFERS = ("out", "final_state", "state_pool", "checkpoints")


def on_a_pool(call):
    """The call with the initial states in a pool, and checkpoints."""
    states, N = call["initial_state"], len(call["initial_state"])
    call = {name: x for name, x in call.items() if name not in STATES | {"output_final_state"}}
    call["state_pool"], call["checkpoints"] = states.clone(), torch.empty_like(states)
    for name in ("state_indices", "write_indices"):
        call[name] = torch.arange(N)
    call["fresh"] = torch.zeros(N, dtype=torch.bool)
    call["checkpoint_indices"], call["checkpoint_every"] = torch.zeros(N, 2, dtype=torch.int32), 64
    return call


@pytest.mark.parametrize(
    ("buffer", "other"),
    [
        (buffer, other)
        for buffer in BUFFERS
        for other in TENSORS
        if buffer != other and not (buffer in STATES and other in SLOTS) and not (buffer in SLOTS and other in STATES)
    ],
)
def test_buffers_on_other_tensors_are_refused(refused, monkeypatch, buffer, other):
    """Before the first byte, over it, over the last one, and after it: as validation says."""
    case = Case(lengths=(20, 0, 5), H=2, group=2, K=128, V=128)
    call = arguments(case)
    if "final_state" in (buffer, other):
        call["final_state"] = torch.empty_like(call["initial_state"])
    if "checkpoint" in buffer + other and not SLOTS & {buffer, other}:
        call = {**call, **{name: x for name, x in on_a_pool(call).items() if name.startswith("checkpoint")}}
    elif {buffer, other} & (SLOTS | {"checkpoints", "checkpoint_indices"}):
        call = on_a_pool(call)
    over_and_beside(refused, monkeypatch, call, buffer, other)


@pytest.mark.parametrize("buffer", ["out", "state"])
@pytest.mark.parametrize("other", STEP_TENSORS)
def test_buffers_of_a_step_on_other_tensors_are_refused(refused, monkeypatch, buffer, other):
    if buffer == other:
        pytest.skip("a buffer is not compared with itself")
    call = arguments(Case(lengths=(2,) * 3, packed=False, H=2, group=2, K=128, V=128))
    call["state"] = call.pop("initial_state")
    del call["output_final_state"]
    for name in ("state_indices", "write_indices"):
        call[name] = torch.arange(3, dtype=torch.int32)
    call["token_indices"], call["fresh"] = torch.full((3, 2), -1), torch.zeros(3, dtype=torch.bool)
    over_and_beside(refused, monkeypatch, call, buffer, other)


def over_and_beside(refused, monkeypatch, call, buffer, other):
    """A buffer around another tensor of the call, byte by byte where it matters."""
    monkeypatch.setattr("kda.validate.memory.require_writable", lambda *_: None)
    store = torch.zeros(1 << 23, dtype=torch.uint8)

    def put(x, at):
        """A tensor like x `at` bytes into the store, its rows apart."""
        *strides, last = x.stride()
        apart = (*(2 * stride for stride in strides), last) if x.ndim > 2 else x.stride()
        return store.view(x.dtype).as_strided(x.shape, apart, at // x.element_size())

    if other == "out":
        call["out"] = torch.empty_like(call["v"])
    states = ("initial_state", "state_pool", "state")
    made = call["v"] if buffer == "out" else next(call[name] for name in states if name in call)
    made = torch.empty_like(made)
    middle = 1 << 21
    call[other] = put(call[other], middle)
    length, size = (stop - start for start, stop in map(validate.extent, (call[other], put(made, 0))))
    for at, expected in (
        (middle - size, False),
        (middle - size + 16, True),
        (middle + (length - 1) // 16 * 16, True),
        (middle + (length + 15) // 16 * 16, False),
    ):
        given = {**call, buffer: put(made, at)}
        assert validate.meet(*map(validate.extent, (given[buffer], given[other]))) == expected
        assert refused(given) == expected, at - middle


def test_a_state_in_place_and_addresses(refused):
    call = arguments(Case(lengths=(20, 0, 5), H=2, K=128, V=128))
    assert not refused(call | {"final_state": call["initial_state"]})
    pooled = on_a_pool(call)
    assert not refused(pooled)
    assert not refused(pooled | {"checkpoints": pooled["state_pool"]})
    assert not refused(call | {"A_log": None, "dt_bias": None, "initial_state": None, "cu_seqlens": None})
    for name in ("q", "initial_state"):
        x = call[name]
        store = torch.zeros(x.numel() + 16, dtype=x.dtype)
        first = -store.data_ptr() % 16 // x.element_size()
        for shift in (0, 2):
            assert refused(call | {name: store[first + shift : first + shift + x.numel()].view(x.shape)}) == bool(shift)


def test_load(library):
    from kda.cuda.library import REFUSED, abi, check, load, open_library

    opened = load()
    assert load() is opened
    assert opened.kda_abi() == abi()
    assert opened.kda_arch() == 90
    check(0)
    with pytest.raises(RuntimeError, match=r"the fwd kernel failed: out of memory \(CUDA error 2\)"):
        check(2, "the fwd kernel")
    with pytest.raises(RuntimeError, match="a buffer may lie on another tensor"):
        check(REFUSED)
    with pytest.raises(RuntimeError, match=f"has ABI {abi()}, expected {abi() + 1}.*build --force"):
        open_library(library, abi() + 1)
    garbage = ctypes.util.find_library("m")
    with pytest.raises(RuntimeError, match="cannot be used"):
        open_library(Path(garbage or "nothing"), abi())


def test_load_without_a_library(monkeypatch, tmp_path):
    from kda.cuda import library as module

    monkeypatch.setenv("KDA_CACHE", str(tmp_path))
    with pytest.raises(Missing, match="python -m kda build"):
        module.load.__wrapped__()


def wheel(checkout: Path, **environment: str) -> Path:
    """Build a wheel of the checkout with this environment's setuptools."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", "wheels", "."]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return max((checkout / "wheels").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_wheels(library, tmp_path):
    """One that carries the library is found without tools; a pure one after it carries the sources alone."""
    pytest.importorskip("setuptools", minversion="77")
    checkout, target = tmp_path / "checkout", tmp_path / "target"
    shutil.copytree(ROOT / "kda", checkout / "kda", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    binary = wheel(checkout, KDA_WITH_BINARY="1")
    assert "-py3-none-linux_" in binary.name
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", str(target), str(binary)]
    subprocess.run(install, check=True, timeout=120)
    program = "from kda.cuda import build, library; print(build.built()); print(library.load().kda_arch())"
    variables = {"PYTHONPATH": str(target), "KDA_CACHE": str(tmp_path / "none"), "PATH": "", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=target, env=variables, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split() == [str(target / "kda" / "cuda" / "lib" / build.LIBRARY), "90"], found.stderr
    pure = wheel(checkout, KDA_WITH_BINARY="")
    assert pure.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(pure).namelist()
    assert not [name for name in names if "/cuda/lib/" in name]
    assert {f"kda/cuda/{path.relative_to(build.SOURCE)}" for path in build.files()} <= set(names)


# The public call and the command.


@pytest.fixture
def pristine() -> Iterator[None]:
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.usefixtures("pristine")
def test_kda_build_makes_it_available(monkeypatch, tmp_path):
    impl = dispatch.implementation("cuda")
    state = {"built": False, "asked": []}

    def make(**options: bool) -> Path:
        state["built"] = True
        state["asked"].append(options)
        return tmp_path

    fake = replace(impl, build=make, unavailable=lambda: None if state["built"] else "not built yet.")
    monkeypatch.setattr(kda.cuda, "IMPL", fake)
    assert dispatch._missing("cuda") == "not built yet."
    assert kda.build(force=True) == tmp_path
    assert state["asked"] == [{"force": True, "verbose": False}]
    assert dispatch._missing("cuda") is None


def command(*arguments: str, capsys) -> tuple[int, str]:
    from kda.cli import main

    status = main(["build", *arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.usefixtures("pristine")
def test_the_command_without_tools(bare, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KDA_CACHE", str(tmp_path / "none"))
    status, text = command(capsys=capsys)
    assert status == 1
    assert "nvcc was not found" in text
    assert "Traceback" not in text


@pytest.mark.usefixtures("pristine")
def test_the_command(library, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    status, text = command(capsys=capsys)
    assert status == 0
    assert text.splitlines()[-1] == str(library)
    for part in ("nvcc ", "CUTLASS ", "ninja: ", "built in "):
        assert part in text
    for row in resources.read(library.parent / build.RESOURCES):
        assert row.kernel in text
