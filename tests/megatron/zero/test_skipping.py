"""A gradient that is not finite, without a loss scale: skipped now and then, not in the first steps, never silently."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import NumericsError
from megatron.zero.api.engine import Engine
from megatron.zero.step import SKIPS_IN_A_ROW, STRICT_STEPS
from mpu.groups import Groups
from tests.megatron.counting import on_the_accelerator_side
from tests.megatron.zero.run import configure, engine_around


@pytest.fixture(params=["cpu", "accelerator"])
def side(request: pytest.FixtureRequest) -> Iterator[str]:
    """On an accelerator the host learns of a step with the next one."""
    if request.param == "cpu":
        yield request.param
        return
    with on_the_accelerator_side():
        yield request.param


def made(**settings: object) -> Engine:
    torch.manual_seed(0)
    return engine_around(nn.Linear(4, 4), configure(bf16=True, **settings), Groups())


def step(engine: Engine, factor: float = 1.0) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    engine.backward(engine(x * factor).float().square().mean())
    engine.step()


def weights(engine: Engine) -> list[Tensor]:
    return [bucket.master.clone() for bucket in engine.core.buckets]


def test_after_the_first_steps_a_bad_gradient_is_skipped_and_said(side: str, capsys: pytest.CaptureFixture[str],
                                                                  ) -> None:
    engine = made()
    for _ in range(STRICT_STEPS):
        step(engine)
    before = weights(engine)
    step(engine, torch.inf)
    assert all(map(torch.equal, before, weights(engine)))
    assert (engine.skipped_steps, engine.applied_steps) == (1, STRICT_STEPS)
    engine.conclude()
    said = capsys.readouterr().err
    assert f"gradient norm is nan at step {STRICT_STEPS + 1}: first in " in said and "the step was skipped" in said
    step(engine)
    assert engine.applied_steps == STRICT_STEPS + 1 and not torch.equal(before[0], weights(engine)[0])


def test_so_many_in_a_row_end_the_run(side: str) -> None:
    engine = made()
    for _ in range(STRICT_STEPS):
        step(engine)
    for _ in range(2):
        for _ in range(SKIPS_IN_A_ROW):
            step(engine, torch.inf)
        step(engine)
    for _ in range(SKIPS_IN_A_ROW):
        step(engine, torch.inf)
    with pytest.raises(NumericsError, match=f"at step {STRICT_STEPS + 3 * SKIPS_IN_A_ROW + 3}: first in"):
        step(engine, torch.inf)
        engine.conclude()


@pytest.mark.parametrize(("settings", "good", "skips"), [({}, STRICT_STEPS - 1, 0), ({}, 0, 0),
                                                         ({"max_skipped_in_a_row": 0}, STRICT_STEPS + 5, 0),
                                                         ({"max_skipped_in_a_row": 2}, 0, 2)])
def test_the_first_steps_are_strict_unless_told_otherwise(side: str, settings: dict[str, int], good: int, skips: int,
                                                          ) -> None:
    engine = made(**settings)
    for _ in range(good):
        step(engine)
    for _ in range(skips):
        step(engine, torch.inf)
    with pytest.raises(NumericsError):
        step(engine, torch.inf)
        engine.conclude()
    assert engine.core.global_steps == good + skips + 1


def test_the_rate_of_a_schedule_waits_for_a_skipped_step(side: str) -> None:
    """The schedule counts steps that changed the weights, however late the host learns of them."""
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_type": "linear"}}}
    rates = []
    for bad in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
        for number in range(STRICT_STEPS + 4):
            if bad and number == STRICT_STEPS + 1:
                step(engine, torch.inf)
            step(engine)
        engine.conclude()
        rates.append((engine.get_lr(), weights(engine)))
    assert rates[0][0] == rates[1][0]
    assert all(map(torch.equal, rates[0][1], rates[1][1]))
