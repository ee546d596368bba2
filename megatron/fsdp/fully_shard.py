"""`fully_shard`: torch's interface of this name (FSDP2), on the engine of this package.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

A module that is sharded is of a class of its own, which has the methods of `FSDPModule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp.sharding import (check_shardable, compute_device_of, group_from_mesh, require_fsdp_state,
                                    shard_module, sharded_modules)
from megatron.fsdp.sharding_settings import MixedPrecisionPolicy, OffloadPolicy, ShardingSettings, check_dtype
from megatron.zero.bucket import FlatBucket


class NotCopyable:
    """A mixin for what is bound to its ranks and buffers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(f"{type(self).__name__} is sharded, and cannot be copied or pickled as a whole "
                          "(copy.deepcopy, AveragedModel, torch.save(model)): save a full state dict (docs/fsdp.md); "
                          "for a second model copy the first before it is sharded, and shard both")


class FSDPModule(NotCopyable, nn.Module):
    """A mixin; `fully_shard` makes a module's class one of this."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make the parameters of this module whole, until its forward is over or `reshard` is called. Every rank calls
        it."""
        state = require_fsdp_state(self)
        if not state.root.is_running:
            state.root.sync_before_access()
        handle = UnshardHandle(state.unit.buckets)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Split the parameters of this module again."""
        for bucket in require_fsdp_state(self).unit.buckets:
            bucket.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the backwards that follow sum gradients over the ranks. Of an outermost module."""
        root = require_fsdp_state(self).root
        if root.module is not self or not recurse:
            raise ConfigError("set_requires_gradient_sync is for the outermost sharded module and all in it: gradients "
                              "of a step are summed together")
        root.reduces_grads = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: every backward ends by itself."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Changes nothing: what is gathered ahead is what followed in the pass before."""

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Changes nothing: parameters are split again after every backward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Changes nothing: what a backward does not use is not gathered."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Changes nothing: there is one group of ranks, and no sum beyond it."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        for member in [one for _, _, one in sharded_modules(self)] if recurse else [require_fsdp_state(self)]:
            member.settings = replace(member.settings, reshard_after_forward=reshard_after_forward)
            member.root.keep_for_backward(member.unit, not reshard_after_forward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What sums of this module's gradients over the ranks are divided by, in place of the number of ranks."""
        if not factor > 0:
            raise ConfigError(f"set_gradient_divide_factor({factor}): give a number above 0")
        member = require_fsdp_state(self)
        member.root.grad_divisors |= dict.fromkeys(member.unit.buckets, factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_post_optim_event(self, event: Any) -> None:
        """What is asked of the device from now on waits for `event`: an optimizer's step on another stream."""
        event.wait()

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        raise ConfigError("set_all_reduce_hook() is not supported: gradients are summed over one group of ranks, by "
                          "one reduce-scatter; change p.grad, this rank's part of the mean, after backward()")


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, buckets: Iterable[FlatBucket]) -> None:
        self._buckets = buckets
        for bucket in buckets:
            bucket.start_gather()

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.wait_for_param_gather()


Modules = TypeVar("Modules", nn.Module, Sequence[nn.Module])


def fully_shard(module: Modules, *, mesh: Any = None, reshard_after_forward: bool | int | None = None,
                shard_placement_fn: Any = None, mp_policy: Any = MixedPrecisionPolicy(),
                offload_policy: Any = OffloadPolicy(), ignored_params: Iterable[nn.Parameter] | None = None,
                sync_module_states: bool = False) -> Modules:
    """Shard the parameters of `module`, those of modules that are sharded inside excepted; returns the module. The
    modules of a list are sharded one by one.

    `mesh` is of one dimension (None: all ranks). `reshard_after_forward` splits the parameters again between forward
    and backward; a number does so among so many neighbouring ranks. (None: of an outermost module no, of others yes, as
    the outermost one is needed at once.) Ranks must start from equal weights, or say `sync_module_states`, which is not
    torch's, and all have those of the first.
    """
    modules = [module] if isinstance(module, nn.Module) else _outermost(module)
    if shard_placement_fn is not None:
        raise ConfigError("fully_shard(shard_placement_fn=...) is not supported: parameters are split as flat ranges")
    group = group_from_mesh(mesh)
    settings = ShardingSettings(
        reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
        param_dtype=check_dtype("mp_policy.param_dtype", mp_policy.param_dtype),
        reduce_dtype=check_dtype("mp_policy.reduce_dtype", mp_policy.reduce_dtype),
        output_dtype=check_dtype("mp_policy.output_dtype", mp_policy.output_dtype),
        input_dtype=mp_policy.param_dtype if mp_policy.cast_forward_inputs else None,
        offload_to_host=hasattr(offload_policy, "pin_memory"), pin_memory=getattr(offload_policy, "pin_memory", False),
        sync_module_states=sync_module_states)
    ignored = tuple(ignored_params or ())
    for one in modules:
        if isinstance(one, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"fully_shard of a {type(one).__name__}, which has no forward: shard the modules in it")
        check_shardable(one, settings, group, compute_device_of(one, group), ignored)
    for one in modules:  # all may be: one that is refused leaves none sharded
        shard_module(one, settings, group, compute_device_of(one, group), ignored)
        one.__class__ = _fsdp_class(type(one))  # type: ignore[arg-type]  # mypy: a class has no hash
    return module


@cache
def _fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """One for all modules of a class: torch.compile looks at it."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are in no other one."""
    if not all(isinstance(one, nn.Module) for one in modules):
        raise ConfigError("fully_shard takes a module or a list of modules, not "
                          f"{', '.join(type(one).__name__ for one in modules)}")
    inside = {id(child) for one in modules for child in one.modules() if child is not one}
    return [one for one in dict.fromkeys(modules) if id(one) not in inside]
