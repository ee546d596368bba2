"""Checks whether an engine can take a model: equal on all ranks, owned by no other engine, and trainable.

Buckets follow the order in which the model names its parameters. A model built from a set has another order in each
process and is refused, because initialization and zero.Init followed that order already. Ranks with equal models
exchange one number. If `zero.initialize` fails half way, the parameters may be sharded, rounded or freed: they are
marked, and a later engine refuses them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.distributed.consistency import find_differences
from megatron.distributed.rank_text import describe_differences
from megatron.errors import ConfigError
from megatron.zero.partitioned_param import full_shape, param_owner
from megatron.zero.units import unit_name_by_param
from mpu.groups import Group


def check_same_model(model: nn.Module, world: Group) -> None:
    """Raise ConfigError on every rank, naming the first parameter or buffer that differs. Collective."""
    unit_of, parameters = unit_name_by_param(model), []
    for name, parameter in model.named_parameters():  # all that affects layout and initialization
        text = describe_tensor(parameter, full_shape(parameter)) + " (frozen)" * (not parameter.requires_grad)
        text += " of zero.Init" * (param_owner(parameter) is not None)
        in_unit = name.startswith(f"{(unit := unit_of[parameter])}.")
        parameters.append(f"{name}: {text}" if in_unit else f"{name}: {text} in unit {unit}")
    check_same_descriptions({"parameter": parameters, **describe_buffers(model)}, world,
                            "the ranks give zero.initialize different models")


def describe_buffers(model: nn.Module) -> dict[str, list[str]]:
    return {"buffer": [f"{name}: {describe_tensor(buffer, buffer.shape)}" for name, buffer in model.named_buffers()]}


def check_same_descriptions(mine: Mapping[str, Sequence[str]], world: Group, what: str) -> None:
    """Raise ConfigError on every rank, naming the first description that differs. `mine`: this rank's descriptions of
    each kind, in order. Collective."""
    if not world.is_solo and (per_rank := find_differences(mine, world)):
        name, texts = next((f"{kind} {number}", texts) for kind in mine for number, texts in enumerate(
            zip_longest(*(each[kind] for each in per_rank), fillvalue="not there")) if len(set(texts)) > 1)
        difference = describe_differences([({name: text}, [rank]) for rank, text in enumerate(texts)])
        raise ConfigError(f"{what}: {difference}; build the same model in the same order on every rank (a set has "
                          "another order in each process)")


def describe_tensor(tensor: Tensor, shape: torch.Size) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}"


_FAILED_PARAMS = WeakTensorKeyDictionary()  # parameter -> the error of the engine that failed to build


def check_argument(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise ConfigError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        given = "" if value is None else f" ({type(value).__name__})"
        raise ConfigError(f"{name} is {value!r:.80}{given}: expected {expected}")


def to_folder(call: str, value: str | os.PathLike[str]) -> Path:
    """The checkpoint folder. An empty name raises, as it would mean the working directory."""
    check_argument(f"the folder of {call}", value or None, str | os.PathLike, "the path of a folder")
    return Path(value)


def check_parameters(model: nn.Module) -> None:
    """Raise ConfigError if an engine cannot train the model, before anything is changed."""
    for name, parameter in model.named_parameters():
        if parameter in _FAILED_PARAMS:
            raise ConfigError(f"{name} is of an engine that failed half way ({_FAILED_PARAMS[parameter]}), and may be "
                              "split, rounded or gone: build the model again, with its weights")
        holder = param_owner(parameter)
        if holder is not None and holder.is_engine_owned:
            raise ConfigError(f"{name} belongs to another engine already: build one engine for a model, or destroy() "
                              "the other first")
        if holder is None and is_lazy(parameter):
            raise ConfigError(f"{name} is a lazy parameter without a shape: run one forward of the model first")
        if holder is None and (is_traceable_wrapper_subclass(parameter) or parameter.layout != torch.strided
                               or not parameter.is_floating_point()):
            raise ConfigError(f"{name} is a {type(parameter).__name__} of {parameter.dtype} and {parameter.layout}: "
                              "the engine keeps plain dense floating point tensors; make it one (to_dense(), "
                              "torch.view_as_real()), or keep it as a buffer")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(f"{name or 'the model'} has max_norm={module.max_norm:g}: its forward writes to the "
                              "weights, and the engine would undo it; set max_norm = None, and scale what is looked up "
                              "by `(max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)`, which is the same")


@contextmanager
def claim_model(model: nn.Module) -> Iterator[None]:
    """An engine is built inside; an error marks all parameters as unusable."""
    try:
        yield
    except BaseException as error:
        for parameter in model.parameters():
            _FAILED_PARAMS[parameter] = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        raise
