"""Nested state as one JSON text and a list of tensors, and back exactly as it was. No pickle, no classes of anybody's.

Dicts, lists, numbers, texts and None are themselves in the text. What JSON has no form for is an object with one key
that begins with `$`: `{"$tensor": key}`, a tuple, a set, bytes, a path, a Namespace, a dict whose keys are not all
texts, an array or a number of NumPy. Every value comes back with its type, so a class that is only a kind of one of
these (a namedtuple, an enum of numbers, a masked array) is refused like any other, by its path in the state.
"""

from __future__ import annotations

import argparse
import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megatron.checkpoint.tensorfile import DTYPE_NAMES, Item
from megatron.errors import CheckpointError

TENSOR, PARAMETER, TUPLE, SET, FROZENSET, BYTES, BYTEARRAY, PATH, NAMESPACE, DICT, ARRAY, NUMPY = (
    "$tensor", "$parameter", "$tuple", "$set", "$frozenset", "$bytes", "$bytearray", "$path", "$namespace", "$dict",
    "$array", "$numpy")
ORDERED, COUNTER, DEFAULT, SIZE, TORCH_VERSION = "$ordered", "$counter", "$default", "$size", "$torch_version"

FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set, bytes)}
"""What a defaultdict may make."""

Writer = Callable[[Any, str, list[Item]], Any]
"""(value, its path, what its tensors are appended to) -> JSON."""

Fetch = Callable[[str], Tensor]
"""The tensor of a path."""


def encode(value: object, path: str, items: list[Item]) -> Any:
    """`value` as JSON; its tensors are appended to `items`, with their paths as keys."""
    if isinstance(value, np.generic):  # of many types
        return {NUMPY: [_dtype(value, path), _text(value.tobytes())]}
    writer: Writer = WRITERS.get(type(value), _refuse)
    return writer(value, path, items)


def _as_it_is(value: Any, path: str, items: list[Item]) -> Any:
    return value


def _tensor(value: Tensor, path: str, items: list[Item]) -> Any:
    if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
        raise CheckpointError(f"state {path}: a checkpoint holds no tensor of {value.dtype}, {value.layout}; save "
                              "dense ones that it is made of, such as torch.view_as_real(...) or .coalesce().values()")
    items.append(Item(path, value.dtype, tuple(value.shape), partial(Tensor.detach, value)))
    return {TENSOR: path}


def _parameter(value: nn.Parameter, path: str, items: list[Item]) -> Any:
    return {PARAMETER: [_tensor(value, path, items), value.requires_grad]}


def _dict(value: Mapping[Any, Any], path: str, items: list[Item]) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(child, f"{path}/{_step(key)}", items) for key, child in value.items()}
    return {DICT: _pairs(value, path, items)}


def _pairs(value: Mapping[Any, Any], path: str, items: list[Item]) -> list[Any]:
    pairs = enumerate(value.items())  # 1 and "1" are two keys: their places tell them apart
    return [[encode(key, f"{path}/key {i}", items), encode(child, f"{path}/{i}: {_step(str(key))}", items)]
            for i, (key, child) in pairs]


def _step(key: str) -> str:
    """A key as one step of a path, and no other's: a tensor is found by its path."""
    return key.replace("~", "~0").replace("/", "~1")


def _default(value: defaultdict[Any, Any], path: str, items: list[Item]) -> Any:
    name = getattr(value.default_factory, "__name__", None)
    if value.default_factory is not (None if name is None else FACTORIES.get(name)):
        raise CheckpointError(f"state {path}: what the defaultdict makes would be lost, {value.default_factory!r}, as "
                              "it is neither None nor a built-in type; save dict(...) of it")
    return {DEFAULT: [name, _pairs(value, path, items)]}


def _parts(value: Iterable[Any], path: str, items: list[Item]) -> list[Any]:
    # Sets have no order of their own; a file should not differ from run to run.
    members = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return [encode(child, f"{path}/{index}", items) for index, child in enumerate(members)]


def _array(value: np.ndarray[Any, Any], path: str, items: list[Item]) -> Any:
    return {ARRAY: [_dtype(value, path), list(value.shape), _text(np.ascontiguousarray(value).tobytes())]}


def _dtype(value: np.ndarray[Any, Any] | np.generic, path: str) -> str:
    dtype = value.dtype
    if dtype.hasobject or dtype.fields or np.dtype(dtype.str) != dtype:
        raise CheckpointError(f"state {path}: an array of {dtype} holds more than numbers; save its parts")
    return dtype.str


