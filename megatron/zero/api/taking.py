"""A model is an engine's from when its first parameter is until `destroy`. What fails in between leaves parameters that
are split, rounded or gone, which no later engine may take for the model's values: they are marked. Here is also what an
engine refuses to be given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.errors import ConfigError
from megatron.zero.holders import holder_of

_SPOILT = WeakTensorKeyDictionary()
"""Parameter -> what went wrong."""


def check_argument(name: str, value: object, kind: Any, expected: str) -> None:
    """An argument of the wrong kind is an error of usage."""
    if not isinstance(value, kind):
        given = "" if value is None else f" ({type(value).__name__})"
        raise ConfigError(f"{name} is {value!r:.80}{given}: expected {expected}")


def folder_of(call: str, value: str | os.PathLike[str]) -> Path:
    """Of a checkpoint: the empty name would be the working directory."""
    check_argument(f"the folder of {call}", value or None, str | os.PathLike, "the path of a folder")
    return Path(value)


def check_parameters(model: nn.Module) -> None:
    """Whether an engine can train the model, before anything of it is changed."""
    for name, parameter in model.named_parameters():
        if parameter in _SPOILT:
            raise ConfigError(f"{name} is of an engine that failed half way ({_SPOILT[parameter]}), and may be split, "
                              "rounded or gone: build the model anew, with its weights")
        holder = holder_of(parameter)
        if holder is not None and holder.is_settled:
            raise ConfigError(f"{name} belongs to another engine already: build one engine for a model, or destroy() "
                              "the other first")
        if holder is None and is_lazy(parameter):
            raise ConfigError(f"{name} is a lazy parameter without a shape: run one forward of the model before "
                              "zero.initialize")
        is_made_of_others = is_traceable_wrapper_subclass(parameter)
        if is_made_of_others or parameter.layout != torch.strided or not parameter.is_floating_point():
            raise ConfigError(f"{name} is a {type(parameter).__name__} of {parameter.dtype} and {parameter.layout}: the "
                              "engine keeps plain dense floating point tensors; make it one (to_dense(), "
                              "torch.view_as_real()), or keep it as a buffer")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(f"{name or 'the model'} has max_norm={module.max_norm:g}: its forward writes to the "
                              "weights, and the engine would undo it; set max_norm = None, and scale what is looked up: "
                              "`rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)` is the same")


@contextmanager
def taking(model: nn.Module) -> Iterator[None]:
    """An engine is made of it inside."""
    try:
        yield
    except BaseException as error:
        for parameter in model.parameters():
            _SPOILT[parameter] = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        raise
