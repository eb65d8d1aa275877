"""From sources to `libkda_sm90.so`: find it, compile it, keep it.

Three steps, each with its own errors:

- `built()` says where the library for these sources is, or None. Compiles nothing, runs nothing, needs no compiler.
- `build()` compiles it if it is not there. Raises `Missing` if it cannot begin, `BuildFailed` if it began and failed.
- `kda.cuda.library.load()` opens it. Never compiles.

The cache holds a directory per content, `<sources>-<tools>`. `<sources>` hashes all that this package puts into the
binary and is what a caller looks for; `<tools>` hashes the versions of nvcc and CUTLASS, so that other tools build
again, while a binary of these sources stays good on a machine that has no tools. Directories appear complete, by a
rename; the lock only keeps many processes from compiling the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from kda.cuda import resources, toolchain
from kda.numerics import cuda_header
from kda.problem import Missing

log = logging.getLogger("kda")

#: The folder with csrc/ and include/; in a wheel that carries the binary, lib/ beside them.
SOURCE = Path(__file__).parent

LIBRARY = "libkda_sm90.so"
MANIFEST = "manifest.json"
RESOURCES = "resources.json"

COMPILE = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage",
    "-Xcompiler=-fPIC",
)
#: The CUDA runtime is linked in, and nothing but the C ABI leaves the library: whatever torch loads cannot meet it.
LINK = (
    "-shared",
    "-cudart=static",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xlinker=--version-script=exports.map,-z,defs",
)
EXPORTS = "{ global: kda_*; local: *; };\n"

#: Called with steps done, steps in all, and what goes on.
Progress = Callable[[int, int, str], None]


class UnsafeCache(Missing):
    """Another user could put a library of theirs into the cache directory."""


class BuildFailed(RuntimeError):
    """A compiler failed, or what it made takes resources that it must not take."""


# What is built.


def files(source: Path = SOURCE) -> list[Path]:
    """Everything that the compiler may read of the package, sorted; not what editors and systems leave beside it."""
    found = [path for folder in ("csrc", "include") for path in (source / folder).rglob("*")]
    return sorted(path for path in found if path.is_file() and not re.search(r"^[.#]|[~#]$", path.name))


def _digest(parts: list[bytes]) -> str:
    """A hash of the parts that tells where one ends."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:20]


def source_key(source: Path = SOURCE) -> str:
    """Hash of all that the package puts into the binary: sources, generated header, flags, the CPU it is for."""
    parts = [part.encode() for part in (platform.machine(), cuda_header(), EXPORTS, *COMPILE, "", *LINK)]
    for path in files(source):
        parts += [path.relative_to(source).as_posix().encode(), path.read_bytes()]
    return _digest(parts)


def tools_key(versions: toolchain.Versions) -> str:
    """Hash of the tools' versions."""
    return _digest([part.encode() for part in (versions.nvcc, versions.cutlass, versions.host)])[:12]


# Where it is kept.


def cache_directory() -> Path:
    """KDA_CACHE, else `kda` in the user's cache. It need not exist.

    Hopper machines run Linux, where the user's cache has one rule, the two lines below; platformdirs would bring the
    rules of systems that have no such GPU.
    """
    configured = os.environ.get("KDA_CACHE")
    if configured:
        return Path(configured).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "kda"  # a relative one is to be ignored
    except RuntimeError as error:
        raise Missing("this user has no home directory; set KDA_CACHE to a directory for the built kernels.") from error


def _check_owner(root: Path) -> None:
    """Raise `UnsafeCache` unless only this user and root can write `root`: what lies there is loaded and run."""
    status = root.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeCache(
            f"the cache directory {root} belongs to user {status.st_uid}, who could put any program there; "
            "set KDA_CACHE to a directory of your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeCache(
            f"the cache directory {root} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}); "
            "`chmod go-w` it, or set KDA_CACHE to a directory of your own."
        )


def _complete(folder: Path) -> bool:
    return (folder / LIBRARY).is_file() and (folder / MANIFEST).is_file()


def packaged(source: Path = SOURCE) -> Path | None:
    """The library that a wheel brought, if it is of these very sources."""
    folder = source / "lib"
    if not _complete(folder) or json.loads((folder / MANIFEST).read_text())["sources"] != source_key(source):
        return None
    return folder / LIBRARY


