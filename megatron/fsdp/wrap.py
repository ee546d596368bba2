"""FairScale's helpers that decide which modules are wrapped: `enable_wrap`, `wrap`, `auto_wrap`, and policies.

    with enable_wrap(mixed_precision=True):
        model = auto_wrap(model)                    # or wrap(layer), where it is made
    model = FSDP(model, mixed_precision=True)

A *policy* is asked of each module, from the outside in: `policy(module, recurse, unwrapped_params, module_is_root)`
says with `recurse` whether to look inside, and then without whether to wrap this one, once those inside have been. A
module that is not looked into belongs to the one around it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.config.tree import RecomputeConfig
from megatron.errors import ConfigError
from megatron.fsdp.sharding import sharded_modules
from megatron.fsdp.whole import temporarily_replaced
from megatron.fsdp.wrapper import FullyShardedDataParallel
from megatron.recompute import Recomputation
from megatron.zero.holders import full_shape

Policy = Callable[..., bool]

EXCLUDE: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})
FORCE_LEAF: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})

_WRAP_CONTEXT: ContextVar[tuple[Policy | None, type[nn.Module], dict[str, Any]] | None] = ContextVar("wrap",
                                                                                                     default=None)


@contextmanager
def enable_wrap(auto_wrap_policy: Policy | None = None, wrapper_cls: type[nn.Module] = FullyShardedDataParallel,
                **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap, with these arguments of `wrapper_cls`; elsewhere they return what they are
    given."""
    token = _WRAP_CONTEXT.set((auto_wrap_policy, wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _WRAP_CONTEXT.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """The module, wrapped inside `enable_wrap`; a `wrapper_config` attribute of it and the overrides here win."""
    context = _WRAP_CONTEXT.get()
    if context is None:
        return module
    _, wrapper_cls, kwargs = context
    own = getattr(module, "wrapper_config", None) or {}
    return wrapper_cls(module, **{**kwargs, **own, **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: Policy | None = None, **kwargs: Any) -> nn.Module:
    """The module with all modules inside wrapped that the policy names, and itself if it does; needs `enable_wrap`."""
    context = _WRAP_CONTEXT.get()
    if context is None:
        return module
    policy = auto_wrap_policy or context[0] or default_auto_wrap_policy
    if next(sharded_modules(module), None) is not None:
        raise ConfigError("auto_wrap of a module in which something is wrapped: give it one in which nothing is")
    return _wrap_recursively(module, policy, kwargs, is_root=True)[0]


def _wrap_recursively(module: nn.Module, policy: Policy, kwargs: dict[str, Any], *, is_root: bool = False,
                      ) -> tuple[nn.Module, int]:
    """The module, and how many elements of it were wrapped."""
    count = sum(full_shape(parameter).numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=count, module_is_root=is_root):
        return module, 0
    done = 0
    for name, child in module.named_children():
        new, inside = _wrap_recursively(child, policy, kwargs)
        if new is not child:
            setattr(module, name, new)
        done += inside
    if not policy(module=module, recurse=False, unwrapped_params=count - done, module_is_root=is_root):
        return module, done
    return wrap(module, **kwargs), count


def default_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool,
                             min_num_params: int = int(1e8),
                             force_leaf_modules: Collection[type[nn.Module]] | None = None,
                             exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
                             skip_params_check_for_root: bool = False) -> bool:
    """Modules of at least `min_num_params` elements that are not wrapped inside."""
    leaves = tuple(FORCE_LEAF if force_leaf_modules is None else force_leaf_modules)
    excluded = tuple(EXCLUDE if exclude_wrap_modules is None else exclude_wrap_modules)
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, leaves)
    return (is_large or skip_params_check_for_root and module_is_root) and not isinstance(module, excluded)


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Modules that have a `wrapper_config` attribute: a dict of arguments."""
    return True if recurse else getattr(module, "wrapper_config", None) is not None


def transformer_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int = 0,
                                 module_is_root: bool = False,
                                 transformer_layer_cls: Collection[type[nn.Module]] = (), **other: Any) -> bool:
    """Modules of these classes (torch's policy; give it with functools.partial)."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


# ---- activation checkpointing ---------------------------------------------------------------------------------------

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CHECKPOINTED_ATTRIBUTE = "_fsdp_checkpointed"
_CHECKPOINTING_IS_DISABLED = ContextVar("checkpointing is disabled", default=False)


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Forwards inside keep their activations, and are not run again."""
    token = _CHECKPOINTING_IS_DISABLED.set(True)
    try:
        yield
    finally:
        _CHECKPOINTING_IS_DISABLED.reset(token)


def checkpoint_wrapper(module: ModuleT, offload_to_cpu: bool = False) -> ModuleT:
    """The module itself, whose forward now keeps its inputs alone and runs again in backward, by megatron/recompute;
    with `offload_to_cpu` the inputs wait on the host. It runs again with the buffers as they were in the forward, and
    does not change them, so that a batch norm counts a batch once. Before or after the module is sharded."""
    if vars(module).get(_CHECKPOINTED_ATTRIBUTE):
        raise ConfigError(f"this {type(module).__name__} has a checkpoint_wrapper already")
    recomputation = Recomputation(RecomputeConfig(checkpoint_activations=True, cpu_checkpointing=offload_to_cpu))
    forward = module.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if _CHECKPOINTING_IS_DISABLED.get() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        runs, buffers = 0, [(child._buffers, name, buffer.detach().clone()) for child in module.modules()
                            for name, buffer in child._buffers.items() if buffer is not None]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            # Each replay changes copies of its own: with retain_graph there are several.
            with nullcontext() if runs == 1 else temporarily_replaced([(of, name, old.clone())
                                                                       for of, name, old in buffers]):
                return forward(*args, **kwargs)

        return recomputation.checkpoint(run, *args, **kwargs)

    module.__dict__[_CHECKPOINTED_ATTRIBUTE] = True
    module.forward = checkpointed
    return module
