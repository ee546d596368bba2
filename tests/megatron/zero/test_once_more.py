"""What is called a second time: after an error that the caller caught, or because nobody remembers the first time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.utils import safe_get_full_fp32_param
from tests.distributed import run_ranks
from tests.megatron.zero.test_edits import engine_of, step


@pytest.mark.parametrize("stage", (0, 3))
def test_an_engine_is_destroyed_once(stage: int) -> None:
    engine = engine_of(stage, "bf16")
    step(engine)
    engine.destroy()
    model = engine.module
    second = engine_of(stage, "bf16", model)
    engine.destroy()
    step(second)
    second.destroy()


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.unused(self.used(x)) if both else self.used(x)).sum()


def refused(rank: int, world: int) -> list[bool]:
    engine = engine_of(2, "fp32", Half(), ignore_unused_parameters=False)
    said = []
    for both in (False, True):
        engine.backward(engine(torch.ones(2, 4), both or rank == 0))
        for _ in range(3):
            try:
                engine.step()
            except ConfigError as error:
                said.append("got no gradient" in str(error))
            else:
                break
    return [*said, engine.global_steps == 1]


def test_a_step_without_all_gradients_is_refused_until_another_backward() -> None:
    assert run_ranks(refused, 2) == [[True] * 4] * 2


@pytest.mark.parametrize("work", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_what_the_optimizer_has_is_the_same_until_a_loan_ends(stage: int, work: str) -> None:
    engine = engine_of(stage, work)
    weight = engine.module.head.weight
    before = safe_get_full_fp32_param(weight)
    with zero.GatheredParameters([weight], modifier_rank=0):
        weight.fill_(0.5)
        within = safe_get_full_fp32_param(weight)
    after = safe_get_full_fp32_param(weight)
    assert before is not None and within is not None and torch.equal(within, before)
    assert after is not None and torch.equal(after, torch.full_like(after, 0.5))
