"""Environment variables that are on or off."""

from __future__ import annotations

import os


def switched_on(name: str) -> bool:
    """Whether the variable is set to anything but an empty text, 0, false, no or off."""
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")
