"""Weights as a state dict, from an engine and into one: of every stage, given on one rank or on all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from tests.covering import pairs
from tests.distributed import on_ranks
from tests.megatron.zero.small import WIDTH, Model, engine_of


def model_with_buffer(seed: int) -> nn.Module:
    model = Model()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.register_buffer("scale", torch.tensor(float(seed)))
    return model


def made(stage: int, seed: int, bf16: bool = False) -> Engine:
    return engine_of(stage, model_with_buffer(seed), precision="bf16" if bf16 else "fp32", lr=0.03,
                     stage3_gather_16bit_weights_on_model_save=True)


def train(engine: Engine) -> float:
    x = torch.ones(2, WIDTH, dtype=engine.working_dtype)
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize("stage, bf16", pairs(range(4), [False, True], each=1))
@on_ranks(2)
def test_what_state_dict_gave_is_taken_at_every_stage(rank: int, world: int, stage: int, bf16: bool) -> None:
    giver, taker = made(stage, 1, bf16), made(stage, 2 + rank, bf16)
    for engine in (giver, taker):
        train(engine)
    state = giver.state_dict()
    taker.load_state_dict(state)
    again = made(stage, 3)
    again.load_module_state_dict({name.removeprefix("module."): value for name, value in state.items()}
                                 if rank == 0 else {})
    loaded = again.module_state_dict()  # collective where it is gathered, and of rank 0
    assert float(taker.module.scale) == 1.0, "buffers come along, on every rank"
    given = float(giver(torch.ones(2, WIDTH, dtype=giver.working_dtype)).detach())
    assert train(taker) == given, "the same weights give the same loss"
    assert train(taker) < given, "they are trained on: the masters are the new weights, too"
    assert all(torch.equal(loaded[name.removeprefix("module.")].float(), value.float())
               for name, value in state.items() if rank == 0)
    assert train(again) > train(again)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(rank: int, world: int, stage: int) -> None:
    engine = made(stage, 1)
    good = {name: value.clone() for name, value in engine.state_dict().items()}
    other = {name: value + 1 for name, value in good.items()}
    first = train(made(stage, 1))
    for bad, told in (({"module.head.weight": torch.zeros(1, WIDTH)}, "names are missing, blocks.0.bias first"),
                      ({}, "an empty state dict on the first data parallel rank"),
                      ({**other, "module.head.bias": torch.zeros(3)},
                       r"head.bias has shape \[3\] in the state dict, and shape \[1\] in the model"),
                      ({**other, "module.three": torch.zeros(3)}, "not the model's, three first")):
        with pytest.raises(ConfigError, match=told):
            engine.load_state_dict(bad if rank == 0 else good)
    assert train(engine) == first, "nothing was changed, and the engine goes on"


LOANS: dict[str, tuple[str, str]] = {
    "raises": ("^in the middle of an edit$", "ValueError: in the middle of an edit"),
    "reads": ("head.weight was edited", "head.weight was edited"),
    "shape": ("head.weight became a tensor", "head.weight became a tensor"),
    "dtype": ("head.weight became a tensor", "head.weight became a tensor"), "assigns": ("", "")}
"""What rank 0 does in a loan, and what is said there and on the other rank."""


@pytest.mark.parametrize("what, stage", pairs([*LOANS], [0, 1, 3], each=1))
@on_ranks(2)
def test_what_one_rank_does_in_a_loan_ends_it_on_all(rank: int, world: int, stage: int, what: str) -> None:
    engine = made(stage, 1, bf16=True)
    weight = engine.module.head.weight

    def lend() -> None:
        with zero.GatheredParameters([weight, engine.module.head.bias], None if what == "reads" else 0):
            if rank == 0 and what == "raises":
                weight.fill_(2.0)
                raise ValueError("in the middle of an edit")
            if rank == 0 and what == "reads":
                torch.no_grad()(weight.fill_)(2.0)
            if rank == 0 and what == "shape":
                weight.data = torch.ones(2, 2)
            if rank == 0 and what == "dtype":
                weight.data = weight.data.double()
            if rank == 0 and what == "assigns":
                weight.data = torch.full_like(weight, 2.0)

    if what == "assigns":
        lend()
    else:
        with pytest.raises((ConfigError, ValueError), match=LOANS[what][rank]):
            lend()
    wanted = model_with_buffer(1).head.weight.bfloat16() if what != "assigns" else torch.full((1, WIDTH), 2.0)
    with zero.GatheredParameters(weight):
        assert torch.equal(weight.float(), wanted.float())
    train(engine)
