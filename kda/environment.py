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
