"""Cuts a model into units: which parameters travel together.

Every element of an outermost `ModuleList` (a transformer block) is one unit; the root takes what is left: what is
used at both ends of the model, or shared between units.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megatron.zero.bucket import Dtypes, FlatBucket
from megatron.zero.hooks import Unit
from megatron.zero.layout import Slot
from megatron.zero.policy import Policy
from mpu.groups import Group
from mpu.layers import VocabParallelEmbedding, partition_of


def decays(parameter: nn.Parameter) -> bool:
    """Matrices and embeddings decay; biases and LayerNorms do not."""
    return parameter.dim() >= 2


def build_units(model: nn.Module, *, policy: Policy, dp: Group, dtypes: Dtypes) -> list[Unit]:
    """The units of a model in forward order, the root first. Their buckets take the parameters over."""
    blocks = list(_outermost_list_elements(model))
    owner = {parameter: name for name, block in blocks for parameter in block.parameters()}
    members: dict[str, list[tuple[str, nn.Parameter]]] = {"root": [], **{name: [] for name, _ in blocks}}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[owner.get(parameter, "root")].append((path, parameter))
    units: list[Unit] = []
    for name, module in (("root", model), *blocks):
        if members[name]:
            slots = [Slot(path, tuple(p.shape), 0 if decays(p) else 1, partition_of(p)) for path, p in members[name]]
            parameters = [parameter for _, parameter in members[name]]
            bucket = FlatBucket(name, slots, parameters, policy=policy, dp=dp, dtypes=dtypes)
            units.append(Unit(len(units), module, bucket))
    return units


def connect_sinks(units: list[Unit]) -> None:
    """Let token tables add their gradients in place: they are the largest tensors of a step."""
    places = {p: (unit.bucket, index) for unit in units for index, p in enumerate(unit.bucket.parameters)}
    for module in units[0].module.modules():
        if isinstance(module, VocabParallelEmbedding) and module.weight in places:
            bucket, index = places[module.weight]
            module.grad_sink = bucket.sink(index)


def _outermost_list_elements(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(module, nn.ModuleList):
            yield where, child
        else:
            yield from _outermost_list_elements(child, where)
