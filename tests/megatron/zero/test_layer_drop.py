"""Progressive layer dropping as a DeepSpeed script has it: the keys, the names, what a model of one's own is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.layer_drop import kept
from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks

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


class Drawing(Model):
    """Asks for the step, and draws alike on every rank."""

    def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0,  # type: ignore[override]
                pld_step: int = 0) -> Tensor:
        scales = kept(7, pld_step, LAYERS, pld_theta) if progressive_layer_drop else dict.fromkeys(range(LAYERS), 1.0)
        for number, scale in scales.items():
            x = x + scale * torch.tanh(self.layers[number](x))
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


def trained(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    engine = made(Drawing(), stage, enabled=True, theta=0.3, gamma=0.5)
    step(engine, 8)
    with zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def test_a_model_that_draws_by_the_step_trains_alike_at_every_stage() -> None:
    expected = run_ranks(trained, 2, 0)[0]
    for stage in (1, 2, 3):
        for found in run_ranks(trained, 2, stage):
            assert all(found[name].equal(value) for name, value in expected.items())