def built(source: Path = SOURCE) -> Path | None:
    """The library for these sources, or None if there is none yet.

    What was built on this machine comes before what a wheel brought: who builds although there is one, wants his own.
    Of several toolchains' the last built or asked for counts. Raises `UnsafeCache` (a `Missing`) rather than look into
    a directory that others can write, unless the wheel brought a library.
    """
    try:
        root = cache_directory()
        if root.is_dir():
            _check_owner(root)
            folders = [folder for folder in root.glob(f"{source_key(source)}-*") if _complete(folder)]
            if folders:
                return max(folders, key=lambda folder: folder.stat().st_mtime_ns) / LIBRARY
    except Missing:
        carried = packaged(source)
        if carried is None:
            raise
        return carried
    return packaged(source)


def unavailable() -> str | None:
    """None if the library is built, else why not: what is missing, or that nobody has asked for it yet."""
    try:
        if built() is not None:
            return None
        toolchain.find()
    except Missing as error:
        return str(error)
    return "not built yet; run `python -m kda build`."


# How it is built.


def build(
    *, force: bool = False, verbose: bool = False, progress: Progress | None = None, source: Path = SOURCE
) -> Path:
    """The library for these sources and this machine's tools, compiled if it is not in the cache.

    Args:
        force:    compile although it is there.
        verbose:  print the compilers' commands and output to standard error.
        progress: told how far it is; without it one line is logged when a compilation begins.
        source:   the folder with csrc/ and include/.

    Raises:
        Missing: a tool or a directory to build in is missing; the message says how to get it.
        BuildFailed: a compiler failed, or a kernel spills, has a stack frame, or its wgmma are serialised.
    """
    if not force and (carried := packaged(source)):
        return built(source) or carried
    try:
        pieces = toolchain.find()
        versions = toolchain.versions(pieces)
    except Missing:
        there = None if force else built(source)
        if there is None:
            raise
        return there
    root = _writable_cache()
    final = root / f"{source_key(source)}-{tools_key(versions)}"
    if _complete(final) and not force:
        with contextlib.suppress(PermissionError):  # a cache that an administrator filled
            os.utime(final)  # now the one that `built` returns
        return final / LIBRARY
    tell = progress or _log_start(final)
    with _locked(root / f"{final.name}.lock", tell):
        if not _complete(final) or force:
            _remove_leftovers(root, final)
            _build_in(root, final, source, pieces, versions, force, verbose, tell)
    return final / LIBRARY


def _writable_cache() -> Path:
    """The cache directory, made if need be. Raises `Missing` where this user cannot or should not write."""
    root = cache_directory()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Missing(f"the cache directory {root} cannot be made ({error.strerror}); set KDA_CACHE.") from error
    _check_owner(root)
    return root


def _log_start(final: Path) -> Progress:
    """Tells on the log, where it shows by default, what a caller waits for; once."""
    told: list[str] = []

    def tell(done: int, total: int, what: str) -> None:
        if what not in told and done == 0:
            told.append(what)
            log.warning("%s, once, which takes up to 4 minutes; the result is kept in %s", what, final)

    return tell


@contextlib.contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Hold the lock. The kernel drops it with its holder, however that ends; NFS passes it on to other machines."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell(0, 0, "waiting for another process that compiles the Hopper kernels")
            lock.acquire(poll_interval=0.5)
    except OSError as error:
        raise Missing(f"{path} cannot be locked ({error}); set KDA_CACHE to another file system.") from error
    try:
        yield
    finally:
        lock.release()


def _temporary(final: Path) -> str:
    """How the names of this machine's temporary directories for `final` begin."""
    return f".{final.name}.{platform.node()}."


def _remove_leftovers(root: Path, final: Path) -> None:
    """Remove what killed builders left. To be called with the lock held.

    The lock says that nobody builds on this machine. Some shared file systems do not pass locks on, so that a directory
    of another machine may be in use until it is a day old.
    """
    for folder in root.glob(f".{final.name}.*"):
        with contextlib.suppress(FileNotFoundError):
            if folder.name.startswith(_temporary(final)) or time.time() - folder.stat().st_mtime > 86_400:
                shutil.rmtree(folder, ignore_errors=True)


