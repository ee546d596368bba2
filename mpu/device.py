"""Choose between accelerator and CPU code paths, check whether Triton kernels work on a device, and move a few numbers
between host and device without a wait.

An accelerator needs few large kernels and no synchronization with the host; a CPU needs blocks that fit its cache. Code
with two paths asks `on_accelerator`. MPU_ACCELERATOR_SIDE=1 makes the answer always True, to test accelerator paths on
CPU tensors. Code that needs a real device (streams, pinned memory) asks the tensor itself. A module of Triton kernels
is imported on first use, and has `try_out(device)`: Triton also needs a C compiler and a supported GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from mpu import collective_tracker

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


def scalars_on_device(device: torch.device, numbers: Sequence[Tensor | float]) -> Tensor:
    """The numbers as one fp64 tensor on the device. All host numbers take one copy from page-locked memory, without a
    wait or a kernel launch; each 0-dimensional tensor takes one more copy."""
    on_host = torch.tensor([0.0 if isinstance(number, Tensor) else number for number in numbers], dtype=torch.float64,
                           pin_memory=device.type == "cuda")
    row = torch.empty(len(numbers), dtype=torch.float64, device=device)
    row.copy_(on_host, non_blocking=True)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            row[place].copy_(number)
    return row


class HostScalars:
    """A few numbers that are copied to the host asynchronously."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    @cached_property
    def values(self) -> list[float]:
        """The first read waits for the device."""
        if self._arrived is not None:
            collective_tracker.mark_waiting()  # the device may be waiting for other ranks
            self._arrived.synchronize()
            collective_tracker.mark_idle()
        values: list[float] = self._host.tolist()
        return values
