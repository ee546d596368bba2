"""Keys of a DeepSpeed file whose effect is in the engine of zero.initialize: cast inputs, cycled momentum."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.zero.hooks import iter_tensors, map_tensors


class Seen(nn.Module):
    """Remembers the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dtypes: list[torch.dtype] = []

    def forward(self, batch: tuple[Tensor, dict[str, Any]], *, weight: Tensor) -> Tensor:
        image, rest = batch
        self.dtypes = [image.dtype, rest["label"].dtype, rest["more"][0].dtype, weight.dtype]
        return self.linear(image.to(self.linear.weight.dtype)).sum()


@pytest.mark.parametrize("auto_cast", [False, True])
def test_auto_cast_casts_floating_point_inputs_wherever_they_are(auto_cast: bool) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "auto_cast": auto_cast}}
    model = Seen()
    engine = zero.initialize(model=model, config=config)[0]
    image, label = torch.ones(1, 2), torch.ones(1, dtype=torch.int64)
    for call in (engine, engine.forward):
        call((image, {"label": label, "more": [image.double()]}), weight=image)
        floats = [torch.float16] * 3 if auto_cast else [torch.float32, torch.float64, torch.float32]
        assert model.dtypes == [floats[0], torch.int64, *floats[1:]]
    assert image.dtype == torch.float32, "the caller's tensors are left alone"


@pytest.mark.parametrize(("kind", "expected"), [
    ("Adam", [(0.8, 0.99), (0.85, 0.99), (0.8, 0.99), (0.85, 0.99), (0.9, 0.99), (0.9, 0.99)]), ("SGD", [None] * 6)])
def test_one_cycle_moves_rate_and_momentum_of_the_engine(kind: str, expected: list[Any]) -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.03, "cycle_first_step_size": 2}
    config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 0.5}},
              "scheduler": {"type": "OneCycle", "params": params}}
    engine = zero.initialize(model=nn.Linear(2, 1), config=config)[0]
    rates, momentum = [], []
    for _ in expected:
        rates.append(engine.get_lr()[0])
        momentum.append(engine.core.param_groups[0].get("betas"))
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.02, 0.01, 0.01])
    assert momentum == [pair and pytest.approx(pair) for pair in expected]


# ---- tensors inside of arguments -------------------------------------------------------------------------------------

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
