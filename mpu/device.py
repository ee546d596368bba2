"""Where the accelerator's way of doing things and the CPU's part: one question, asked of a tensor or a device.

An accelerator wants few large kernels and no question from the host; a CPU wants blocks that fit its cache. Code with
two ways asks `on_accelerator`. In a process started with MPU_ACCELERATOR_SIDE=1 the answer is always yes, so that the
accelerator's ways run, and can be tested, on CPU tensors. What needs a real device (streams, page-locked memory) asks
the tensor itself.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

ALWAYS = os.environ.get("MPU_ACCELERATOR_SIDE") == "1"
"""Tests only."""


def on_accelerator(where: Tensor | torch.device) -> bool:
    """The accelerator's way is the one to take."""
    return ALWAYS or (where.device if isinstance(where, Tensor) else where).type != "cpu"
