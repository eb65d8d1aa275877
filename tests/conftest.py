"""Where the tests run: kernels on a GPU if there is one, interpreted on the CPU if not.

A test that runs a kernel takes its implementation from `kernels()` or `implementations()`; on a GPU these carry the
marker `gpu`, so that `pytest -m gpu` is the GPU suite and everything else needs none.
"""

from __future__ import annotations

import os

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported

# The oracle's matrices are tiny: a second thread only waits, and waits very long where the cores are shared.
torch.set_num_threads(1)
