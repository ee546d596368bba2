"""int8 weights for the layers of a plan: one scale for each output row of the whole matrix, whoever has which part.

As in a checkpoint (checkpoint/int8.py); so the levels do not depend on the number of ranks. The rest of the model is in
the precision of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.agree import all_succeed_or_raise
from megatron.checkpoint.int8 import ReadRange, quantise_into, row_maxima, scales_from_maxima
from megatron.config.setting import require
from megatron.inference.api.policy import TPPlan
from megatron.inference.int8 import HugePageArena, Int8
from mpu.collectives import all_reduce
from mpu.groups import Groups
from mpu.layers import RowParallelLinear


def int8_layers(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """The layers of the plan that are to be int8, cut or not, each by one path. At least one."""
    layers = {path: layer for path, layer in _unique_layers(model, plan) if not isinstance(layer, nn.Embedding)}
    require(bool(layers), f"init_inference: which layers of a {type(model).__name__} are to be int8 is not known: give "
            "injection_policy={LayerClass: (names of its row-parallel layers,)}, or another dtype")
    return layers


def check_scales(model: nn.Module, plan: TPPlan) -> None:
    """What `quantise` would refuse, while the layers are whole."""
    for path, layer in int8_layers(model, plan).items():
        least, most = layer.weight.detach().aminmax(dim=1)
        scales_from_maxima(torch.maximum(-least, most).float(), f"{path}.weight")


@torch.no_grad()
def quantize_layers(model: nn.Module, plan: TPPlan, groups: Groups, activations: torch.dtype,
                    device: torch.device) -> None:
    """The layers of the plan, which are cut. What is not one of them is cast, and goes to the device. Collective."""
    layers = int8_layers(model, plan)
    maxima = {path: all_reduce(row_maxima(_flat_reader(layer.weight), layer.weight.shape), groups.tp, "max")
              for path, layer in layers.items() if isinstance(layer, RowParallelLinear)}

    def fill() -> None:
        arena = HugePageArena([layer.weight.shape for layer in layers.values()], device)
        made = {
            path: _quantize_layer(path, layer, maxima.get(path), arena, activations)
            for path, layer in layers.items()
        }
        model.to(device, activations)
        for path, weight in made.items():
            layers[path].weight = nn.Parameter(weight, requires_grad=False)

    all_succeed_or_raise(fill, groups.world)


def _unique_layers(model: nn.Module, plan: TPPlan) -> Iterator[tuple[str, Any]]:
    """Layers by a path of each."""
    found = {id(layer): (place.path, layer) for place in plan.tp_layers for layer in [model.get_submodule(place.path)]}
    yield from found.values()


def _quantize_layer(path: str, layer: Any, maxima: Tensor | None, arena: HugePageArena,
                    activations: torch.dtype) -> Int8:
    """Its numbers are let go."""
    levels = arena.allocate(layer.weight.shape)
    scale = quantise_into(levels, _flat_reader(layer.weight), f"{path}.weight", maxima)
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return Int8(levels, scale.to(levels.device, activations))


def _flat_reader(weight: Tensor) -> ReadRange:
    flat = weight.detach().contiguous().view(-1)

    def read(start: int, out: Tensor) -> None:
        out.copy_(flat[start : start + len(out)])

    return read
