"""Keys of a DeepSpeed file in the engine of zero.initialize: their effects, and errors and notes in their words;
progressive layer dropping: the keys, the names, what a model of one's own is given."""

from __future__ import annotations

import math
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine


Pair = namedtuple("Pair", "one other")


@dataclass
class Record:
    x: Tensor


class Seen(nn.Module):
    """Remembers the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.dtypes: list[torch.dtype] = []

    def forward(self, batch: tuple[Tensor, UserDict[str, Any]], *, weight: Tensor) -> Tensor:
        image, rest = batch
        self.dtypes = [x.dtype for x in (image, rest["more"][0], weight, rest["pair"].one, rest["record"].x,
                                         rest["label"])]
        return self.linear(image.to(self.linear.weight.dtype)).sum()


@pytest.mark.parametrize("auto_cast", [False, True])
def test_auto_cast_casts_floating_point_inputs_wherever_they_are(auto_cast: bool) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": {"enabled": True, "auto_cast": auto_cast}}
    model = Seen()
    engine = zero.initialize(model=model, config=config)[0]
    image, label = torch.ones(1, 2), torch.ones(1, dtype=torch.int64)
    for call in (engine, engine.forward):
        call((image, UserDict(label=label, more=[image.double()], pair=Pair(image, 1), record=Record(image))),
             weight=image)
        assert model.dtypes == [*([torch.float16] * 5 if auto_cast else [
            torch.float32, torch.float64, *[torch.float32] * 3]), torch.int64]
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


# ---- errors and notes name keys --------------------------------------------------------------------------------------

KEYS = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def initialized(**keys: Any) -> zero.Engine:
    """Of a dict, at stage 3."""
    return zero.initialize(model=nn.Linear(8, 8), config={**KEYS, "zero_optimization": {"stage": 3, **keys}})[0]


def test_errors_name_keys_alone() -> None:
    for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        for more, told in (({}, f"{section}.device nvme needs {section}.nvme_path"),
                           ({"nvme_path": "/nowhere"}, f"{section}.nvme_path /nowhere: there is no such folder")):
            with pytest.raises(ConfigError) as caught:
                initialized(**{section.partition(".")[2]: {"device": "nvme", **more}})
            assert told in str(caught.value) and "--" not in str(caught.value)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zeros = {"stage": 3, "stage3_max_live_parameters": 1, "stage3_param_persistence_threshold": 0}
    engine = zero.initialize(model=model, config={**KEYS, "zero_optimization": zeros})[0]
    with pytest.raises(ConfigError, match="and zero_optimization.stage3_max_live_parameters is 1: raise it"):
        engine(torch.ones(1, 8))


def test_an_engine_names_the_keys_that_nothing_reads_once(capsys: pytest.CaptureFixture[str]) -> None:
    initialized(offload_optimizer={"nvme_path": "/x", "buffer_count": 5}, offload_param={"max_in_cpu": 0})
    there = "zero_optimization.offload_"
    assert [line for line in capsys.readouterr().out.splitlines() if "no effect" in line] == [
        f"config: {there}optimizer.nvme_path and {there}optimizer.buffer_count have no effect without "
        f"{there}optimizer.device nvme",
        f"config: {there}param.max_in_cpu has no effect without {there}param.device nvme"]


# ---- progressive layer dropping --------------------------------------------------------------------------------------


LAYERS = 4


class Model(nn.Module):
    """Takes what DeepSpeed gives, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.given: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.given.append(given)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Deaf(Model):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.layers[0](x).mean()


def made(model: nn.Module, stage: int = 0, accumulation: int = 1, **pld: Any) -> Engine:
    return zero.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"progressive_layer_drop": pld} if pld else {})})[0]


def step(engine: Engine, count: int = 1) -> None:
    for index in range(count):
        engine.backward(engine(torch.full((2, 6), 1.0 + index)))
        engine.step()


def test_the_forward_gets_theta_of_its_step_in_training_only() -> None:
    """Both micro-batches of a step get the same."""
    model = Model()
    engine = made(model, accumulation=2, enabled=True, theta=0.5, gamma=0.1)
    step(engine, 6)
    thetas = [0.5 * math.exp(-0.1 * count) + 0.5 for count in (0, 0, 1, 1, 2, 2)]
    assert model.given == [{"progressive_layer_drop": True, "pld_theta": theta} for theta in thetas]
    engine.eval()
    engine(torch.ones(2, 6))
    assert model.given[-1] == {}


def test_the_names_of_deepspeed_answer() -> None:
    engine = made(Model(), enabled=True, theta=0.5, gamma=0.1)
    step(engine, 3)
    last, now = (0.5 * math.exp(-0.1 * step) + 0.5 for step in (2, 3))
    assert engine.get_pld_theta() == pytest.approx(last)
    assert engine.progressive_layer_drop.get_theta() == pytest.approx(now)  # type: ignore[union-attr]
    assert engine.progressive_layer_drop.get_state() == {  # type: ignore[union-attr]
        "progressive_layer_drop": True, "pld_theta": pytest.approx(now)}
    assert engine.pld_enabled() and engine.pld_theta() == 0.5 and engine.pld_gamma() == 0.1
    assert engine.pld_params() == {"theta": 0.5, "gamma": 0.1}
    off = made(Model())
    assert off.progressive_layer_drop is None and off.get_pld_theta() is None
    assert off.pld_enabled() is False and off.pld_params() is False
    step(off)
    assert off.module.given == [{}]


def test_a_model_that_does_not_take_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        made(Deaf(), enabled=True, theta=0.5)
    assert str(caught.value).startswith("progressive_layer_drop.enabled: forward of Deaf takes no "
                                        "progressive_layer_drop and no pld_theta") and "\n" not in str(caught.value)
    step(made(Deaf()))
