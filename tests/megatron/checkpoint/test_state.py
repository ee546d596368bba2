"""What a client saves comes back exactly, types included, through text and tensors alone; the rest is refused."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from itertools import product
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from megatron import zero
from megatron.checkpoint.json_state import decode_state, encode_state
from megatron.checkpoint.safetensors_io import FileTensor
from megatron.errors import CheckpointError

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def there_and_back(value: Any) -> Any:
    items: list[FileTensor] = []
    text = json.dumps(encode_state(value, "client", items))
    tensors = {item.key: item.load() for item in items}
    return decode_state(json.loads(text), tensors.__getitem__)


VALUES = [
    None, True, 1, 2.5, "text", math.inf, [1, (2, [3, ()])], (1,), {"a": (1, {"b": [2]})},
    {1: "one", (2, 3): 4, "x": 5},
    {"$tensor": "mine", "$x": 1}, {"$tuple": [1]}, {"": 1}, {1, 2}, frozenset({"a"}), set(), b"\x00\xff", Path("a/b"),
    argparse.Namespace(lr=0.1, steps=(1, 2)), np.float32(0.1), np.int64(7), np.bool_(True), {None: 1, True: 2},
    np.str_(""), np.bytes_(b"a"), np.datetime64("2020-01-01"), np.longdouble(1) / 3, torch.Size([2, 3]),
    torch.__version__, OrderedDict([("b", 1), ("a", (2,))]), OrderedDict(), Counter("abba"), Counter({5: -1}),
    defaultdict(list, {"x": [1]}), defaultdict(None, {1: 2}), bytearray(b"\x00\xff"), bytearray(),
    {"$ordered": [], "$counter": 1}, [OrderedDict([(1, Counter())])],
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [2, 2, 4]).state_dict()]


def test_a_value_comes_back_as_it_was() -> None:
    for value in VALUES:
        found = there_and_back(value)
        assert repr(found) == repr(value) and found == value and type(found) is type(value)
        assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)


def test_tensors_and_parameters_come_back_as_such() -> None:
    found = there_and_back({"x": [(torch.arange(3), torch.ones((), dtype=torch.bfloat16))]})["x"][0]
    assert type(found) is tuple and torch.equal(found[0], torch.arange(3)) and found[1].dtype == torch.bfloat16
    for value in (nn.Parameter(torch.ones(2)), nn.Parameter(torch.arange(2), requires_grad=False)):
        found = there_and_back([value])[0]
        assert type(found) is nn.Parameter and torch.equal(found, value) and found.requires_grad == value.requires_grad


def test_tensors_whose_paths_look_alike_are_not_exchanged() -> None:
    def each(part: Any, change: Any) -> Any:
        if isinstance(part, dict):
            return {key: each(child, change) for key, child in part.items()}
        return [each(child, change) for child in part] if isinstance(part, list) else change(part)

    for value in ({"a": {"b": 1}, "a/b": 2}, {1: 1, "1": 2}, {"l": [1], "l/0": 2}, {"x": {1: 1}, "x/0: 1": 2},
                  {"a~1b": 1, "a/b": 2, "a": {"b": 3}}, {(1,): {"k": 1}, "(1,)": {"k": 2}, "(1,)/k": 3}):
        assert each(there_and_back(each(value, torch.tensor)), int) == value


def test_an_array_comes_back_with_shape_dtype_and_bits() -> None:
    for dtype, shape in product(["float64", "float16", "int8", "uint32", "bool", "complex64", ">i4", "<U3", "S2"],
                                [(), (0,), (3,), (2, 3)]):
        array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        found = there_and_back({"x": array[::-1] if array.ndim else array})["x"]
        np.testing.assert_array_equal(found, array[::-1] if array.ndim else array)
        assert found.dtype == array.dtype and found.shape == array.shape and found.flags.writeable


def kinds_of(*bases: type) -> Iterator[Any]:
    """An empty value of a class that is a kind of each base."""
    for base in bases:
        yield type(f"My{base.__name__}", (base,), {})()


class Pair(NamedTuple):
    x: int = 1
    y: int = 2


class Number(IntEnum):
    ONE = 1


class Color(Enum):
    RED = 1


@dataclass
class Record:
    x: int = 1


REFUSED = [
    object(), nn.Linear(1, 1), np.array([None]), {"deep": [len]}, Record(), Pair(), Number.ONE, Color.RED,
    datetime(2020, 1, 1), timedelta(1), Decimal(1), 1j, range(3), deque([1]), defaultdict(lambda: 1), time.gmtime(0),
    MappingProxyType({"a": 1}), PurePosixPath("a"), PureWindowsPath("a"), torch.ones(1, dtype=torch.complex64),
    torch.ones(2).to_sparse(), np.ma.masked_array([1, 2], [True, False]), np.ones(1).view(np.recarray),
    np.array([(1,)], "i4,"),
    *kinds_of(dict, list, tuple, set, frozenset, str, int, float, bytes, bytearray, OrderedDict, Counter, defaultdict,
              argparse.Namespace), nn.Parameter(torch.ones(1)).as_subclass(type("Mine", (torch.Tensor,), {})),
    {Number.ONE: 1}, {Pair(): 1}, {next(kinds_of(str)): 1}, {Number.ONE},
]


def test_anything_else_is_refused_by_its_path() -> None:
    for value in REFUSED:
        with pytest.raises(CheckpointError, match=r"^state client/mine[^\n]*: [^\n]*; save [^\n]+$"):
            encode_state({"mine": value}, "client", [])
    for value, instead in ((Pair(), "tuple"), (Number.ONE, "int"), (next(kinds_of(Counter)), "dict")):
        said = rf"^state client/a/0: a value of type \w+ would not .*; save {instead}\(\.\.\.\)"
        with pytest.raises(CheckpointError, match=said):
            encode_state({"a": [value]}, "client", [])


def test_random_states_go_through_a_checkpoint_as_megatron_saves_them(tmp_path: Path) -> None:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    state = {"iteration": np.int64(3), "random_rng_state": random.getstate(),
             "np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state(),
             "args": argparse.Namespace(lr=1e-3, split=(1, 2))}
    wanted = random.random(), np.random.rand(), torch.rand(1)
    engine = zero.initialize(model=nn.Linear(1, 1), config=CONFIG)[0]
    engine.save_checkpoint(tmp_path, client_state=state)
    found: Any = engine.load_checkpoint(tmp_path)[1]
    random.setstate(found["random_rng_state"])
    np.random.set_state(found["np_rng_state"])
    torch.set_rng_state(found["torch_rng_state"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == wanted
    assert found["args"] == state["args"] and found["iteration"] == 3
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".json", ".safetensors", ".py", ""}
