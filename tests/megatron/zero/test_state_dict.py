"""Weights as a state dict, from an engine and into one: of every stage, given on one rank or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.zero.small import WIDTH, Model, engine_of


def model_with_buffer(seed: int) -> nn.Module:
    model = Model()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.register_buffer("scale", torch.tensor(float(seed)))
    return model


def made(stage: int, seed: int, bf16: bool = False) -> Engine:
    return engine_of(stage, model_with_buffer(seed), precision="bf16" if bf16 else "fp32", lr=1e-3,
                     stage3_gather_16bit_weights_on_model_save=True)


def train(engine: Engine) -> float:
    x = torch.ones(2, WIDTH, dtype=engine.working_dtype)
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
    return ([float(giver(torch.ones(2, WIDTH, dtype=giver.working_dtype)).detach())], [train(taker) for _ in range(2)],
            [train(again)])


@pytest.mark.parametrize("stage, world, bf16", pairs(range(4), [1, 2], [False, True]))
def test_what_state_dict_gave_is_taken_at_every_stage(world: int, stage: int, bf16: bool) -> None:
    for given, taken, again in run_ranks(carried_over, world, stage, bf16):
        assert taken[0] == given[0], "the same weights give the same loss"
        assert taken[1] < taken[0], "they are trained on: the masters are the new weights, too"
        assert again[0] == pytest.approx(given[0], rel=2e-2 if bf16 else 1e-6)


def refused(rank: int, world: int, stage: int) -> list[str]:
    engine, found = made(stage, 1), []
    good = {name: value.clone() for name, value in engine.state_dict().items()}
    other = {name: value + 1 for name, value in good.items()}
    first = train(made(stage, 1))
    for bad in ({"module.head.weight": torch.zeros(1, WIDTH)}, {}, {**other, "module.head.bias": torch.zeros(3)},
                {**other, "module.three": torch.zeros(3)}):
        with pytest.raises(ConfigError) as error:
            engine.load_state_dict(bad if rank == 0 else good)
        found.append(str(error.value))
    assert train(engine) == first, "nothing was changed, and the engine goes on"
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(stage: int) -> None:
    mine, theirs = run_ranks(refused, 2, stage)
    assert mine == theirs
    reasons = ("names are missing, blocks.0.", "an empty state dict on the first data parallel rank",
               "head.bias has shape [3] in the state dict, and shape [1] in the model", "not the model's, three first")
    for text, expected in zip(mine, reasons, strict=True):
        assert expected in text


def lent(rank: int, world: int, stage: int, spoil: str) -> list[Any]:
    """What a loan ends with that rank 0 (or nobody) spoils: its error, and the weights after it."""
    engine = made(stage, 1, bf16=True)
    weight, errors = engine.module.head.weight, []
    try:
        with zero.GatheredParameters([weight, engine.module.head.bias], None if spoil == "reads" else 0):
            if rank == 0 and spoil == "raises":
                weight.fill_(2.0)
                raise ValueError("in the middle of an edit")
            if rank == 0 and spoil == "reads":
                torch.no_grad()(weight.fill_)(2.0)
            if rank == 0 and spoil == "shape":
                weight.data = torch.ones(2, 2)
            if rank == 0 and spoil == "assigns":
                weight.data = torch.full_like(weight, 2.0)
    except (ConfigError, ValueError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    with zero.GatheredParameters(weight):
        after = weight.float().flatten().tolist()
    train(engine)
    return [errors, after]


@pytest.mark.parametrize("spoil, stage", pairs(["raises", "reads", "shape", "assigns"], [0, 1, 3], each=1))
def test_what_one_rank_does_in_a_loan_ends_it_on_all(stage: int, spoil: str) -> None:
    before = model_with_buffer(1).head.weight.bfloat16().float().flatten().tolist()
    (mine, after), (theirs, other) = run_ranks(lent, 2, stage, spoil)
    assert after == other == ([2.0] * WIDTH if spoil == "assigns" else before)
    if spoil == "raises":
        assert mine == ["ValueError: in the middle of an edit"] and "ValueError: in the middle" in theirs[0]
    elif spoil == "assigns":
        assert mine == theirs == []
    else:
        sentence = {"reads": "head.weight was edited", "shape": "head.weight became a tensor"}[spoil]
        assert mine == theirs and sentence in mine[0]
