"""Weights as a state dict, from an engine and into one: of every stage, given on one rank or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from tests.distributed import run_ranks


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.tensor(float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.two(torch.tanh(self.one(x))) * self.scale).square().mean()


def made(stage: int, seed: int, bf16: bool = False) -> Engine:
    section = {"stage": stage, "stage3_param_persistence_threshold": 0,
               "stage3_gather_16bit_weights_on_model_save": True}
    found: Engine = zero.initialize(model=Model(seed), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": section, "bf16": {"enabled": bf16}})[0]
    return found


def train(engine: Engine) -> float:
    x = torch.ones(2, 5, dtype=engine.working_dtype)
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def carried_over(rank: int, world: int, stage: int, bf16: bool) -> tuple[list[float], ...]:
    """Losses of the engine that gave its weights, and of one that took them."""
    giver, taker = made(stage, 1, bf16), made(stage, 2 + rank, bf16)
    for _ in range(3):
        train(giver)
        train(taker)
    state = giver.state_dict()
    taker.load_state_dict(state)
    again = made(stage, 3)
    again.load_module_state_dict({name.removeprefix("module."): value for name, value in state.items()}
                                 if rank == 0 else {})
    assert float(taker.module.scale) == 1.0, "buffers come along, on every rank"
    return ([float(giver(torch.ones(2, 5, dtype=giver.working_dtype)).detach())], [train(taker) for _ in range(2)],
            [train(again)])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_what_state_dict_gave_is_taken_at_every_stage(world: int, stage: int, bf16: bool) -> None:
    for given, taken, again in run_ranks(carried_over, world, stage, bf16):
        assert taken[0] == given[0], "the same weights give the same loss"
        assert taken[1] < taken[0], "they are trained on: the masters are the new weights, too"
        assert again[0] == pytest.approx(given[0], rel=2e-2 if bf16 else 1e-6)


def refused(rank: int, world: int, stage: int) -> list[str]:
    engine, found = made(stage, 1), []
    good = {name: value.clone() for name, value in engine.state_dict().items()}
    first = train(engine)
    for bad in ({"one.weight": torch.zeros(7, 5)}, {}, {**good, "one.bias": torch.zeros(3)}):
        with pytest.raises(ConfigError) as error:
            engine.load_state_dict(bad if rank == 0 else good)
        found.append(str(error.value))
    engine.load_state_dict(good)
    assert train(engine) == first, "the engine goes on"
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_what_does_not_fit_is_an_error_on_every_rank(stage: int) -> None:
    mine, theirs = run_ranks(refused, 2, stage)
    assert mine == theirs
    reasons = ("Missing key", "an empty state dict on the first data parallel rank", "size mismatch")
    for text, expected in zip(mine, reasons, strict=True):
        assert expected in text


def edited_and_failed(rank: int, world: int) -> list[float]:
    engine = made(3, 1)
    with pytest.raises(ValueError if rank == 0 else pytest.fail.Exception):
        with zero.GatheredParameters(engine.module.one.weight, modifier_rank=0):
            if rank == 0:
                engine.module.one.weight.fill_(2.0)
                raise ValueError("in the middle of an edit")
        pytest.fail("this rank saw nothing of it")
    with zero.GatheredParameters(engine.module.one.weight):
        kept: Any = engine.module.one.weight.flatten().tolist()
    train(engine)
    return list(kept)


def test_an_error_inside_of_gathered_parameters_on_one_rank_leaves_the_others_nothing_to_wait_for() -> None:
    assert run_ranks(edited_and_failed, 2) == [[2.0] * 35] * 2
