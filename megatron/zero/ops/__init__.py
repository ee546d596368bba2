"""`deepspeed.ops` under this name: `from megatron.zero.ops.adam import DeepSpeedCPUAdam`."""

from importlib import import_module
from typing import Any, NoReturn


def raise_unsupported(name: str) -> NoReturn:
    raise AttributeError(f"megatron.zero.ops.{name} is not supported: give \"optimizer\": {{\"type\": \"AdamW\"}} in "
                         "the configuration, or a torch optimizer to initialize")


def __getattr__(name: str) -> Any:
    if name == "adam":  # imported on first use: it imports torch
        return import_module("megatron.zero.ops.adam")
    raise_unsupported(name)
