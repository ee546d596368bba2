"""`get_accelerator()`: the device of this rank, by the names that DeepSpeed's newer tutorials use."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron.distributed.process_group import read_environment


class Accelerator:
    """torch.cuda under DeepSpeed's names, or the same for a CPU."""

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
        """GPUs of this node; without GPUs its ranks."""
        return torch.cuda.device_count() if self._on_gpu else read_environment().local_world_size

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self._on_gpu else "gloo"

    def is_fp16_supported(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return not self._on_gpu or torch.cuda.is_bf16_supported()

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that an engine can train in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def random(self) -> ModuleType:
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._on_gpu else torch.default_generator

    def __getattr__(self, name: str) -> Any:
        """The function of that name in torch.cuda, or its equivalent in CPU_FUNCTIONS."""
        if name not in CPU_FUNCTIONS:
            raise AttributeError(f"the accelerator has no {name!r}; docs/deepspeed.md lists the names")
        return getattr(torch.cuda, name) if self._on_gpu else CPU_FUNCTIONS[name]


CPU_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "synchronize": lambda device=None: None, "empty_cache": lambda: None, "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0, "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state), "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed, "initial_seed": torch.initial_seed}


def get_accelerator() -> Accelerator:
    return Accelerator()
