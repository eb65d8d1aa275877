"""One launch of a function of the library, on the current stream of a device."""

from __future__ import annotations

import torch

from kda.cuda import library
from kda.streams import current_stream


def launch(function: str, parameters: bytes, device: torch.device, careful: bool) -> int:
    """The library's error, 0 if there was none.

    careful: look for buffers that lie on other tensors, which validation has not done.
    """
    stream = current_stream(device)
    if stream is None:
        with torch.cuda.device(device):
            return launch(function, parameters, device, careful)
    return getattr(library.load(), function)(parameters, stream, careful)
