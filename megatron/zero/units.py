"""Cuts a model into units, and checks that it keeps their parameters.

A unit is a module whose parameters are gathered and resharded together: an element of an outermost `ModuleList` (a
transformer block), a tile of a tiled linear inside one, or a module marked as a leaf (`set_z3_leaf_modules`). The root
has the rest: parameters outside of units, shared between them, registered as external, and small ones
(`stage3_param_persistence_threshold`). Trainable and frozen parameters of a unit have a bucket each.

`ModelParamGuard` refuses a step if a parameter was replaced, added, moved or unfrozen after `zero.initialize`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.zero.bucket import FlatBucket
from megatron.zero.flat_buffers import BucketingConfig
from megatron.zero.gradients import MainGradWriter
from megatron.zero.partitioned_param import EXTERNAL_ATTRIBUTE, full_shape
from megatron.zero.tiling import TiledLinearBase
from mpu.layers import VocabParallelEmbedding

ROOT = "root"
LEAF_ATTRIBUTE = "_z3_leaf"  # the attribute that `set_z3_leaf_modules` sets on a module
# Modules without a forward: they cannot be gathered for it.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Unit:
    """A module and the buckets of its parameters. `index` counts units in forward order; the root is 0."""

    def __init__(self, index: int, name: str, module: nn.Module, buckets: tuple[FlatBucket, ...]) -> None:
        self.index, self.name, self.module, self.buckets = index, name, module, buckets
        self.is_root = index == 0
        self.display_name = "" if self.is_root else name  # in messages
        self.sharded_buckets = [bucket for bucket in buckets if bucket.params_are_sharded]
        # Elements that are sharded between uses.
        self.numel = sum(bucket.layout.numel for bucket in self.sharded_buckets)
        self.has_frozen = any(not bucket.trainable for bucket in buckets)

    def has_view(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of gathered parameters that will be resharded."""
        return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in {
            bucket.gathered_params.untyped_storage()._cdata for bucket in self.sharded_buckets}


class UnitCall:
    """One forward call of a unit. Calls that return the same tensor begin their backward at the same time."""

    weight_version = 0  # version of the weights in this forward; the backward must run with the same

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.output_ids = {output.__dict__.setdefault("zero_mark", object()) for output in outputs}


def build_units(model: nn.Module, config: BucketingConfig) -> list[Unit]:
    """Cut the model into units, in forward order after the root. Their buckets take over the parameters."""
    unit_names = unit_name_by_param(model)
    members: dict[tuple[str, str], list[tuple[str, nn.Parameter]]] = {}
    for path, parameter in model.named_parameters():
        kind, unit_name = "" if parameter.requires_grad else ".frozen", unit_names[parameter]
        if config.policy.params_are_sharded and full_shape(parameter).numel() < config.persistence_threshold:
            kind, unit_name = kind + ".persistent", ROOT
        members.setdefault((unit_name, kind), []).append((path, parameter))
    units: list[Unit] = []
    for name, module in _unit_modules_by_name(model).items():
        buckets = []
        for (unit_name, kind), parameters in members.items():
            if unit_name == name:
                policy = config.policy  # small parameters stay gathered; their gradients and states are sharded
                policy = replace(policy, params_are_sharded=False) if kind.endswith(".persistent") else policy
                buckets.append(FlatBucket(name + kind, parameters, config, policy.for_frozen_params
                                          if kind.startswith(".frozen") else policy))
        if buckets or name == ROOT:
            units.append(Unit(len(units), name, module, tuple(buckets)))
    return units


def _unit_modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Name of a unit -> its module."""
    return {ROOT: model, **dict(() if getattr(model, LEAF_ATTRIBUTE, False) else _iter_unit_modules(model))}


def attach_main_grad_writers(units: list[Unit]) -> None:
    """Let token embeddings add their gradients in place: they are the largest tensors of a step."""
    places = {p: (bucket, index) for unit in units for bucket in unit.buckets if bucket.trainable
              for index, p in enumerate(bucket.parameters)}
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight in places:
            bucket, index = places[module.weight]
            module.weight_main_grad = MainGradWriter(bucket.grads, index)


def detach_main_grad_writers(units: list[Unit]) -> None:
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.weight_main_grad = None


def _iter_unit_modules(module: nn.Module, path: str = "", inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield elements of outermost ModuleLists, leaf modules, and the tiles of tiled linears, inside blocks too."""
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


