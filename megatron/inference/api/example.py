"""Inputs that a model takes: the caller's, the model's own dummies, or made for its first layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from megatron.inference.api.policy import is_linear, widths

ROWS, LENGTH = 2, 8


@final
@dataclass(frozen=True)
class Example:
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def example_of(model: nn.Module, given: Any) -> Example | None:
    """None where nothing can be made up."""
    given = getattr(model, "dummy_inputs", None) if given is None else given
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if isinstance(given, Mapping):
        return Example(kwargs={name: _there(value, device) for name, value in given.items()})
    if given is not None:
        several = given if isinstance(given, (tuple, list)) else (given,)
        return Example(tuple(_there(value, device) for value in several))
    made = _made(model)
    return None if made is None else Example((made,))


def _there(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _made(model: nn.Module) -> Tensor | None:
    """For the first layer that reads: tokens for a table, numbers for a linear layer."""
    generator = torch.Generator().manual_seed(1234)  # the same on every rank
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            shape = ROWS, min(LENGTH, *tables)
            return torch.randint(module.num_embeddings, shape, generator=generator).to(module.weight.device)
        if is_linear(module):
            weight = next(module.parameters())
            return torch.randn(ROWS, LENGTH, widths(module)[0], generator=generator).to(weight)
    return None
