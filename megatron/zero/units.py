"""Cuts a model into units: which parameters travel together.

Every element of an outermost `ModuleList` (a transformer block) is one unit; the root takes what is left: what is used at both ends
of the model, or shared between units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.zero.bucket import FlatBucket
from megatron.zero.hooks import Unit
from megatron.zero.layout import Slot
from megatron.zero.policy import Policy
from mpu.groups import Group
from mpu.layers import partition_of


@dataclass(frozen=True)
class HyperGroup:
    """Hyper-parameters of the parameters that share them."""

    weight_decay: float


def decays(parameter: nn.Parameter) -> bool:
    """Matrices and embeddings decay; biases and LayerNorms do not."""
    return parameter.dim() >= 2


def build_units(model: nn.Module, *, policy: Policy, dp: Group, dtype: torch.dtype, grad_dtype: torch.dtype) -> list[Unit]:
    """The units of a model in forward order, the root first. Their buckets take the parameters over."""
    blocks = list(_outermost_list_elements(model))
    owned = {parameter: name for name, block in blocks for parameter in block.parameters()}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def unit(name: str, module: nn.Module, members: Sequence[tuple[str, nn.Parameter]]) -> Unit:
        slots = [Slot(path, tuple(p.shape), 0 if decays(p) else 1, partition_of(p)) for path, p in members]
        return Unit(module, FlatBucket(name, slots, [p for _, p in members], policy=policy, dp=dp, dtype=dtype, grad_dtype=grad_dtype))

    units = [unit("root", model, [(path, p) for path, p in named if p not in owned])]
    for name, block in blocks:
        members = [(path, p) for path, p in named if owned.get(p) == name]
        if members:
            units.append(unit(name, block, members))
    return [u for u in units if u.bucket.parameters]


def _outermost_list_elements(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(module, nn.ModuleList):
            yield where, child
        else:
            yield from _outermost_list_elements(child, where)
