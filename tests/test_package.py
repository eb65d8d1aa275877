"""What `import kda` costs and needs (in fresh processes), who may import whom, and what the source promises."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kda
from kda import dispatch

ROOT = Path(__file__).parents[1]
PACKAGE = Path(kda.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    """Dotted name of a source file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in SOURCES}


def fresh(script: str) -> dict:
    """Run a script in a new process; what it leaves in `result`."""
    source = f"import json, sys\nresult = {{}}\n{script}\nprint(json.dumps(result))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# What the import needs.

BARE = """
import builtins, importlib, logging, subprocess, time
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "einops", "rich", "hypothesis", "pytest", "numba", "ninja", "filelock"):
            result["tried"].append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def boom(*args, **kwargs):
    raise AssertionError("a device query or a process")

result["tried"] = []
sys.meta_path.insert(0, Blocked())
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties",
             "get_device_name", "init", "_lazy_init"):
    setattr(torch.cuda, name, boom)
subprocess.Popen = boom
before = set(sys.modules), torch.get_default_dtype(), torch.get_num_threads(), list(logging.getLogger().handlers)
start = time.perf_counter()
import kda
result["seconds"] = time.perf_counter() - start
after = torch.get_default_dtype(), torch.get_num_threads(), list(logging.getLogger().handlers)
result["unchanged"] = before[1:] == after
result["cuda"] = torch.cuda.is_initialized()
result["loaded"] = sorted({name.split(".")[0] for name in set(sys.modules) - before[0]})
result["kda"] = sorted(name for name in sys.modules if name.split(".")[0] == "kda")
result["names"] = [name for name in kda.__all__ if not hasattr(kda, name)]
"""


def test_the_import_makes_real_tensors_under_fake_ones() -> None:
    """As a tracer imports it."""
    script = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.inference_mode(), torch.device("meta"):
    import kda
q = torch.randn(1, 3, 1, 4)
result["o"] = [list(kda.fwd(q, q, q, -q.abs(), q[..., 0]).o.shape) for _ in range(2)]
"""
    assert fresh(script)["o"] == [[1, 3, 1, 4]] * 2


@pytest.fixture(scope="module")
def bare() -> dict:
    """`import kda` with nothing but torch to be had and every device query refused."""
    return fresh(BARE)


def test_import_needs_torch_alone(bare):
    assert bare["tried"] == []
    assert [name for name in bare["loaded"] if name not in {*sys.stdlib_module_names, "kda", "torch"}] == []
    assert bare["names"] == []


def test_import_touches_no_device_and_no_setting(bare):
    assert bare["cuda"] is False
    assert bare["unchanged"]


def test_import_is_quick(bare):
    assert bare["seconds"] < 0.5


def test_import_loads_the_frame_alone(bare):
    assert {framed(name) for name in bare["kda"]} == {"kda", *FRAME, "kda.version", "kda.convert"} - {"kda.gate"}


WITHOUT_TRITON = """
sys.modules["triton"] = None  # as if it were not installed
import torch, kda
from kda import dispatch
q = torch.ones(1, 3, 1, 4)
call = dict(q=q, k=q, v=q, g=q, beta=q[..., 0], lower_bound=-5.0)
result["rows"] = {row.name: [row.available, row.reason] for row in kda.implementations()}
result["finite"] = bool(kda.fwd(**call).o.isfinite().all())
result["chosen"] = kda.explain(**call).chosen
result["reasons"] = {name: list(reasons) for name, reasons in kda.explain(**call).reasons.items()}
try:
    kda.fwd(**call, impl="triton")
except kda.Unsupported as error:
    result["refused"] = str(error)
"""


def test_without_triton():
    result = fresh(WITHOUT_TRITON)
    available, reason = result["rows"]["triton"]
    assert not available
    assert "Triton is not installed" in reason
    assert reason.endswith(".")
    assert reason in result["reasons"]["triton"]
    assert reason in result["refused"]
    assert result["chosen"] == "chunked"
    assert result["finite"]
    assert all(result["rows"][name] == [True, None] for name in ("chunked", "recurrent"))


# Who may import whom: architecture.md, "The seams".

#: numerics <- problem <- {validate, gate, dispatch, ops} <- plan <- api <- transitions
FRAME = {
    "kda.environment": 0,
    "kda.numerics": 0,
    "kda.problem": 1,
    "kda.validate": 2,
    "kda.gate": 2,
    "kda.dispatch": 2,
    "kda.ops": 2,
    "kda.plan": 3,
    "kda.api": 4,
    "kda.transitions": 5,
}
#: What implementations may import.
SHARED = {"kda.problem", "kda.numerics", "kda.gate", "kda.devices", "kda.environment"}
TOOLS = ("kda.testing", "kda.bench", "kda.cli", "kda.__main__")
#: For callers of other libraries, and for many processes: they stand on the frame, and nothing stands on them.
DOORS = ("kda.convert", "kda.integrations", "kda.distributed")
#: The oracle's error propagation stands on the specification; both PyTorch implementations leave states alike.
EXTRA = {
    "kda.ref.error": {"kda.ref.recurrent", "kda.ref.states"},
    "kda.ref.recurrent": {"kda.ref.states"},
    "kda.ref.chunked": {"kda.ref.states"},
}


def inside(name: str, *packages: str) -> bool:
    """Whether a module is one of `packages` or lies in it."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def framed(name: str) -> str:
    """The part of the frame that a module belongs to, or the module."""
    return next((part for part in FRAME if inside(name, part)), name)


