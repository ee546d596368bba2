"""A deep copy of a model that an engine trains, and one from a file, is a plain model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError
from tests.distributed import run_ranks
from tests.megatron.zero.models import WIDTH, Net


def from_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def taught(model: nn.Module) -> list[torch.Tensor]:
    """The loss and the gradients of a plain backward."""
    loss = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def all_copies(rank: int, world: int) -> list[str]:
    return [wrong for stage in (1, 3) for wrong in copies(world, stage)]


def copies(world: int, stage: int) -> list[str]:
    """What is wrong with them."""
    model = Net()
    engine: Any = zero.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})[0]

    def step() -> float:
        loss = engine(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    step()
    wrong = []
    with zero.GatheredParameters(list(model.parameters())):
        plain = Net()
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        made = {"copy": copy.deepcopy(model), "engine.module": copy.deepcopy(engine.module), "file": from_file(model)}
        block = copy.deepcopy(model.blocks[1])
    expected = taught(plain)
    made["copy of a copy"] = copy.deepcopy(made["copy"])
    for name, one in made.items():
        found = taught(one)
        wrong += [name] * (len(found) != len(expected) or not all(map(torch.equal, found, expected)))
    for a, b in zip(block.parameters(), plain.blocks[1].parameters(), strict=True):
        wrong += ["block"] * (not torch.equal(a, b))
    block(torch.ones(1, WIDTH)).sum().backward()
    made["copy"].load_state_dict(Net().state_dict())
    loss = step()  # the engine goes on
    wrong += ["engine"] * (loss != float(expected[0]))
    for refused in (copy.deepcopy, from_file) if stage == 3 and world > 1 else ():
        with pytest.raises(ConfigError, match=r"first\.weight.* cannot be used here"):
            refused(model)
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_a_deep_copy_is_a_plain_model(world: int) -> None:
    assert run_ranks(all_copies, world) == [[]] * world
