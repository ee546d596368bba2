"""An update that runs beside the next pass: the numbers are those of a loop whose gradients lack one step."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.train.build import engine as build_engine
from megatron.train.build import model as build_model
from megatron.zero import GatheredParameters
from megatron.zero.api.engine import Engine
from megatron.zero.engine import ZeroEngine
from megatron.zero.update import DelayedUpdate
from megatron.zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from mpu import groups
from tests.distributed import run_ranks
from tests.late_ferry import late_ferry
from tests.megatron.zero.homes.test_equal import ROWS, batches, train
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, weights
from tests.wires import accelerator_side

STEPS, RATE = 6, 2e-3
DELAYED = {"offload_optimizer_device": "cpu", "delayed_param_update": True, "sub_group_size": 3072}


def built(world: int, **settings: Any) -> ZeroEngine:
    return gpt2_engine(configure_gpt2(batch_size=ROWS // world, global_batch_size=ROWS, **settings), groups.build(1))


def lagging(engine: ZeroEngine, rows: Tensor) -> list[float]:
    """The reference: every forward and backward is with the weights of one step ago, put into an exact engine."""
    dp, names = engine.groups.dp, [*weights(engine)]
    before: dict[str, Tensor] | None = None
    losses = []
    for batch in rows:
        newest = {name: value.clone() for name, value in weights(engine).items()}
        if before is not None:
            put(engine, before)
        loss = gpt2_loss(engine, batch.chunk(dp.size)[dp.rank]).mean()
        losses.append(engine.backward(loss).item())
        if before is not None:
            put(engine, newest, names)
        before = newest
        engine.step(RATE)
    return losses


def put(engine: ZeroEngine, values: dict[str, Tensor], names: list[str] | None = None) -> None:
    """Behind the engine's back, as far as backwards are concerned: gradients stay."""
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.data.copy_(values[name])


def lives(rank: int, world: int, stage: int, optimizer: str) -> tuple[list[float], list[float], bool]:
    rows = batches(STEPS)
    with accelerator_side(), late_ferry():
        exact = built(world, zero_stage=1, optimizer=optimizer)
        wanted = lagging(exact, rows)
        engine = built(world, zero_stage=stage, optimizer=optimizer, **DELAYED)
        assert isinstance(engine._step._update, DelayedUpdate)
        found = train(engine, rows)[::2]
        engine.conclude()
        same = all(map(torch.equal, weights(engine).values(), weights(exact).values()))
        engine.detach()
    return found, wanted, same


@pytest.mark.parametrize("world, stage, optimizer", [(1, 1, "adamw"), (1, 2, "adamw"), (1, 3, "adamw"), (2, 2, "adamw"),
                                                     (2, 3, "adamw"), (1, 2, "nadam")])
def test_gradients_are_of_the_weights_one_step_before(world: int, stage: int, optimizer: str) -> None:
    for found, wanted, same in run_ranks(lives, world, stage, optimizer):
        assert found == wanted and same


def finished(rank: int, world: int, folder: Path) -> list[str]:
    """What goes wrong where somebody needs the weights while an update is under way."""
    wrong = []
    rows = batches(8)
    with accelerator_side(), late_ferry():
        for stage in (2, 3):
            engine = built(world, zero_stage=stage, offload_param_device="cpu" if stage == 3 else "none", **DELAYED)
            train(engine, rows[:2])
            assert engine._step.has_update_under_way
            weight = engine.module.wpe.weight
            newest = safe_get_full_fp32_param(weight)
            with GatheredParameters(weight):  # those of the last step are lent
                if not torch.equal(newest, weight.float()):
                    wrong.append("a loan")
            train(engine, rows[2:4])
            with GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(0.5)
            train(engine, rows[4:5])
            if bool((safe_get_full_fp32_param(weight) - 0.5).abs().max() > 0.01):
                wrong.append("an edit")
            safe_set_full_fp32_param(weight, torch.full_like(newest, 0.25))
            engine.conclude()
            with GatheredParameters(weight):
                if bool((weight - 0.25).abs().max() > 0.0):
                    wrong.append("a setter")
            train(engine, rows[5:6])
            loss = gpt2_loss(engine, rows[6].chunk(world)[rank]).mean()
            engine.conclude()  # the weights change between a forward and its backward
            try:
                engine.backward(loss)
                wrong.append("a backward of other weights")
            except ConfigError:
                pass
            engine.detach()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_whoever_needs_the_weights_gets_those_of_the_last_step(tmp_path: Path, world: int) -> None:
    assert run_ranks(finished, world, tmp_path) == [[]] * world


def resumed(rank: int, world: int, folder: Path) -> bool:
    """A save completes the update; what goes on from there, here or in a new run, is the same."""
    rows = batches(6)
    with accelerator_side(), late_ferry():
        one, other = (engine_of(world) for _ in range(2))
        train(one.core, rows[:3])
        one.save_checkpoint(str(folder), tag="three")
        other.load_checkpoint(str(folder), tag="three")
        here, there = (train(engine.core, rows[3:]) for engine in (one, other))
        for engine in (one, other):
            engine.core.conclude()
        same = here == there and all(map(torch.equal, weights(one.core).values(), weights(other.core).values()))
        for engine in (one, other):
            engine.destroy()
    return same


def engine_of(world: int) -> Engine:
    grid = groups.build(1)
    config = configure_gpt2(zero_stage=2, bf16=True, batch_size=ROWS // world, global_batch_size=ROWS, **DELAYED)
    return build_engine(config, build_model(config, grid), grid, torch.device("cpu"))


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_goes_on_as_the_saved_one(tmp_path: Path, world: int) -> None:
    assert run_ranks(resumed, world, tmp_path) == [True] * world


def broken(rank: int, world: int) -> list[str]:
    """An update that fails: the next step says so, and nothing goes on from half of it."""
    found, rows = [], batches(3)
    with accelerator_side():
        engine = built(world, zero_stage=1, **DELAYED)
        train(engine, rows[:1])
        engine.conclude()
        with patch.object(engine.rule, "step_many", side_effect=MemoryError("no room")):
            train(engine, rows[1:2])
            wait([engine._step._update._under_way])
        for _ in range(2):
            try:
                train(engine, rows[2:])
            except (MemoryError, ConfigError) as error:
                found.append(str(error))
    return found


def test_an_update_that_fails_is_told(tmp_path: Path) -> None:
    (found,) = run_ranks(broken, 1)
    assert found[0] == "no room" and "ended half way" in found[1]


def test_where_it_can_do_nothing_a_note_says_so() -> None:
    engine = engine_of(1)
    assert any("--delayed-param-update has no effect here" in note for note in engine.notes)
    engine.destroy()