def unit_name_by_param(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameter -> name of its unit; the root if several units use it."""
    name_of = {id(module): name for name, module in reversed(_unit_modules_by_name(model).items())}
    users: dict[nn.Parameter, set[str]] = {}
    seen: set[tuple[int, str]] = set()

    def walk(module: nn.Module, unit: str) -> None:
        unit = name_of.get(id(module), unit)
        if (id(module), unit) not in seen:
            seen.add((id(module), unit))
            for parameter in (*module.parameters(recurse=False), *module.__dict__.get(EXTERNAL_ATTRIBUTE, ())):
                users.setdefault(parameter, set()).add(unit)
            for child in module.children():
                walk(child, unit)

    walk(model, ROOT)
    return {parameter: units.pop() if len(units) == 1 else ROOT for parameter, units in users.items()}


class ModelParamGuard:
    def __init__(self, model: nn.Module, buckets: Sequence[FlatBucket]) -> None:
        self._model, self._buckets = model, buckets
        self._trained_names = {id(p): slot.name for bucket in buckets
                               for slot, p in zip(bucket.layout.slots, bucket.parameters, strict=True)}
        self._param_ids = _collect_param_ids(model)
        self.steps = 0  # steps since the weights were loaded

    def check_before_step(self) -> None:
        """Raise ConfigError if a step would not train a parameter of the model, or would undo a write to one or to its
        gradient. Takes 1 ms for 1,200 parameters on a CPU core."""
        param_ids = _collect_param_ids(self._model)
        if param_ids != self._param_ids:
            gone = self._trained_names.keys() - param_ids
            if gone:
                name = next(name for key, name in self._trained_names.items() if key in gone)
                raise ConfigError(f"{name} is another Parameter than at zero.initialize, or is gone: the engine trains "
                                  "the old one (load_state_dict(assign=True) does this; engine.load_module_state_dict()"
                                  " loads weights); do it before zero.initialize, or destroy() the engine and "
                                  "initialize again")
            for name, parameter in self._model.named_parameters():
                if id(parameter) not in self._trained_names and parameter.requires_grad:
                    raise ConfigError(f"{name} came to the model after zero.initialize: the engine does not train it; "
                                      "add it before, freeze it, or destroy() the engine and initialize again")
            self._param_ids = param_ids
        self.steps += 1
        compares_values = self.steps.bit_count() == 1  # steps 1, 2, 4, 8 ...
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                bucket.check_not_gathered_by_user("engine.step()")
                bucket.check_params_unchanged()
                bucket.check_user_writes(compare_values=compares_values)
                if bucket.trainable:
                    bucket.grads.check_user_modified_grads()

    def check_user_writes(self, *, compare_values: bool) -> None:
        """Raise ConfigError for in-place writes that the next step would undo."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                bucket.check_user_writes(compare_values=compare_values)

    def check_before_load(self) -> None:
        """Raise ConfigError if loaded weights would not reach a parameter of the model."""
        for bucket in self._buckets:
            bucket.check_not_offloaded("a load")
            bucket.check_not_gathered_by_user("a load")
        self.check_params_in_buffers()

    def check_params_in_buffers(self) -> None:
        """Raise ConfigError if a parameter has left the engine's buffers."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                if not bucket.is_offloaded:
                    bucket.check_params_in_buffer()


def _collect_param_ids(model: nn.Module) -> list[int]:
    """The id() of each parameter of the model, in a fixed order. (`model.parameters()` is ten times slower.)"""
    param_ids: list[int] = []
    seen: set[int] = set()
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            param_ids.extend(map(id, module._parameters.values()))
            stack.extend(module._modules.values())
    return param_ids
