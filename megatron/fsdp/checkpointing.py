"""`checkpoint_wrapper`: activation checkpointing of one module, by FairScale's name.

Its forward keeps its inputs alone, and runs again in backward (megatron/recompute). Keyword arguments and outputs that
are no tensors pass through. With `offload_to_cpu` the inputs wait on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from megatron.config.tree import RecomputeConfig
from megatron.errors import ConfigError
from megatron.recompute import Recomputation

M = TypeVar("M", bound=nn.Module)
_MARK = "_fsdp_checkpointed"


def checkpoint_wrapper(module: M, offload_to_cpu: bool = False) -> M:
    """The module itself; its names do not change. Before or after it is sharded."""
    if vars(module).get(_MARK):
        raise ConfigError(f"this {type(module).__name__} has a checkpoint_wrapper already")
    recomputation = Recomputation(RecomputeConfig(checkpoint_activations=True, cpu_checkpointing=offload_to_cpu))
    module.__dict__[_MARK] = True
    module.forward = _checkpointed(module.forward, recomputation)
    return module


def _checkpointed(forward: Callable[..., Any], recomputation: Recomputation) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return recomputation.checkpoint(forward, *args, **kwargs)

    return run
