"""Nested state as one JSON text and a list of tensors, and back exactly as it was. No pickle, no classes of anybody's.

Dicts, lists, numbers, texts and None are themselves in the text. What JSON has no form for is an object with one key
that begins with `$`: `{"$tensor": key}`, a tuple, a set, bytes, a path, a Namespace, a dict whose keys are not all
texts, an array or a number of NumPy. Any other type is refused by its path in the state. What is a kind of these comes
back as these: a namedtuple as a tuple; an OrderedDict, a Counter or a defaultdict as a dict; a bytearray as bytes.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.tensorfile import DTYPE_NAMES, Item
from megatron.errors import CheckpointError

TENSOR, TUPLE, SET, FROZENSET, BYTES, PATH, NAMESPACE, DICT, ARRAY, NUMPY = (
    "$tensor", "$tuple", "$set", "$frozenset", "$bytes", "$path", "$namespace", "$dict", "$array", "$numpy")


def encode(value: object, path: str, items: list[Item]) -> Any:
    """`value` as JSON; its tensors are appended to `items`, with their paths as keys."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.dtype in DTYPE_NAMES:
        items.append(Item(path, value.dtype, tuple(value.shape), partial(torch.Tensor.detach, value)))
        return {TENSOR: path}
    if isinstance(value, Mapping):
        return _mapping(value, path, items)
    if isinstance(value, argparse.Namespace):
        return {NAMESPACE: _mapping(vars(value), path, items)}
    if isinstance(value, np.ndarray | np.generic):
        return _numpy(value, path)
    if isinstance(value, bytes | bytearray):
        return {BYTES: _text(bytes(value))}
    if isinstance(value, PurePath):
        return {PATH: str(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return _sequence(value, path, items)
    if isinstance(value, bool | int | float | str):  # an enum, for one
        return value
    raise CheckpointError(f"state {path}: a checkpoint holds JSON values and tensors, tuples, sets, bytes, paths, "
                          f"Namespaces and NumPy's arrays and numbers, not {type(value).__name__}; save what it "
                          "is made of, such as its state_dict()")


def _mapping(value: Mapping[Any, Any], path: str, items: list[Item]) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(child, f"{path}/{_step(key)}", items) for key, child in value.items()}
    pairs = enumerate(value.items())  # 1 and "1" are two keys: their places tell them apart
    return {DICT: [[encode(key, f"{path}/key {i}", items), encode(child, f"{path}/{i}: {_step(str(key))}", items)]
                   for i, (key, child) in pairs]}


def _step(key: str) -> str:
    """A key as one step of a path, and no other's: a tensor is found by its path."""
    return key.replace("~", "~0").replace("/", "~1")


def _sequence(value: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any], path: str, items: list[Item]) -> Any:
    # Sets have no order of their own; a file should not differ from run to run.
    members = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    parts = [encode(child, f"{path}/{index}", items) for index, child in enumerate(members)]
    mark = next(mark for kind, mark in MARKS.items() if isinstance(value, kind))
    return parts if mark is None else {mark: parts}


MARKS: dict[type, str | None] = {list: None, tuple: TUPLE, set: SET, frozenset: FROZENSET}


def _numpy(value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
    if value.dtype.hasobject or value.dtype.fields:
        raise CheckpointError(f"state {path}: an array of {value.dtype} holds more than numbers; save its parts")
    raw = _text(np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return {NUMPY: [value.dtype.str, raw]}
    return {ARRAY: [value.dtype.str, list(value.shape), raw]}


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def decode(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(child, fetch) for child in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (mark := next(iter(value))) in READERS:
        return READERS[mark](value[mark], fetch)
    return {key: decode(child, fetch) for key, child in value.items()}


def _array(content: Any, fetch: Callable[[str], torch.Tensor]) -> np.ndarray[Any, Any]:
    dtype, shape, raw = content
    return np.frombuffer(base64.b64decode(raw), np.dtype(dtype)).reshape(shape).copy()


READERS: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    TENSOR: lambda content, fetch: fetch(str(content)),
    TUPLE: lambda content, fetch: tuple(decode(content, fetch)),
    SET: lambda content, fetch: set(decode(content, fetch)),
    FROZENSET: lambda content, fetch: frozenset(decode(content, fetch)),
    BYTES: lambda content, fetch: base64.b64decode(content),
    PATH: lambda content, fetch: Path(content),
    NAMESPACE: lambda content, fetch: argparse.Namespace(**decode(content, fetch)),
    DICT: lambda content, fetch: {decode(key, fetch): decode(child, fetch) for key, child in content},
    ARRAY: _array,
    NUMPY: lambda content, fetch: np.frombuffer(base64.b64decode(content[1]), np.dtype(content[0]))[0],
}
"""The mark of an object with one key -> how to read what it holds."""
