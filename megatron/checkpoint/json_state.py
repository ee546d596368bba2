"""Nested Python state as JSON plus a list of tensors, and back with exact types. No pickle.

A value that JSON cannot express becomes an object with one key that begins with `$` (`{"$tensor": key}`, tuples, sets,
bytes, paths, numpy arrays, ...). Subclasses of these types (a namedtuple, an IntEnum) are refused, with their path in
the state.
"""

from __future__ import annotations

import argparse
import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megatron.checkpoint.safetensors_io import DTYPE_NAMES, FileTensor
from megatron.errors import CheckpointError

# Supported factories of a defaultdict.
DEFAULT_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set, bytes)}
# Base types suggested for saving an instance of a subclass.
SAVABLE_BASES = frozenset({dict, list, tuple, set, frozenset, str, int, float, bytes, bytearray})
ReadTensor = Callable[[str], Tensor]  # path -> tensor


def encode_state(value: Any, path: str, items: list[FileTensor]) -> Any:
    """`value` as JSON; its tensors are appended to `items` with their paths as keys."""
    kind = type(value)  # exact: a subclass would come back as its base
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is Tensor:
        return _encode_tensor(value, path, items)
    if kind is list:
        return _encode_sequence(value, path, items)
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode_state(child, f"{path}/{_escape_key(key)}", items) for key, child in value.items()}
    codec = CODECS.get(np.generic if isinstance(value, np.generic) else kind)  # numpy scalars have many types
    if codec is not None:
        return {codec.mark: codec.encode(value, path, items)}
    base = next((base for base in kind.__mro__ if base in SAVABLE_BASES), None)
    instead = "what it is made of, such as its state_dict()" if base is None else f"{base.__name__}(...) of it"
    raise CheckpointError(
        f"state {path}: a value of type {kind.__name__} would not come back as it was: a checkpoint holds JSON "
        "values, tensors, parameters, tuples, sets, bytes, OrderedDicts, Counters, defaultdicts, paths, Namespaces and "
        f"NumPy's arrays and numbers; save {instead}")


def _encode_tensor(value: Tensor, path: str, items: list[FileTensor]) -> Any:
    if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
        raise CheckpointError(f"state {path}: a checkpoint holds no tensor of {value.dtype}, {value.layout}; save "
                              "dense ones that it is made of, such as torch.view_as_real(...) or .coalesce().values()")
    items.append(FileTensor(path, value.dtype, tuple(value.shape), partial(Tensor.detach, value)))
    return {"$tensor": path}


def _encode_pairs(value: Mapping[Any, Any], path: str, items: list[FileTensor]) -> list[Any]:
    pairs = enumerate(value.items())  # keys 1 and "1" differ: their index keeps the paths apart
    return [[encode_state(key, f"{path}/key {i}", items),
             encode_state(child, f"{path}/{i}: {_escape_key(str(key))}", items)] for i, (key, child) in pairs]


def _escape_key(key: str) -> str:
    """A key as one path component: paths must be unique, since tensors are stored by them."""
    return key.replace("~", "~0").replace("/", "~1")


def _encode_defaultdict(value: defaultdict[Any, Any], path: str, items: list[FileTensor]) -> Any:
    name = getattr(value.default_factory, "__name__", None)
    if value.default_factory is not (None if name is None else DEFAULT_FACTORIES.get(name)):
        raise CheckpointError(f"state {path}: what the defaultdict makes would be lost, {value.default_factory!r}, as "
                              "it is neither None nor a built-in type; save dict(...) of it")
    return [name, _encode_pairs(value, path, items)]


def _encode_sequence(value: Iterable[Any], path: str, items: list[FileTensor]) -> list[Any]:
    # Sort sets, so that the file does not differ from run to run.
    members = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return [encode_state(child, f"{path}/{index}", items) for index, child in enumerate(members)]


def _numpy_dtype(value: np.ndarray[Any, Any] | np.generic, path: str) -> str:
    dtype = value.dtype
    if dtype.hasobject or dtype.fields or np.dtype(dtype.str) != dtype:
        raise CheckpointError(f"state {path}: an array of {dtype} holds more than numbers; save its parts")
    return dtype.str


