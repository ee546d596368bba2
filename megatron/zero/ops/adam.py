"""`deepspeed.ops.adam` under this name; the class is in megatron/optim/torch_rule.py."""

from typing import NoReturn

from megatron.optim.torch_rule import DeepSpeedCPUAdam
from megatron.zero.ops import raise_unsupported

__all__ = ["DeepSpeedCPUAdam"]


def __getattr__(name: str) -> NoReturn:
    raise_unsupported(f"adam.{name}")
