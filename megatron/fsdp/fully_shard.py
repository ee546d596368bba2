"""`fully_shard`: torch's FSDP2 interface, on the ZeRO stage 3 mechanism of megatron/zero.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

The class of a sharded module becomes a subclass that adds the methods of `FSDPModule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.futures import Future

from megatron.errors import ConfigError
from megatron.fsdp.sharding import (ShardingSettings, check_shardable, require_fsdp_state, resolve_group, shard_module,
                                    sharded_modules)


class NotCopyable:
    """Mixin that refuses copying and pickling: the object is bound to its process group and buffers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(f"{type(self).__name__} is sharded, and cannot be copied or pickled as a whole "
                          "(copy.deepcopy, AveragedModel, torch.save(model)): save a full state dict (docs/fsdp.md); "
                          "for a second model copy the first before it is sharded, and shard both")


class FSDPModule(NotCopyable, nn.Module):
    """Mixin that `fully_shard` adds to a module's class."""

    def unshard(self, async_op: bool = False) -> Future[None] | None:
        """No effect: a forward gathers what it uses, and the next module's parameters ahead of use. To read parameters,
        use `summon_full_params`."""
        done: Future[None] = Future()
        done.set_result(None)
        return done if async_op else None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the following backwards reduce gradients. Only for an outermost module."""
        root = require_fsdp_state(self).root
        if root.module is not self or not recurse:
            raise ConfigError("set_requires_gradient_sync is for the outermost sharded module and all in it: gradients "
                              "of a step are summed together")
        root.reduces_grads = requires_gradient_sync

    def _no_effect(self, *given: Any, **named: Any) -> None:
        """For scripts of torch's. Every backward is complete by itself, gathers only what it uses and reshards it;
        prefetching follows the order of the previous pass; there is one sharding group and no replication."""

    set_is_last_backward = set_requires_all_reduce = set_reshard_after_backward = set_unshard_in_backward = _no_effect
    set_modules_to_forward_prefetch = set_modules_to_backward_prefetch = reshard = _no_effect

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        for member in sharded_modules(self).values() if recurse else [require_fsdp_state(self)]:
            member.settings = replace(member.settings, reshard_after_forward=reshard_after_forward)
            units = member.root.kept_for_backward
            (units.discard if reshard_after_forward else units.add)(member.unit)


Modules = TypeVar("Modules", nn.Module, Sequence[nn.Module])


def fully_shard(module: Modules, *, mesh: Any = None, reshard_after_forward: bool | int | None = None,
                mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
                offload_policy: OffloadPolicy = OffloadPolicy(), ignored_params: Iterable[nn.Parameter] | None = None,
                sync_module_states: bool = False) -> Modules:
    """Shard the parameters of `module`, except those of modules inside that are sharded already; returns the module.
    Modules of a list are sharded one by one, except those inside another one. Collective. If a check raises
    ConfigError, no module is sharded.

    `mesh` has one dimension (None: all ranks). `reshard_after_forward` frees gathered parameters between forward and
    backward; with a number they stay sharded over that many neighbouring ranks. None means False for an outermost
    module, whose backward comes first, and True otherwise. Ranks must start from equal weights, or pass
    `sync_module_states` (not in torch) to take rank 0's.
    """
    given = [module] if isinstance(module, nn.Module) else list(module)
    inside = {id(child) for one in given for child in one.modules() if child is not one}
    modules = [one for one in dict.fromkeys(given) if id(one) not in inside]
    if mesh is not None and mesh.ndim != 1:
        raise ConfigError(f"a mesh of {mesh.ndim} dimensions is not supported: give the one to shard over, such as "
                          "mesh['shard']")
    group = resolve_group(None if mesh is None else mesh.get_group())
    settings = ShardingSettings(
        reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
        param_dtype=mp_policy.param_dtype, reduce_dtype=mp_policy.reduce_dtype, output_dtype=mp_policy.output_dtype,
        input_dtype=mp_policy.param_dtype if mp_policy.cast_forward_inputs else None,
        offload_to_host=isinstance(offload_policy, CPUOffloadPolicy),
        pin_memory=getattr(offload_policy, "pin_memory", False), sync_module_states=sync_module_states)
    ignored = tuple(ignored_params or ())
    for one in modules:
        if isinstance(one, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"fully_shard of a {type(one).__name__}, which has no forward: shard the modules in it")
        check_shardable(one, settings, group, ignored)
    for one in modules:  # after all checks, so that an error leaves no module sharded
        shard_module(one, settings, group, ignored)
        one.__class__ = _fsdp_class(type(one))  # type: ignore[arg-type]  # mypy: a class has no hash
    return module


@cache
def _fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Cached: torch.compile guards on the class, so modules of one class must share it."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
