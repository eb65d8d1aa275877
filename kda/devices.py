"""What launches ask of a device: its current stream and its size.

The stream, which launches made every few microseconds need, by the calls of torch's own generated code: they make no
objects and look for no device that is there already.
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


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 0 for another device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
