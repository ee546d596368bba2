"""`get_accelerator()`: the device of this rank, by the names that DeepSpeed's newer tutorials use."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.launch.distributed import read_environment


class Accelerator:
    """A GPU, or the CPU."""

    @property
    def _on_gpu(self) -> bool:
        return torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        if not self._on_gpu:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int | str:
        return torch.cuda.current_device() if self._on_gpu else "cpu"

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if self._on_gpu else None)

    def set_device(self, device_index: int) -> None:
        if self._on_gpu:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """GPUs of this node; on a CPU its ranks."""
        return torch.cuda.device_count() if self._on_gpu else read_environment().local_world_size

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self._on_gpu else "gloo"

    def is_fp16_supported(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return not self._on_gpu or torch.cuda.is_bf16_supported()

    def synchronize(self, device_index: int | None = None) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._on_gpu:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._on_gpu else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._on_gpu else 0

    def supported_dtypes(self) -> list[torch.dtype]:
        """What an engine can train in here."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def random(self) -> ModuleType:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index) if self._on_gpu \
            else torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._on_gpu:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> Any:
        return torch.cuda.manual_seed(seed) if self._on_gpu else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.cuda.manual_seed_all(seed) if self._on_gpu else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._on_gpu else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._on_gpu else torch.default_generator


def peak_resident_bytes() -> int:
    """The most memory of the host that this process has had. Linux's getrusage would begin at the peak of whoever
    started it."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/status", "rb") as status:
            return int(status.read().partition(b"VmHWM:")[2].split()[0]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def get_accelerator() -> Accelerator:
    return Accelerator()
