"""`get_accelerator()`: the device of this rank, by the names that DeepSpeed's newer tutorials use."""

from __future__ import annotations

from typing import Any

import torch

from megatron.distributed.process_group import read_environment

_CPU: dict[str, Any] = {
    "device_name": lambda device_index=None: "cpu", "current_device": lambda: "cpu",
    "current_device_name": lambda: "cpu", "set_device": lambda device_index: None,
    "device_count": lambda: read_environment().local_world_size,  # each rank is a device
    "is_available": lambda: True, "communication_backend_name": lambda: "gloo", "is_fp16_supported": lambda: True,
    "is_bf16_supported": lambda: True, "random": lambda: torch.random,
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],  # that an engine can train in
    "default_generator": lambda device_index: torch.default_generator,
    "synchronize": lambda device=None: None, "empty_cache": lambda: None, "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0, "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state), "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed, "initial_seed": torch.initial_seed}

# The functions that torch.cuda does not have, or that differ there.
_CUDA: dict[str, Any] = {
    "device_name": lambda device_index=None: "cuda" if device_index is None else f"cuda:{device_index}",
    "current_device_name": lambda: f"cuda:{torch.cuda.current_device()}",
    "communication_backend_name": lambda: "nccl", "is_available": lambda: True, "is_fp16_supported": lambda: True,
    "random": lambda: torch.random,
    "supported_dtypes": lambda: [torch.float32, torch.float16,
                                 *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])],
    "default_generator": lambda device_index: torch.cuda.default_generators[device_index]}


class Accelerator:
    """torch.cuda under DeepSpeed's names, or the same for a CPU."""

    def __getattr__(self, name: str) -> Any:
        if name not in _CPU:
            raise AttributeError(f"the accelerator has no {name!r}; docs/deepspeed.md lists the names")
        if not torch.cuda.is_available():
            return _CPU[name]
        return _CUDA.get(name) or getattr(torch.cuda, name)


def get_accelerator() -> Accelerator:
    return Accelerator()
