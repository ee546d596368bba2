"""A model is an engine's from when its first parameter is until `destroy`. What fails in between leaves parameters that
are split, rounded or gone, which no later engine may take for the model's values: they are marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.errors import ConfigError
from megatron.zero.holders import holder_of

_SPOILT = WeakTensorKeyDictionary()
"""Parameter -> what went wrong."""


def check_free(model: nn.Module) -> None:
    """Before anything of the model is changed."""
    for name, parameter in model.named_parameters():
        if parameter in _SPOILT:
            raise ConfigError(f"{name} is of an engine that failed half way ({_SPOILT[parameter]}), and may be split, "
                              "rounded or gone: build the model anew, with its weights")
        holder = holder_of(parameter)
        if holder is not None and holder.is_settled:
            raise ConfigError(f"{name} belongs to another engine already: build one engine for a model, or destroy() "
                              "the other first")


@contextmanager
def taking(model: nn.Module) -> Iterator[None]:
    """An engine is made of it inside."""
    try:
        yield
    except BaseException as error:
        for parameter in model.parameters():
            _SPOILT[parameter] = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        raise
