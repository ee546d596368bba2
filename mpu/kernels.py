"""Whether a file of Triton kernels works here: Triton needs a C compiler as well, and a GPU it knows.

Such a file is imported when a device first asks for it, and says of itself `runs_on(device)` and `try_out(device)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType

import torch


def working(load: Callable[[], ModuleType], device: torch.device, without: str) -> ModuleType | None:
    """The file that `load` imports, if its kernels work on the device. If not, torch's operators do as well; where a
    GPU could have had the kernels, a warning says what it does `without` them."""
    try:
        kernels = load()
    except ImportError as error:
        if device.type not in ("cpu", "meta"):
            _warn(without, error)
        return None
    if not kernels.runs_on(device):
        return None
    try:
        kernels.try_out(device)
    except Exception as error:  # whatever it is
        _warn(without, error)
        return None
    return kernels


def _warn(without: str, error: Exception) -> None:
    warnings.warn(f"{without}: {error}", stacklevel=2)
