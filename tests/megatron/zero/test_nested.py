"""Tensors are found, and changed, wherever what a module is given or returns nests them."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zero.hooks import iter_tensors, map_tensors

Pair = namedtuple("Pair", "one other")


@dataclass
class Record:
    one: Any
    name: str = "record"


x = torch.zeros(2)


@pytest.mark.parametrize("value", [x, (x,), [x], Pair(1, x), {"x": x}, UserDict(x=x), Record(x),
                                   {"a": [UserDict(x=(x,))]}])
def test_a_tensor_is_found_and_changed_in_a_copy_of_the_same_kind(value: Any) -> None:
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert type(changed) is type(value)
    for found, wanted in ((value, x), (changed, x + 1)):
        assert [tensor.tolist() for tensor in iter_tensors(found)] == [wanted.tolist()]


def test_other_things_are_handed_on() -> None:
    value = [None, 3, "word", Tensor]
    assert map_tensors(value, lambda tensor: tensor + 1) == value and not [*iter_tensors(value)]
