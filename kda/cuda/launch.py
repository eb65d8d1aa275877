"""One launch of a function of the library, on the current stream of a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kda.cuda import library
from kda.devices import current_stream


def launch(function: Callable[[bytes, int, bool], int], parameters: bytes, device: torch.device, careful: bool) -> bool:
    """False if the library refused. Raises RuntimeError with CUDA's text for its other errors.

    careful: look for buffers that lie on other tensors, which validation has not done, and refuse them.
    """
    stream = current_stream(device)
    if stream is None:
        with torch.cuda.device(device):
            return launch(function, parameters, device, careful)
    if error := function(parameters, stream, careful):
        if error == library.REFUSED:
            return False
        library.check(error)
    return True