def _build_in(
    root: Path,
    final: Path,
    source: Path,
    pieces: toolchain.Pieces,
    versions: toolchain.Versions,
    force: bool,
    verbose: bool,
    tell: Progress,
) -> None:
    """Compile in a directory beside `final`, then put it in its place in one step."""
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=_temporary(final), dir=root))
    try:
        include = work / "include" / "kda"
        include.mkdir(parents=True)
        (include / "numerics.h").write_text(cuda_header())
        (work / "exports.map").write_text(EXPORTS)
        (work / "build.ninja").write_text(_ninja_file(source, pieces))
        output = _run_ninja(work, pieces.ninja, verbose, tell)
        (work / "build.log").write_text(output)
        objections = resources.objections(output)
        if objections:
            rules = "no spills, no stack frames, no wgmma one after the other"
            raise BuildFailed("\n  ".join([f"the Hopper kernels compile, but are refused ({rules}):", *objections]))
        sources = source_key(source)
        if not final.name.startswith(f"{sources}-"):
            raise BuildFailed(f"a file in {source} was changed during the compilation; build again")
        resources.save(resources.parse(output), work / RESOURCES)
        _write_compile_commands(work, final, pieces.ninja)
        seconds = round(time.monotonic() - start, 1)
        manifest = {"sources": sources, **asdict(versions), "seconds": seconds}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for rest in work.glob("*.o"):
            rest.unlink()
        _publish(work, final, force)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log.info("built %s in %.0f s", final / LIBRARY, time.monotonic() - start)


def _publish(work: Path, final: Path, force: bool) -> None:
    """Rename the directory into place. Where another is there already, keep it, or replace it file by file.

    A reader sees a complete directory at every moment: with `force` the old file until the new one has its name.
    """
    try:
        os.rename(work, final)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if force or not _complete(final):
        for path in work.iterdir():
            if path.is_file():
                os.replace(path, final / path.name)
        os.utime(final)


def _ninja_file(source: Path, pieces: toolchain.Pieces) -> str:
    """One edge a translation unit and one to link. Paths of the build directory are relative: it gets another name."""

    def path(text: str) -> str:
        return re.sub(r"([$ :])", r"$\1", text)

    def command(*words: str) -> str:
        return shlex.join([str(pieces.nvcc), *words]).replace("$", "$$")

    include = (f"-I{source / 'include'}", "-Iinclude", "-isystem", str(pieces.cutlass))
    lines = [
        "rule compile",
        f"  command = {command(*COMPILE, *include)} -c $in -o $out",
        "  description = compiled $name",
        "rule link",
        f"  command = {command(*LINK)} $in -o $out",
        "  description = linked $out",
    ]
    units = sorted((source / "csrc").glob("*.cu"))
    for unit in units:
        lines += [f"build {path(unit.stem)}.o: compile {path(str(unit))}", f"  name = {unit.name}"]
    lines += [f"build {LIBRARY}: link {' '.join(path(unit.stem) + '.o' for unit in units)}", f"default {LIBRARY}", ""]
    return "\n".join(lines)


def _run_ninja(work: Path, ninja: Path, verbose: bool, tell: Progress) -> str:
    """Run the build, passing its progress on. Returns what the compilers printed; raises `BuildFailed`."""
    total = (work / "build.ninja").read_text().count("\nbuild ")
    tell(0, total, "compiling the Hopper kernels")
    command = [str(ninja), "-C", str(work), *(["-v"] if verbose else [])]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    lines = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    with process:
        try:
            for line in process.stdout or ():
                if verbose:
                    print(line, end="", file=sys.stderr, flush=True)
                if step := re.match(r"\[(\d+)/(\d+)\] (.*)", line):
                    tell(int(step[1]), int(step[2]), step[3])
                lines.append(line)
        except BaseException:
            process.terminate()
            raise
    output = "".join(lines)
    if process.returncode:
        shown = "".join(lines[-60:]).rstrip()
        raise BuildFailed(f"the Hopper kernels do not compile (ninja's exit status {process.returncode}):\n{shown}")
    return output


def _write_compile_commands(work: Path, final: Path, ninja: Path) -> None:
    """`compile_commands.json` for editors, as run from where the directory will be."""
    command = [str(ninja), "-C", str(work), "-t", "compdb", "compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    entries = json.loads(done.stdout[done.stdout.index("[\n") :])  # after ninja's "Entering directory"
    listed = [{**entry, "directory": str(final)} for entry in entries]
    (work / "compile_commands.json").write_text(json.dumps(listed, indent=1) + "\n")
