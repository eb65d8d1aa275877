"""What a build of the Hopper kernels needs of a machine: nvcc, the CUTLASS headers, ninja, a C++ compiler.

A setting that is there is obeyed or refused, never passed over: a wrong CUDA_HOME or CUTLASS_HOME is an error although
another toolkit may be on the PATH.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kda.problem import Missing

#: The first toolkit whose ptxas knows sm_90a, and with it wgmma and setmaxnreg.
OLDEST_NVCC = (12, 0)

#: Where the CUDA installer puts the toolkit. Looked at last, for shells whose PATH was never set up.
DEFAULT_CUDA = Path("/usr/local/cuda")

EXTRA = "`pip install '.[cuda]'` in a checkout of kda"


def _set(name: str) -> Path | None:
    """The directory that an environment variable names; unset and empty are the same."""
    value = os.environ.get(name)
    return Path(value).expanduser().absolute() if value else None


def find_nvcc() -> Path:
    """nvcc of CUDA_HOME, else of the PATH, else of the toolkit's usual place. Runs nothing; raises `Missing`."""
    home = _set("CUDA_HOME")
    if home is not None:
        if not os.access(home / "bin" / "nvcc", os.X_OK):
            raise Missing(
                f"nvcc was not found: CUDA_HOME is {home}, which has no bin/nvcc; "
                "set it to a CUDA toolkit, or unset it to use the nvcc of the PATH."
            )
        return home / "bin" / "nvcc"
    found = shutil.which("nvcc") or shutil.which(DEFAULT_CUDA / "bin" / "nvcc")
    if found is None:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise Missing(
            f"nvcc was not found on the PATH or in {DEFAULT_CUDA}; install the CUDA toolkit, {oldest} or newer, "
            "or set CUDA_HOME to it."
        )
    return Path(found).absolute()


def find_cutlass() -> Path:
    """The directory to include CUTLASS from. Imports nothing; raises `Missing`.

    CUTLASS_HOME names a checkout or its include directory; without it, the headers of the `nvidia-cutlass` wheel.
    """
    home = _set("CUTLASS_HOME")
    if home is not None:
        for include in (home / "include", home):
            if (include / "cutlass" / "version.h").is_file():
                return include
        raise Missing(
            f"the CUTLASS headers were not found: CUTLASS_HOME is {home}, which has no include/cutlass/version.h; "
            "set it to a checkout of CUTLASS, or unset it to use the nvidia-cutlass wheel."
        )
    spec = importlib.util.find_spec("cutlass_library")  # importing it would pull in all that the wheel requires
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        include = Path(folder) / "source" / "include"
        if (include / "cutlass" / "version.h").is_file():
            return include
    raise Missing(
        f"the CUTLASS headers were not found; {EXTRA} installs the nvidia-cutlass wheel that holds them, "
        "or set CUTLASS_HOME to a checkout."
    )


def find_ninja() -> Path:
    """ninja of this Python's environment, which need not be on the PATH, else of the PATH. Raises `Missing`."""
    scripts = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))]
    found = shutil.which("ninja", path=os.pathsep.join(scripts)) or shutil.which("ninja")
    if found is None:
        raise Missing("ninja was not found; `pip install ninja`.")
    return Path(found).absolute()


def find_cxx() -> Path:
    """The C++ compiler that nvcc calls: NVCC_CCBIN, which nvcc reads itself, else g++ of the PATH. Raises `Missing`."""
    configured = os.environ.get("NVCC_CCBIN")
    name = configured or "g++"
    inside = Path(name) / "g++"  # NVCC_CCBIN may be a directory
    found = shutil.which(inside if inside.exists() else name)
    if found is None:
        where = f"NVCC_CCBIN is {configured}, which is no program" if configured else "g++ is not on the PATH"
        raise Missing(f"the C++ compiler that nvcc needs was not found: {where}; install g++, or set NVCC_CCBIN to it.")
    return Path(found).absolute()


@dataclass(frozen=True)
class Pieces:
    """Where everything is that a build needs."""

    nvcc: Path
    cutlass: Path
    ninja: Path
    cxx: Path


def find() -> Pieces:
    """All the pieces, without running any. Raises `Missing` with a sentence for each that is not there."""
    if sys.platform != "linux":
        raise Missing(f"the kernels are built on Linux; this is {sys.platform}.")
    found: list[Path] = []
    missing: list[str] = []
    searches: tuple[Callable[[], Path], ...] = (find_nvcc, find_cutlass, find_ninja, find_cxx)
    for search in searches:
        try:
            found.append(search())
        except Missing as error:
            missing.append(str(error))
    if missing:
        raise Missing(" ".join(missing))
    return Pieces(*found)


@dataclass(frozen=True)
class Versions:
    """What a binary depends on besides its sources.

    nvcc:      release and build, as nvcc prints them.
    cutlass:   version of the headers.
    host:      settings that nvcc reads from the environment.
    """

    nvcc: str
    cutlass: str
    host: str


def versions(pieces: Pieces) -> Versions:
    """Runs `nvcc --version` and reads CUTLASS' version.h. Raises `Missing` where nvcc does not run or is too old."""
    try:
        done = subprocess.run([pieces.nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{pieces.nvcc} does not run ({error}); install the CUDA toolkit again.") from error
    release = re.search(r"release (\d+)\.(\d+), (V\S+)", done.stdout)
    if done.returncode or release is None:
        raise Missing(f"{pieces.nvcc} --version says no release; set CUDA_HOME to a CUDA toolkit.")
    if (int(release[1]), int(release[2])) < OLDEST_NVCC:
        oldest = ".".join(map(str, OLDEST_NVCC))
        raise Missing(f"{pieces.nvcc} is of CUDA {release[1]}.{release[2]}; kernels for Hopper need {oldest} or newer.")
    header = (pieces.cutlass / "cutlass" / "version.h").read_text()
    numbers = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    cutlass = ".".join(number[1] for number in numbers if number)
    names = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    host = " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
    return Versions(release[3].removeprefix("V"), cutlass or "unknown", host)
