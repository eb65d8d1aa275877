"""The built library in this process: open it once, check that it is the one the Python side was written for."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

from kda.cuda.build import SOURCE, built
from kda.problem import Missing

#: KDA_REFUSED of abi.h.
REFUSED = -1


def abi(source: Path = SOURCE) -> int:
    """KDA_ABI of `include/kda/abi.h`, the one home of that number."""
    header = source / "include" / "kda" / "abi.h"
    found = re.search(r"^#define KDA_ABI (\d+)$", header.read_text(), re.M)
    if found is None:
        raise RuntimeError(f"{header} defines no KDA_ABI; the installation is damaged")
    return int(found[1])


def open_library(path: Path, expected_abi: int) -> ctypes.CDLL:
    """Open `path` and declare the functions of abi.h. Raises RuntimeError if it does not fit.

    Structures are passed as bytes, which a call made every few microseconds puts together faster than a `Structure`.
    """
    again = "`python -m kda build --force` builds it for this machine"
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments, result in (
            ("kda_abi", [], ctypes.c_int),
            ("kda_arch", [], ctypes.c_int),
            ("kda_error_text", [ctypes.c_int], ctypes.c_char_p),
            ("kda_fwd_plan", [ctypes.c_void_p, ctypes.c_int], ctypes.c_int64),
            ("kda_fwd_sm90", [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int], ctypes.c_int),
            ("kda_step_sm90", [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int], ctypes.c_int),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path} cannot be used: {error}; {again}") from error
    if library.kda_abi() != expected_abi:
        raise RuntimeError(f"{path} has ABI {library.kda_abi()}, expected {expected_abi}; {again}")
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The library, opened at the first call and kept: one built later is for the next process. Never compiles.

    Raises `Missing` while it is not built, RuntimeError if it cannot be opened or is of another ABI.
    """
    path = built()
    if path is None:
        raise Missing("the Hopper kernels are not built; run `python -m kda build`.")
    return open_library(path, abi())


def check(error: int, what: str = "the CUDA kernel") -> None:
    """Raise RuntimeError with CUDA's text unless `error`, which a function of the library returned, is 0."""
    if error:
        raise RuntimeError(f"{what} failed: {load().kda_error_text(error).decode()} (CUDA error {error})")
