"""Applies a tensor parallel plan to a module: replaces its layers by parallel, optionally int8, layers with this
rank's part.

Int8 weights have one scale per output row of the full matrix, so the levels do not depend on the number of ranks. A
module whose sharding or cast failed half way raises from every later forward (`poison_on_failure`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

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
        model.forward = _raise_poisoned
        raise


def check_not_poisoned(model: nn.Module) -> None:
    require(model.forward is not _raise_poisoned, f"init_inference: {POISONED_MESSAGE}")


def _raise_poisoned(*args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(POISONED_MESSAGE)


def check_divisible(model: nn.Module, plan: TPPlan, tp: Group) -> None:
    """Raises ConfigError for a layer or attribute of the plan that has no equal parts."""
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
    """In place. A layer that is in two places is sharded once."""
    made = dict[int, nn.Module]()  # by ids: a layer that has another place in the plan is alive
    for place in plan.tp_layers:
        layer = model.get_submodule(place.path)
        if id(layer) not in made:
            made[id(layer)] = part = _shard_layer(layer, place, tp)
            made[id(part)] = part
        model.set_submodule(place.path, made[id(layer)])
    # an attribute of a module that is in two places is divided once
    owners = {(id(model.get_submodule(path.rpartition(".")[0])), path.rpartition(".")[2]): path
              for path in plan.divided_attributes}
    for path in owners.values():
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, _get_attribute(model, path) // tp.size)


def _get_attribute(model: nn.Module, path: str) -> int:
    owner, _, name = path.rpartition(".")
    return cast(int, vars(model.get_submodule(owner))[name])


def _shard_layer(layer: nn.Module, place: TPLayer, tp: Group) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        table = nn.Embedding(layer.num_embeddings, layer.embedding_dim // tp.size, layer.padding_idx, device="meta")
        table.weight = _local_parameter(layer.weight, Partition(1, place.num_fused), tp)
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
    made.weight = _local_parameter(weight.t() if is_conv1d(layer) else weight, partition, tp)
    if bias is not None:
        made.bias = _local_parameter(bias, partition if place.side == "column" else None, tp)
    return made.train(layer.training)


def _local_parameter(full: Tensor, partition: Partition | None, tp: Group) -> nn.Parameter:
    """This rank's part, copied so that the full tensor can be freed."""
    part = full if partition is None else local_slice(full, partition, tp.rank, tp.size)
    made = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
    set_partition(made, partition)
    return made


def int8_layers(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """The linear layers of the plan, each by one of its paths; ConfigError where there is none."""
    unique = {id(layer): (place.path, layer) for place in plan.tp_layers for layer in [model.get_submodule(place.path)]}
    layers = {path: layer for path, layer in unique.values() if not isinstance(layer, nn.Embedding)}
    require(bool(layers), f"init_inference: which layers of a {type(model).__name__} are to be int8 is not known: give "
            "injection_policy={LayerClass: (names of its row-parallel layers,)}, or another dtype")
    return layers


def check_scales(model: nn.Module, plan: TPPlan) -> None:
    """Raises what `quantize_layers` would raise, before the layers are sharded."""
    for path, layer in int8_layers(model, plan).items():
        least, most = layer.weight.detach().aminmax(dim=1)
        scales_from_maxima(torch.maximum(-least, most).float(), f"{path}.weight")


@torch.no_grad()
def quantize_layers(model: nn.Module, plan: TPPlan, groups: Groups, activations: torch.dtype,
                    device: torch.device) -> None:
    """Quantizes the layers of the plan, which are sharded by now, and casts and moves all else. Collective."""
    layers = int8_layers(model, plan)
    maxima = {path: all_reduce(row_maxima(_flat_reader(layer.weight), layer.weight.shape), groups.tp, "max")
              for path, layer in layers.items() if isinstance(layer, RowParallelLinear)}

    def fill() -> None:
        arena = HugePageArena([layer.weight.shape for layer in layers.values()], device)
        made = dict[str, Int8]()
        for path, layer in layers.items():
            levels = arena.allocate(layer.weight.shape)
            scale = quantise_into(levels, _flat_reader(layer.weight), f"{path}.weight", maxima.get(path))
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # frees the original
            made[path] = Int8(levels, scale.to(levels.device, activations))
        model.to(device, activations)
        for path, weight in made.items():
            layers[path].weight = nn.Parameter(weight, requires_grad=False)

    all_succeed_or_raise(fill, groups.world)


def _flat_reader(weight: Tensor) -> ReadRange:
    flat = weight.detach().contiguous().view(-1)

    def read(start: int, out: Tensor) -> None:
        out.copy_(flat[start : start + len(out)])

    return read
