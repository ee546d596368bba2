"""Where the accelerator's way of doing things and the CPU's part, and whether Triton's kernels work on a device.

An accelerator wants few large kernels and no question from the host; a CPU wants blocks that fit its cache. Code with
two ways asks `on_accelerator`. In a process started with MPU_ACCELERATOR_SIDE=1 the answer is always yes, so that the
accelerator's ways run, and can be tested, on CPU tensors. What needs a real device (streams, page-locked memory) asks
the tensor itself. A file of Triton kernels is imported when a device first asks for it, and says of itself
`runs_on(device)` and `try_out(device)`: Triton needs a C compiler as well, and a GPU it knows.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

FORCE_ACCELERATOR_PATH = os.environ.get("MPU_ACCELERATOR_SIDE") == "1"
"""Tests only."""


def on_accelerator(where: Tensor | torch.device) -> bool:
    """The accelerator's way is the one to take."""
    return FORCE_ACCELERATOR_PATH or (where.device if isinstance(where, Tensor) else where).type != "cpu"


def load_kernels(load: Callable[[], ModuleType], device: torch.device, fallback_cost: str) -> ModuleType | None:
    """The file that `load` imports, if its kernels work on the device. If not, torch's operators do as well; where a
    GPU could have had the kernels, a warning says what it does `without` them."""
    try:
        kernels = load()
    except ImportError as error:
        if device.type not in ("cpu", "meta"):
            _warn(fallback_cost, error)
        return None
    if not kernels.runs_on(device):
        return None
    try:
        kernels.try_out(device)
    except Exception as error:  # whatever it is
        _warn(fallback_cost, error)
        return None
    return kernels


def _warn(fallback_cost: str, error: Exception) -> None:
    warnings.warn(f"{fallback_cost}: {error}", stacklevel=2)
