"""One launch of a function of the library, on the current stream of a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kda.streams import current_stream


def launch(function: Callable[[bytes, int, bool], int], parameters: bytes, device: torch.device, careful: bool) -> int:
    """The library's error, 0 if there was none.

    careful: look for buffers that lie on other tensors, which validation has not done.
    """
    stream = current_stream(device)
    if stream is None:
        with torch.cuda.device(device):
            return launch(function, parameters, device, careful)
    return function(parameters, stream, careful)
