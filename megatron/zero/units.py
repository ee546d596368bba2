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

from megatron.zero.bucket import FlatBucket, leave_placeholders
from megatron.zero.exchanges import ExchangeLog
from megatron.zero.holders import external_parameters, shape_of
from megatron.zero.homes.shelf import Homes
from megatron.zero.hooks import Unit
from megatron.zero.layout import Slot
from megatron.zero.policy import Policy, Wire
from megatron.zero.precision import Dtypes
from megatron.zero.tiling import Tiled
from megatron.zero.turns import Turns
from mpu.groups import Group
from mpu.layers import VocabParallelEmbedding
from mpu.partition import partition_of

ROOT = "root"
LEAF = "_z3_leaf"
"""What is set on a module that `set_z3_leaf_modules` has marked."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward: they cannot be gathered for it."""


@dataclass(frozen=True)
class Cut:
    """How parameters become buckets: everything `build_units` must know but the model."""

    policy: Policy
    wire: Wire
    dtypes: Dtypes
    dp: Group
    device: torch.device
    persistence_threshold: int
    group_of: Callable[[nn.Parameter], int]
    """The number of a parameter's hyper-parameter group."""
    log: ExchangeLog
    homes: Homes
    turns: Turns = field(default_factory=Turns)
    leaves: Callable[[FlatBucket], None] = leave_placeholders
    """What parameters are while their elements are split."""
    alike: bool = False
    """All ranks have the same values: none are sent."""

    def bucket(self, name: str, members: list[tuple[str, nn.Parameter]], policy: Policy) -> FlatBucket:
        slots = [Slot(path, tuple(shape_of(p)), self.group_of(p) if p.requires_grad else 0, partition_of(p))
                 for path, p in members]
        return FlatBucket(name, slots, [p for _, p in members], policy=policy, dp=self.dp, device=self.device,
                          dtypes=self.dtypes, wire=self.wire, turns=self.turns, log=self.log,
                          homes=self.homes, leaves=self.leaves, alike=self.alike)

    def persists(self, parameter: nn.Parameter) -> bool:
        return self.policy.split_params and shape_of(parameter).numel() < self.persistence_threshold


def build_units(model: nn.Module, cut: Cut) -> list[Unit]:
    """The units of a model in forward order, the root first. Their buckets take the parameters over."""
    modules, homes = _modules(model), units_of(model)
    members: dict[tuple[str, str], list[tuple[str, nn.Parameter]]] = {}
    for path, parameter in model.named_parameters():
        kind, home = "" if parameter.requires_grad else ".frozen", homes[parameter]
        if cut.persists(parameter):
            kind, home = kind + ".persistent", ROOT
        members.setdefault((home, kind), []).append((path, parameter))
    units: list[Unit] = []
    for name, module in modules.items():
        buckets = tuple(cut.bucket(name + kind, members[home, kind], _row(cut.policy, kind))
                        for home, kind in members if home == name)
        if buckets or name == ROOT:
            units.append(Unit(len(units), name, module, buckets))
    return units


def units_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameter -> name of its unit."""
    return _homes(model, _modules(model))


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name of a unit -> its module."""
    return {ROOT: model, **dict(() if getattr(model, LEAF, False) else _unit_modules(model))}


def _row(policy: Policy, kind: str) -> Policy:
    row = policy.persistent if kind.endswith(".persistent") else policy
    return row.frozen if kind.startswith(".frozen") else row


def connect_sinks(units: list[Unit]) -> None:
    """Let token tables add their gradients in place: they are the largest tensors of a step."""
    places = {p: (bucket, index) for unit in units for bucket in unit.buckets if bucket.trainable
              for index, p in enumerate(bucket.parameters)}
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight in places:
            bucket, index = places[module.weight]
            module.weight_main_grad = bucket.grads.sink(index)


def disconnect_sinks(units: list[Unit]) -> None:
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.weight_main_grad = None


def _unit_modules(module: nn.Module, path: str = "", inside: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Elements of outermost lists, and leaves; inside of them the tiles of tiled linears."""
    if isinstance(module, Tiled):
        yield from ((f"{path}.tiles.{number}", tile) for number, tile in enumerate(module.tiles()))
        return
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        is_block = (isinstance(module, nn.ModuleList) or getattr(child, LEAF, False)) and not inside and \
            not isinstance(child, _CONTAINERS)
        if is_block:
            yield where, child
        yield from _unit_modules(child, where, inside or is_block)


def _homes(model: nn.Module, modules: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
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
