"""Cuts a model into units: which parameters travel together.

Every element of an outermost `ModuleList` (a transformer block) is one unit, and so is every tile of a tiled linear
inside it. So is a module that a user marks as a leaf (utils.py), with everything in it. The root takes what is left:
what is outside of them, or shared between them, or registered as external.
Within a unit trainable and frozen parameters have a bucket each. Where parameters are split, those below the
persistence threshold stay whole: they share one bucket of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.zero.bucket import FlatBucket, replace_params_by_placeholders
from megatron.zero.exchanges import CollectiveLog
from megatron.zero.holders import external_parameters, full_shape
from megatron.zero.homes.shelf import EngineStorage
from megatron.zero.hooks import Unit
from megatron.zero.layout import Slot
from megatron.zero.policy import CommConfig, StagePolicy
from megatron.zero.precision import BucketDtypes
from megatron.zero.tiling import TiledLinearBase
from megatron.zero.turns import BufferPool
from mpu.groups import Group
from mpu.layers import VocabParallelEmbedding
from mpu.partition import partition_of

ROOT = "root"
LEAF_ATTRIBUTE = "_z3_leaf"
"""What is set on a module that `set_z3_leaf_modules` has marked."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward: they cannot be gathered for it."""


@dataclass(frozen=True)
class BucketingConfig:
    """How parameters become buckets: everything `build_units` must know but the model."""

    policy: StagePolicy
    comm: CommConfig
    dtypes: BucketDtypes
    dp: Group
    device: torch.device
    persistence_threshold: int
    param_group_of: Callable[[nn.Parameter], int]
    """The number of a parameter's hyper-parameter group."""
    log: CollectiveLog
    engine_storage: EngineStorage
    buffer_pool: BufferPool = field(default_factory=BufferPool)
    show_sharded: Callable[[FlatBucket], None] = replace_params_by_placeholders
    """What parameters are while their elements are split."""
    values_are_equal: bool = False
    """All ranks have the same values: none are sent."""

    def make_bucket(self, name: str, members: list[tuple[str, nn.Parameter]], policy: StagePolicy) -> FlatBucket:
        slots = [Slot(path, tuple(full_shape(p)), self.param_group_of(p) if p.requires_grad else 0, partition_of(p))
                 for path, p in members]
        return FlatBucket(name,
                          slots, [p for _, p in members],
                          policy=policy,
                          dp=self.dp,
                          device=self.device,
                          dtypes=self.dtypes,
                          comm=self.comm,
                          buffer_pool=self.buffer_pool,
                          log=self.log,
                          engine_storage=self.engine_storage,
                          show_sharded=self.show_sharded,
                          values_are_equal=self.values_are_equal)

    def is_persistent(self, parameter: nn.Parameter) -> bool:
        return self.policy.params_are_sharded and full_shape(parameter).numel() < self.persistence_threshold


def build_units(model: nn.Module, config: BucketingConfig) -> list[Unit]:
    """The units of a model in forward order, the root first. Their buckets take the parameters over."""
    modules, unit_names = _unit_modules_by_name(model), unit_name_by_param(model)
    members: dict[tuple[str, str], list[tuple[str, nn.Parameter]]] = {}
    for path, parameter in model.named_parameters():
        kind, unit_name = "" if parameter.requires_grad else ".frozen", unit_names[parameter]
        if config.is_persistent(parameter):
            kind, unit_name = kind + ".persistent", ROOT
        members.setdefault((unit_name, kind), []).append((path, parameter))
    units: list[Unit] = []
    for name, module in modules.items():
        buckets = tuple(config.make_bucket(name + kind, members[home, kind], _bucket_policy(config.policy, kind))
                        for home, kind in members if home == name)
        if buckets or name == ROOT:
            units.append(Unit(len(units), name, module, buckets))
    return units


def unit_name_by_param(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameter -> name of its unit."""
    return _assign_params_to_units(model, _unit_modules_by_name(model))


def _unit_modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Name of a unit -> its module."""
    return {ROOT: model, **dict(() if getattr(model, LEAF_ATTRIBUTE, False) else _iter_unit_modules(model))}


def _bucket_policy(policy: StagePolicy, kind: str) -> StagePolicy:
    row = policy.for_persistent_params if kind.endswith(".persistent") else policy
    return row.for_frozen_params if kind.startswith(".frozen") else row


def attach_main_grad_writers(units: list[Unit]) -> None:
    """Let token tables add their gradients in place: they are the largest tensors of a step."""
    places = {p: (bucket, index) for unit in units for bucket in unit.buckets if bucket.trainable
              for index, p in enumerate(bucket.parameters)}
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight in places:
            bucket, index = places[module.weight]
            module.weight_main_grad = bucket.grads.main_grad_writer(index)


def detach_main_grad_writers(units: list[Unit]) -> None:
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.weight_main_grad = None


def _iter_unit_modules(module: nn.Module, path: str = "", inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Elements of outermost lists, and leaves; inside of them the tiles of tiled linears."""
    if isinstance(module, TiledLinearBase):
        yield from ((f"{path}.tiles.{number}", tile) for number, tile in enumerate(module.tiles()))
        return
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        is_block = (isinstance(module, nn.ModuleList) or getattr(child, LEAF_ATTRIBUTE, False)) and not inside and \
            not isinstance(child, _CONTAINERS)
        if is_block:
            yield where, child
        yield from _iter_unit_modules(child, where, inside or is_block)


def _assign_params_to_units(model: nn.Module, modules: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Parameter -> name of its unit. One that several units use belongs to the root."""
    name_of = {id(module): name for name, module in reversed(modules.items())}
    users: dict[nn.Parameter, set[str]] = {}
    seen: set[tuple[int, str]] = set()

    def walk(module: nn.Module, unit: str) -> None:
        unit = name_of.get(id(module), unit)
        if (id(module), unit) not in seen:
            seen.add((id(module), unit))
            for parameter in (*module.parameters(recurse=False), *external_parameters(module)):
                users.setdefault(parameter, set()).add(unit)
            for child in module.children():
                walk(child, unit)

    walk(model, ROOT)
    return {parameter: units.pop() if len(units) == 1 else ROOT for parameter, units in users.items()}
