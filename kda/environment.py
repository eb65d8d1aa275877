"""Environment variables that are on or off."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: The dictionary in os.environ: a name that is not there costs os.environ itself an exception, 1 us of every call.
_RAW: Mapping[bytes, bytes] | None = getattr(os.environ, "_data", None) if os.name == "posix" else None


def switched_on(name: str) -> bool:
    """Whether the variable is set to anything but an empty text, 0, false, no or off."""
    if _RAW is not None and name.encode() not in _RAW:
        return False
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")


def segments() -> tuple[int, int] | None:
    """Tokens of a sequence's first segment and of its next ones, from KDA_SEGMENTS ("128,64"); None if it is not set.

    For tests and measurements of `cuda`, in place of what it finds best. Raises ValueError for other texts.
    """
    text = os.environ.get("KDA_SEGMENTS", "")
    if not text:
        return None
    try:
        first, other = (int(part) for part in text.split(","))
    except ValueError:
        first = other = 0
    if min(first, other) <= 0 or first % 64 or other % 64:
        raise ValueError(
            f"KDA_SEGMENTS is {text!r}; expected two multiples of 64 such as 128,64: tokens of the first segment of a "
            "sequence and of the next ones. Unset it to have them chosen."
        )
    return first, other