def _text(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode("ascii")


def _refuse(value: object, path: str, items: list[Item]) -> Any:
    base = next((kind for kind in type(value).__mro__ if kind in CONVERSIONS), None)
    instead = "what it is made of, such as its state_dict()" if base is None else f"{base.__name__}(...) of it"
    raise CheckpointError(
        f"state {path}: a value of type {type(value).__name__} would not come back as it was: a checkpoint holds JSON "
        "values, tensors, parameters, tuples, sets, bytes, OrderedDicts, Counters, defaultdicts, paths, Namespaces and "
        f"NumPy's arrays and numbers; save {instead}")


CONVERSIONS = frozenset({dict, list, tuple, set, frozenset, str, int, float, bytes, bytearray})
"""What a value of a class of its own may be saved as, where it is a kind of one of these."""

WRITERS: dict[type, Writer] = {
    **dict.fromkeys((type(None), bool, int, float, str), _as_it_is),
    Tensor: _tensor,
    nn.Parameter: _parameter,
    dict: _dict,
    OrderedDict: lambda value, path, items: {ORDERED: _pairs(value, path, items)},
    Counter: lambda value, path, items: {COUNTER: _pairs(value, path, items)},
    defaultdict: _default,
    list: _parts,
    tuple: lambda value, path, items: {TUPLE: _parts(value, path, items)},
    torch.Size: lambda value, path, items: {SIZE: [*value]},
    set: lambda value, path, items: {SET: _parts(value, path, items)},
    frozenset: lambda value, path, items: {FROZENSET: _parts(value, path, items)},
    bytes: lambda value, path, items: {BYTES: _text(value)},
    bytearray: lambda value, path, items: {BYTEARRAY: _text(value)},
    type(Path()): lambda value, path, items: {PATH: str(value)},
    argparse.Namespace: lambda value, path, items: {NAMESPACE: _dict(vars(value), path, items)},
    np.ndarray: _array,
    TorchVersion: lambda value, path, items: {TORCH_VERSION: str(value)},
}
"""A type, and no kind of it -> how to write it."""


def decode(value: Any, fetch: Fetch) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(child, fetch) for child in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (mark := next(iter(value))) in READERS:
        return READERS[mark](value[mark], fetch)
    if strange := [key for key in value if key.startswith("$")]:
        raise ValueError(f"{strange[0]!r:.40} marks nothing that is known here")
    return {key: decode(child, fetch) for key, child in value.items()}


def _read_pairs(content: Any, fetch: Fetch) -> list[tuple[Any, Any]]:
    return [(decode(key, fetch), decode(child, fetch)) for key, child in content]


def _read_default(content: Any, fetch: Fetch) -> defaultdict[Any, Any]:
    name, pairs = content
    return defaultdict(None if name is None else FACTORIES[name], _read_pairs(pairs, fetch))


def _read_parameter(content: Any, fetch: Fetch) -> nn.Parameter:
    return nn.Parameter(decode(content[0], fetch), requires_grad=content[1])


def _read_array(content: Any, fetch: Fetch) -> np.ndarray[Any, Any]:
    dtype, shape, raw = content
    return np.ndarray(shape, np.dtype(dtype), base64.b64decode(raw)).copy()


READERS: dict[str, Callable[[Any, Fetch], Any]] = {
    TENSOR: lambda content, fetch: fetch(str(content)),
    PARAMETER: _read_parameter,
    TUPLE: lambda content, fetch: tuple(decode(content, fetch)),
    SIZE: lambda content, fetch: torch.Size(content),
    SET: lambda content, fetch: set(decode(content, fetch)),
    FROZENSET: lambda content, fetch: frozenset(decode(content, fetch)),
    BYTES: lambda content, fetch: base64.b64decode(content),
    BYTEARRAY: lambda content, fetch: bytearray(base64.b64decode(content)),
    PATH: lambda content, fetch: Path(content),
    NAMESPACE: lambda content, fetch: argparse.Namespace(**decode(content, fetch)),
    DICT: lambda content, fetch: dict(_read_pairs(content, fetch)),
    ORDERED: lambda content, fetch: OrderedDict(_read_pairs(content, fetch)),
    COUNTER: lambda content, fetch: Counter(dict(_read_pairs(content, fetch))),
    DEFAULT: _read_default,
    ARRAY: _read_array,
    NUMPY: lambda content, fetch: np.ndarray((), np.dtype(content[0]), base64.b64decode(content[1]))[()],
    TORCH_VERSION: lambda content, fetch: TorchVersion(content),
}
"""The mark of an object with one key -> how to read what it holds."""
