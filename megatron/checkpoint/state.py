"""Nested dicts of JSON values and tensors, as one JSON text and a list of tensors. No pickle, no classes.

In the text a tensor is `{"$tensor": key}`. Tuples become lists; any other type is refused by its path in the dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megatron.checkpoint.tensorfile import DTYPE_NAMES, Item
from megatron.errors import CheckpointError

MARK = "$tensor"


def encode(value: object, path: str, items: list[Item]) -> Any:
    """`value` as JSON; its tensors are appended to `items`, with their paths as keys."""
    if isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES:
        items.append(Item(path, value.dtype, tuple(value.shape), partial(torch.Tensor.detach, value)))
        return {MARK: path}
    if isinstance(value, Mapping):
        if MARK in value or not all(isinstance(key, str) for key in value):
            raise CheckpointError(f"state {path}: keys must be strings other than {MARK!r}, found {list(value)!r:.80}")
        return {key: encode(child, f"{path}/{key}", items) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [encode(child, f"{path}/{index}", items) for index, child in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"state {path}: a checkpoint holds JSON values and tensors, not {type(value).__name__}")


def decode(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        if set(value) == {MARK}:
            return fetch(str(value[MARK]))
        return {key: decode(child, fetch) for key, child in value.items()}
    if isinstance(value, list):
        return [decode(child, fetch) for child in value]
    return value
