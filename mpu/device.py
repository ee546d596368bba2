"""Choose between accelerator and CPU code paths, and check whether Triton kernels work on a device.

An accelerator needs few large kernels and no synchronization with the host; a CPU needs blocks that fit its cache. Code
with two paths asks `on_accelerator`. MPU_ACCELERATOR_SIDE=1 makes the answer always True, to test accelerator paths on
CPU tensors. Code that needs a real device (streams, pinned memory) asks the tensor itself. A module of Triton kernels
is imported on first use, and has `try_out(device)`: Triton also needs a C compiler and a supported GPU.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

FORCE_ACCELERATOR_PATH = os.environ.get("MPU_ACCELERATOR_SIDE") == "1"  # for tests


def on_accelerator(where: Tensor | torch.device) -> bool:
    """Whether to take the accelerator path."""
    return FORCE_ACCELERATOR_PATH or (where.device if isinstance(where, Tensor) else where).type != "cpu"


@cache
def load_kernels(module: str, device: torch.device, fallback_cost: str) -> ModuleType | None:
    """The module of this name, or None if its kernels do not work on the device: use torch operators then. Kernels run
    on a GPU, and on a CPU in Triton's interpreter. Warns on a GPU, with `fallback_cost` saying what is lost."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    try:
        kernels = import_module(module)
        kernels.try_out(device)
    except Exception as error:  # Triton may be missing, and can fail in any way
        warnings.warn(f"{fallback_cost}: {error}", stacklevel=1)
        return None
    return kernels
