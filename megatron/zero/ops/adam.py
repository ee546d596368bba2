"""DeepSpeed's module of this name; its class is in megatron/optim/cpu_adam.py."""

from typing import NoReturn

from megatron.optim.cpu_adam import DeepSpeedCPUAdam
from megatron.zero.ops import raise_unsupported

__all__ = ["DeepSpeedCPUAdam"]


def __getattr__(name: str) -> NoReturn:
    raise_unsupported(f"adam.{name}")
