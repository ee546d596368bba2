"""The only file that registers hooks: module and gradient events become calls of an `Events` object.

A *unit* is a module whose parameters travel as one bucket. The root unit is the whole model: its bucket holds what no
other unit holds. Recomputation needs nothing here: a forward inside a backward is told apart by the receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.zero.bucket import FlatBucket


@dataclass(frozen=True, eq=False)
class Unit:
    """A module and the bucket of its parameters; `index` counts in forward order, the root is 0."""

    index: int
    module: nn.Module
    bucket: FlatBucket


class Events(Protocol):
    """What the engine is told."""

    def before_forward(self, unit: Unit) -> None: ...

    def after_forward(self, unit: Unit) -> None: ...

    def before_backward(self, unit: Unit) -> None: ...

    def gradient_ready(self, unit: Unit, index: int) -> None: ...


def attach(units: Sequence[Unit], events: Events) -> list[RemovableHandle]:
    """Tell `events` about every unit; the handles take the hooks off again."""
    handles: list[RemovableHandle] = []
    for unit in units:
        handles.append(unit.module.register_forward_pre_hook(partial(_before, events, unit)))
        handles.append(unit.module.register_forward_hook(partial(_after, events, unit)))
        for index, parameter in enumerate(unit.bucket.parameters):
            handles.append(parameter.register_post_accumulate_grad_hook(partial(_ready, events, unit, index)))
    return handles


def _before(events: Events, unit: Unit, module: nn.Module, inputs: object) -> None:
    events.before_forward(unit)


def _after(events: Events, unit: Unit, module: nn.Module, inputs: object, output: object) -> None:
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(_backward, events, unit))
    events.after_forward(unit)


def _backward(events: Events, unit: Unit, gradient: Tensor) -> None:
    events.before_backward(unit)


def _ready(events: Events, unit: Unit, index: int, parameter: Tensor) -> None:
    events.gradient_ready(unit, index)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
