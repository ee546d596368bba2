"""Whether all ranks have the same model, in the same order: one number travels where they do.

Buckets are laid out, and buffers copied, in the order in which a model names its parameters and buffers. A model that
is built from a set has another order in each process, and its ranks would train on each other's gradients without a
sign. They are refused and not put into one order: what a rank drew while the model was built, and what zero.Init has
split, followed the other order already. (The order of parameters within param groups decides nothing.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.agree import unlike
from megatron.errors import ConfigError
from megatron.ranges import ranges
from megatron.zero.holders import holder_of, shape_of
from megatron.zero.units import units_of
from mpu.groups import Group

Row = Sequence[Any]
"""Of a parameter or a buffer: its name, and what it is in words."""

WHAT_DOES_IT = ("a model that is built from a set, or from a dict that is filled in another order on each rank, does "
                "this; sort the names before it is built")


def check_model(model: nn.Module, world: Group) -> None:
    """A ConfigError on every rank that names the first parameter or buffer that differs."""
    unit_of = units_of(model)
    check_rows({"parameter": [[name, _words(name, parameter, unit_of[parameter])]
                              for name, parameter in model.named_parameters()], **_buffers(model)},
               world, "the ranks give zero.initialize different models")


def check_buffers(model: nn.Module, world: Group, call: str) -> None:
    """The same of buffers alone."""
    check_rows(_buffers(model), world, f"the ranks call {call} with different buffers in the model")


def check_rows(mine: Mapping[str, Sequence[Row]], world: Group, what: str) -> None:
    """By kind; each rank tells its own. Collective."""
    if not world.is_solo and (told := unlike(mine, world)):
        raise ConfigError(f"{what}: {next(filter(None, (first_difference(told, kind) for kind in mine)))}")


def first_difference(told: Sequence[Mapping[str, Sequence[Row]]], kind: str) -> str:
    """The first of a kind in which ranks differ, and why they may; empty where they do not."""
    for number, rows in enumerate(zip_longest(*(one[kind] for one in told))):
        names = [None if row is None else row[0] for row in rows]
        if len(set(names)) > 1:
            same = len({tuple(sorted(row[0] for row in one[kind])) for one in told}) == 1
            return (f"{kind} {number} is {_who(['nothing' if name is None else repr(name) for name in names])}; "
                    + (WHAT_DOES_IT if same else "build the same model on every rank"))
        if len({tuple(row) for row in rows}) > 1:
            return f"{kind} {names[0]!r} is {_who([row[1] for row in rows])}; build the same model on every rank"
    return ""


def _who(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranges(who)}" for value, who in ranks.items())


def _buffers(model: nn.Module) -> dict[str, list[Row]]:
    return {"buffer": [[name, kind_of(buffer, buffer.shape)] for name, buffer in model.named_buffers()]}


def _words(name: str, parameter: nn.Parameter, unit: str) -> str:
    """All that decides how it is laid out and how its values come; the unit, where its name does not say it."""
    text = kind_of(parameter, shape_of(parameter)) + " (frozen)" * (not parameter.requires_grad)
    text += " of zero.Init" * (holder_of(parameter) is not None)
    return text if name.startswith(f"{unit}.") else f"{text} in unit {unit}"


def kind_of(tensor: Tensor, shape: torch.Size) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}"
