"""`fully_shard`: torch's interface of this name (FSDP2), on the engine of this package.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

A module that is sharded is of a class of its own, which has the methods of `FSDPModule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from torch import nn

from megatron.errors import ConfigError
from megatron.fsdp.member import FSDPModule
from megatron.fsdp.place import device_of, group_of_mesh
from megatron.fsdp.settings import MixedPrecisionPolicy, OffloadPolicy, Settings, check_dtype
from megatron.fsdp.sharding import check, shard


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
    group = group_of_mesh(mesh)
    settings = Settings(
        reshards=True if reshard_after_forward is None else reshard_after_forward,
        param_dtype=check_dtype("mp_policy.param_dtype", mp_policy.param_dtype),
        reduce_dtype=check_dtype("mp_policy.reduce_dtype", mp_policy.reduce_dtype),
        output_dtype=check_dtype("mp_policy.output_dtype", mp_policy.output_dtype),
        input_dtype=mp_policy.param_dtype if mp_policy.cast_forward_inputs else None,
        on_host=hasattr(offload_policy, "pin_memory"), pins=getattr(offload_policy, "pin_memory", False),
        copies_first=sync_module_states)
    ignored = tuple(ignored_params or ())
    for one in modules:
        if isinstance(one, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(f"fully_shard of a {type(one).__name__}, which has no forward: shard the modules in it")
        check(one, settings, group, device_of(one, group), ignored)
    for one in modules:  # all may be: one that is refused leaves none sharded
        shard(one, settings, group, device_of(one, group), ignored)
        one.__class__ = _sharded(type(one))  # type: ignore[arg-type]  # mypy: a class has no hash
    return module


@cache
def _sharded(cls: type[nn.Module]) -> type[nn.Module]:
    """One for all modules of a class: torch.compile looks at it."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are in no other one."""
    if not all(isinstance(one, nn.Module) for one in modules):
        raise ConfigError("fully_shard takes a module or a list of modules, not "
                          f"{', '.join(type(one).__name__ for one in modules)}")
    inside = {id(child) for one in modules for child in one.modules() if child is not one}
    return [one for one in dict.fromkeys(modules) if id(one) not in inside]