def _base64(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode("ascii")


def decode_state(value: Any, fetch: ReadTensor) -> Any:
    """The inverse of `encode_state`."""
    if isinstance(value, list):
        return [decode_state(child, fetch) for child in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (mark := next(iter(value))) in DECODERS:
        return DECODERS[mark](value[mark], fetch)
    if unknown := [key for key in value if key.startswith("$")]:
        raise ValueError(f"{unknown[0]!r:.40} marks nothing that is known here")
    return {key: decode_state(child, fetch) for key, child in value.items()}


def _decode_pairs(content: Any, fetch: ReadTensor) -> list[tuple[Any, Any]]:
    return [(decode_state(key, fetch), decode_state(child, fetch)) for key, child in content]


class Codec(NamedTuple):
    """How a value of one exact type (no subclass) becomes `{mark: JSON}`, and back."""

    mark: str
    encode: Callable[[Any, str, list[FileTensor]], Any]
    decode: Callable[[Any, ReadTensor], Any]


CODECS: dict[type, Codec] = {
    nn.Parameter: Codec("$parameter", lambda value, path, items: [_encode_tensor(value, path, items),
                                                                  value.requires_grad],
                        lambda content, fetch: nn.Parameter(decode_state(content[0], fetch), requires_grad=content[1])),
    tuple: Codec("$tuple", _encode_sequence, lambda content, fetch: tuple(decode_state(content, fetch))),
    set: Codec("$set", _encode_sequence, lambda content, fetch: set(decode_state(content, fetch))),
    frozenset: Codec("$frozenset", _encode_sequence, lambda content, fetch: frozenset(decode_state(content, fetch))),
    dict: Codec("$dict", _encode_pairs, lambda content, fetch: dict(_decode_pairs(content, fetch))),
    OrderedDict: Codec("$ordered", _encode_pairs, lambda content, fetch: OrderedDict(_decode_pairs(content, fetch))),
    Counter: Codec("$counter", _encode_pairs, lambda content, fetch: Counter(dict(_decode_pairs(content, fetch)))),
    defaultdict: Codec("$default", _encode_defaultdict, lambda content, fetch: defaultdict(
        None if content[0] is None else DEFAULT_FACTORIES[content[0]], _decode_pairs(content[1], fetch))),
    argparse.Namespace: Codec("$namespace", lambda value, path, items: encode_state(vars(value), path, items),
                              lambda content, fetch: argparse.Namespace(**decode_state(content, fetch))),
    bytes: Codec("$bytes", lambda value, *_: _base64(value), lambda content, _: base64.b64decode(content)),
    bytearray: Codec("$bytearray", lambda value, *_: _base64(value),
                     lambda content, _: bytearray(base64.b64decode(content))),
    type(Path()): Codec("$path", lambda value, *_: str(value), lambda content, _: Path(content)),
    torch.Size: Codec("$size", lambda value, *_: [*value], lambda content, _: torch.Size(content)),
    TorchVersion: Codec("$torch_version", lambda value, *_: str(value), lambda content, _: TorchVersion(content)),
    np.ndarray: Codec("$array", lambda value, path, _: [_numpy_dtype(value, path), list(value.shape),
                                                        _base64(np.ascontiguousarray(value).tobytes())],
                      lambda content, _: np.ndarray(content[1], np.dtype(content[0]),
                                                    base64.b64decode(content[2])).copy()),
    np.generic: Codec("$numpy", lambda value, path, _: [_numpy_dtype(value, path), _base64(value.tobytes())],
                      lambda content, _: np.ndarray((), np.dtype(content[0]), base64.b64decode(content[1]))[()])}

DECODERS: dict[str, Callable[[Any, ReadTensor], Any]] = {
    "$tensor": lambda content, fetch: fetch(str(content)),
    **{codec.mark: codec.decode for codec in CODECS.values()}}
