"""Applies a tensor parallel plan to a module: replaces its layers by parallel, optionally int8, layers with this
rank's part.

Int8 weights have one scale per output row of the full matrix, so the levels do not depend on the number of ranks. A
module whose sharding or cast failed half way raises from every later forward (`poison_on_failure`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor, nn

from megatron.checkpoint.int8_weights import ReadRange, quantise_into, row_maxima, scales_from_maxima
from megatron.config.schema import require
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.errors import ConfigError
from megatron.inference.api.policy import TPLayer, TPPlan, in_out_features, is_conv1d
from megatron.inference.int8 import HugePageArena, Int8
from mpu.collectives import all_reduce
from mpu.groups import Group, Groups
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from mpu.partition import local_slice, set_partition
from mpu.split import Partition

POISONED_MESSAGE = "this model was refused by init_inference and is partly cut or cast: load it again"


@contextmanager
def poison_on_failure(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        model.forward = _PoisonedForward()
        raise


def check_not_poisoned(model: nn.Module) -> None:
    require(not isinstance(model.forward, _PoisonedForward), f"init_inference: {POISONED_MESSAGE}")


@final
class _PoisonedForward:
    """In place of a forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(POISONED_MESSAGE)


def check_divisible(model: nn.Module, plan: TPPlan, tp: Group) -> None:
    """Everything that is cut has equal parts, or is refused by name."""
    for place in plan.tp_layers:
        inside, outside = in_out_features(model.get_submodule(place.path))
        width, side = (outside // place.num_fused, "output") if place.side == "column" else (inside, "input")
        whole = outside % place.num_fused == 0
        require(whole, f"injection_policy: the {outside} output features of {place.path} are not {place.num_fused} "
                "equal parts")
        require(width % tp.size == 0, f"{place.path} has {width} {side} features, which {tp.size} ranks cannot share "
                f"evenly: choose a tp_size that divides {width}")
    for number in plan.divided_attributes:
        value = _get_attribute(model, number)
        require(value % tp.size == 0, f"{number} is {value}, which {tp.size} ranks cannot share evenly: choose a "
                f"tp_size that divides {value}")


@torch.no_grad()
def shard_module(model: nn.Module, plan: TPPlan, tp: Group) -> None:
    """In place. A layer that is in two places is cut once."""
    made = dict[int, nn.Module]()  # by ids: a layer that some place still has to come to is alive
    for place in plan.tp_layers:
        layer = model.get_submodule(place.path)
        if id(layer) not in made:
            made[id(layer)] = part = _shard_layer(layer, place, tp)
            made[id(part)] = part
        owner, _, name = place.path.rpartition(".")
        setattr(model.get_submodule(owner), name, made[id(layer)])
    owners = {(id(model.get_submodule(number.rpartition(".")[0])), number.rpartition(".")[2]): number
              for number in plan.divided_attributes}  # one that is in two places is divided once
    for number in owners.values():
        owner, _, name = number.rpartition(".")
        setattr(model.get_submodule(owner), name, _get_attribute(model, number) // tp.size)


def _get_attribute(model: nn.Module, path: str) -> int:
    owner, _, name = path.rpartition(".")
    return cast(int, vars(model.get_submodule(owner))[name])


def _shard_layer(layer: nn.Module, place: TPLayer, tp: Group) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        table = nn.Embedding(layer.num_embeddings, layer.embedding_dim // tp.size, layer.padding_idx, device="meta")
        table.weight = _frozen_parameter(_local_copy(layer.weight, Partition(1, place.num_fused), tp),
                                         Partition(1, place.num_fused))
        return table
    inside, outside = in_out_features(layer)
    weight, bias = cast(nn.Parameter, layer.weight), cast("nn.Parameter | None", layer.bias)
    made: ColumnParallelLinear | RowParallelLinear
    if place.side == "column":
        made = ColumnParallelLinear(inside, outside, bias is not None, gather_output=False, stride=place.num_fused,
                                    tp=tp, dtype=weight.dtype, device="meta")
    else:
        made = RowParallelLinear(inside, outside, bias is not None, input_is_parallel=True, tp=tp, dtype=weight.dtype,
                                 device="meta")
    partition = Partition(0 if place.side == "column" else 1, place.num_fused)
    made.weight = _frozen_parameter(_local_copy(weight.t() if is_conv1d(layer) else weight, partition, tp), partition)
    if bias is not None:
        of_bias = partition if place.side == "column" else None
        made.bias = _frozen_parameter(bias.clone() if of_bias is None else _local_copy(bias, of_bias, tp), of_bias)
    return made.train(layer.training)


def _local_copy(whole: Tensor, partition: Partition, tp: Group) -> Tensor:
    """A copy, so that the whole can go."""
    return local_slice(whole, partition, tp.rank, tp.size).clone(memory_format=torch.contiguous_format)


def _frozen_parameter(values: Tensor, partition: Partition | None) -> nn.Parameter:
    made = nn.Parameter(values, requires_grad=False)
    set_partition(made, partition)
    return made


def int8_layers(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """The layers of the plan that are to be int8, cut or not, each by one path. At least one."""
    layers = {path: layer for path, layer in _unique_layers(model, plan) if not isinstance(layer, nn.Embedding)}
    require(bool(layers), f"init_inference: which layers of a {type(model).__name__} are to be int8 is not known: give "
            "injection_policy={LayerClass: (names of its row-parallel layers,)}, or another dtype")
    return layers


def check_scales(model: nn.Module, plan: TPPlan) -> None:
    """What `quantize_layers` would refuse, while the layers are whole."""
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
        made = {path: _quantize_layer(path, layer, maxima.get(path), arena, activations)
                for path, layer in layers.items()}
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
