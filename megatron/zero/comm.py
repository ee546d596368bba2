"""DeepSpeed's module of this name: torch.distributed, and `init_distributed`."""

from importlib import import_module
from typing import Any

import torch.distributed


def __getattr__(name: str) -> Any:
    return getattr(import_module("megatron.zero") if name == "init_distributed" else torch.distributed, name)