def implementation(name: str) -> str | None:
    """The implementation that a module belongs to."""
    return next((owner for owner in dispatch.TABLE.values() if inside(name, owner)), None)


def allowed(importer: str, imported: str) -> bool:
    """Whether the arrow is drawn."""
    if inside(importer, *TOOLS):
        return True
    if importer == "kda":
        return imported in {*FRAME, "kda.version", "kda.convert"}  # of the doors the public one
    if inside(imported, *TOOLS, *DOORS):
        return False
    if inside(importer, *DOORS):
        return framed(imported) in FRAME
    importer, inner = framed(importer), framed(imported)
    if importer in FRAME:
        return FRAME.get(inner, 9) < FRAME[importer] or inner == importer
    if imported in SHARED | EXTRA.get(importer, set()):
        return True
    return implementation(importer) is not None and implementation(importer) == implementation(imported)


def imports(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, inside functions too, however it is spelled."""
    here = module(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if inside(alias.name, "kda"))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = here.split(".") if path.name == "__init__.py" else here.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            if inside(base, "kda"):
                names = [f"{base}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else base for name in names)
        elif isinstance(node, ast.Call):  # importlib.import_module("kda.x")
            texts = {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            yield from texts & (MODULES.keys() - {"kda"})  # "kda" alone is the name of the logger


@pytest.mark.parametrize("name", MODULES)
def test_arrows_in_the_source(name):
    found = sorted(set(imports(MODULES[name])) - {name})
    assert [imported for imported in found if not allowed(name, imported)] == []


def test_the_arrow_test_sees_arrows(tmp_path, monkeypatch):
    """Each spelling of an import is seen, and each kind of forbidden arrow is forbidden."""
    path = PACKAGE / "triton" / "planted.py"
    lines = ["from kda.ref import chunked", "import kda.cuda", "from .. import validate", "from . import math"]
    lines += ["from kda.testing.cases import Case", "importlib.import_module('kda.dispatch')"]
    text = "\n    ".join(["def f():", *lines])
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    found = set(imports(path))
    forbidden = {"kda.ref.chunked", "kda.cuda", "kda.validate", "kda.testing.cases", "kda.dispatch"}
    assert found == forbidden | {"kda.triton.math"}
    assert {name for name in found if not allowed("kda.triton.planted", name)} == forbidden
    arrows = [("kda.numerics", "kda.problem"), ("kda.problem", "kda.gate"), ("kda.gate", "kda.dispatch")]
    arrows += [("kda.api", "kda.testing"), ("kda.ref.chunked", "kda.ref.recurrent"), ("kda.api", "kda.triton")]
    arrows += [("kda.api", "kda.convert"), ("kda.convert", "kda.triton"), ("kda.api", "kda.transitions")]
    arrows += [("kda", "kda.distributed"), ("kda.transitions", "kda.distributed"), ("kda.distributed", "kda.cuda")]
    arrows += [("kda.ref.chunked", "kda.transitions"), ("kda.validate.transitions", "kda.transitions")]
    assert not any(allowed(*arrow) for arrow in arrows)


ALONE = [name for name in MODULES if name != "kda" and not inside(name, *TOOLS)]
ARROWS = f"""
import importlib, os, types
for name in {ALONE}:
    reader, writer = os.pipe()
    if os.fork() == 0:  # each in a child: an operator can be defined only once in a process
        sys.modules["kda"] = types.ModuleType("kda")  # without running kda/__init__.py, which imports the frame
        sys.modules["kda"].__path__ = [{str(PACKAGE)!r}]
        importlib.import_module(name)
        os.write(writer, json.dumps(sorted(m for m in sys.modules if m.split(".")[0] == "kda")).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        result[name] = json.load(answer)
    os.wait()
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Module -> modules of the package that are loaded after it was imported alone."""
    return fresh(ARROWS)


@pytest.mark.parametrize("name", ALONE)
def test_arrows_when_imported_alone(loaded, name):
    packages = {".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)}  # their __init__ comes first
    others = set(loaded[name]) - {name} - packages
    assert {imported for imported in others if not allowed(name, imported)} == set()


# What the source promises.


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_no_assert_and_no_bare_except(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"{path}:{node.lineno} asserts"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno} excepts all"


def tracked() -> list[Path]:
    """The repository's Python files, those not yet added included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0") if done.returncode == 0 else []
    return [ROOT / name for name in names if name and (ROOT / name).is_file()] or [*SOURCES, *ROOT.glob("tests/*.py")]


def test_no_long_file():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tracked()}
    assert "kda/api.py" in lengths
    assert {name: n for name, n in lengths.items() if n > 700} == {}


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", [name for name in kda.__all__ if name != "__version__"])
def test_public_names_have_docstrings(name):
    """Written ones: a dataclass or a NamedTuple without any gets its signature as one."""
    text = inspect.getdoc(getattr(kda, name))
    assert text
    assert not text.startswith(f"{name}(")


def test_all_is_sorted_and_complete():
    assert list(kda.__all__) == sorted(kda.__all__)
    public = {n for n, x in vars(kda).items() if not n.startswith("_") and not inspect.ismodule(x)}
    assert public == set(kda.__all__) - {"__version__", "convert"}


def project() -> dict:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_has_one_home():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev|post)\d+)*", kda.__version__)
    assert "version" in project()["project"]["dynamic"]
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kda.version.__version__"}


def test_version_of_the_installed_package():
    try:
        installed = importlib.metadata.version(project()["project"]["name"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kda is imported from the working directory, not installed")
    assert installed == kda.__version__


def test_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert "py.typed" in project()["tool"]["setuptools"]["package-data"]["kda"]
