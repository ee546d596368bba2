"""`checkpoint_wrapper`: activation checkpointing of one module, by FairScale's name.

Its forward keeps its inputs alone, and runs again in backward (megatron/recompute), with the buffers as they were in the
forward, and not changing them: a batch norm counts a batch once. Keyword arguments and outputs that are no tensors pass
through. With `offload_to_cpu` the inputs wait on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.config.tree import RecomputeConfig
from megatron.errors import ConfigError
from megatron.fsdp.whole import replaced
from megatron.recompute import Recomputation

M = TypeVar("M", bound=nn.Module)
_MARK = "_fsdp_checkpointed"
_DISABLED = ContextVar("checkpointing is disabled", default=False)


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Forwards inside keep their activations, and are not run again."""
    token = _DISABLED.set(True)
    try:
        yield
    finally:
        _DISABLED.reset(token)


def checkpoint_wrapper(module: M, offload_to_cpu: bool = False) -> M:
    """The module itself; its names do not change. Before or after it is sharded."""
    if vars(module).get(_MARK):
        raise ConfigError(f"this {type(module).__name__} has a checkpoint_wrapper already")
    recomputation = Recomputation(RecomputeConfig(checkpoint_activations=True, cpu_checkpointing=offload_to_cpu))
    forward = module.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if _DISABLED.get() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        runs, buffers = 0, [(child._buffers, name, buffer.detach().clone()) for child in module.modules()
                            for name, buffer in child._buffers.items() if buffer is not None]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            # Each replay changes copies of its own: with retain_graph there are several.
            with nullcontext() if runs == 1 else replaced([(of, name, old.clone()) for of, name, old in buffers]):
                return forward(*args, **kwargs)

        return recomputation.checkpoint(run, *args, **kwargs)

    module.__dict__[_MARK] = True
    module.forward = checkpointed
    return module
