"""The tensors in what a module is given and returns: nested tuples, lists, mappings and records."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def iter_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from iter_tensors(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from iter_tensors(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from iter_tensors(getattr(value, item.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor changed, wherever it is nested."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict | UserDict):
        changed = copy(value)  # of its own kind: some are records as well
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: map_tensors(getattr(value, item.name), change)
                                 for item in fields(value) if item.init})
    return value
