"""Streams, as launches that are made every few microseconds need them.

By the calls of torch's own generated code, which make no objects and look for no device that is there already.
"""

from __future__ import annotations

import torch

_raw_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int | None:
    """The handle of the device's current stream; None if another device is the current one.

    There is a tensor on the device, so CUDA is initialised.
    """
    if _raw_device is None or _raw_stream is None:
        same = torch.cuda.current_device() == device.index
        return torch.cuda.current_stream(device).cuda_stream if same else None
    index = device.index
    return _raw_stream(index) if _raw_device() == index else None
