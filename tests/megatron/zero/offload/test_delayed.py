"""An update that runs beside the next pass: the numbers are those of a loop whose gradients lack one step."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.optim.adam import AdamW
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero import GatheredParameters
from megatron.zero.api.engine import Engine
from megatron.zero.api.initialize import initialize
from megatron.zero.pass_coordinator import PassCoordinator
from megatron.zero.engine import ZeroEngine
from megatron.zero.hooks import Unit
from megatron.zero.update import DelayedOptimizerUpdate
from megatron.zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from mpu import groups
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.late_wire import late_wire
from tests.megatron.helpers import train as train_by_flags
from tests.megatron.zero.offload.test_equal import ROWS, batches, train
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, weights
from tests.wires import accelerator_side

STEPS, RATE = 6, 2e-3
DELAYED = {"offload_optimizer_device": "cpu", "delayed_param_update": True, "sub_group_size": 3072}


def built(world: int, **settings: Any) -> ZeroEngine:
    return gpt2_engine(configure_gpt2(batch_size=ROWS // world, global_batch_size=ROWS, **settings), groups.build(1))


def lagging(engine: ZeroEngine, rows: Tensor) -> list[float]:
    """The reference: every forward and backward is with the weights of one step ago, put into an exact engine."""
    dp, names = engine.groups.dp, [*weights(engine)]
    for group in engine.param_groups:
        group["lr"] = RATE
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
        engine.step()
    return losses


def put(engine: ZeroEngine, values: dict[str, Tensor], names: list[str] | None = None) -> None:
    """Behind the engine's back, as far as backwards are concerned: gradients stay."""
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.data.copy_(values[name])


def lives(rank: int, world: int, stage: int, optimizer: str) -> tuple[list[float], list[float], bool]:
    """The last step's weights are published while those of the step before are still on their way."""
    rows = batches(STEPS)
    with accelerator_side(), late_copy_streams(), late_wire():
        exact = built(world, zero_stage=1, optimizer=optimizer)
        wanted = lagging(exact, rows)
        engine = built(world, zero_stage=stage, optimizer=optimizer, **DELAYED)
        assert isinstance(engine.update, DelayedOptimizerUpdate)
        found = train(engine, rows)[::2]
        engine.finish_step()
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
    with accelerator_side(), late_copy_streams():
        for stage in (2, 3):
            engine = built(world, zero_stage=stage, offload_param_device="cpu" if stage == 3 else "none", **DELAYED)
            train(engine, rows[:2])
            assert engine.update.running is not None
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
            engine.finish_step()
            with GatheredParameters(weight):
                if bool((weight - 0.25).abs().max() > 0.0):
                    wrong.append("a setter")
            train(engine, rows[5:6])
            loss = gpt2_loss(engine, rows[6].chunk(world)[rank]).mean()
            engine.finish_step()  # the weights change between a forward and its backward
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


def looked_at(rank: int, world: int, stage: int, folder: Path) -> list[str]:
    """What is not of the last step, of an engine that was just given one."""
    rows, wrong = batches(5), []
    with accelerator_side(), late_copy_streams():
        one, other = (engine_of(world, zero_stage=stage, stage3_gather_16bit_weights_on_model_save=True)
                      for _ in range(2))
        for engine in (one, other):
            train(engine.core, rows[:2])
        one.finish_step()
        with torch.no_grad():
            losses = [gpt2_loss(engine.core, rows[4].chunk(world)[rank]).mean() for engine in (one, other)]
        if losses[0] != losses[1]:
            wrong.append("a forward without gradients")
        for engine in (one, other):
            train(engine.core, rows[2:3])
            engine.eval()
        one.finish_step()
        losses = [gpt2_loss(engine.core, rows[4].chunk(world)[rank]).mean() for engine in (one, other)]
        if losses[0] != losses[1]:
            wrong.append("a forward in eval mode")
        for engine in (one, other):
            engine.train()
            train(engine.core, rows[3:4])
        one.finish_step()
        states = [engine.module_state_dict() for engine in (one, other)]
        if not all(map(torch.equal, states[0].values(), states[1].values())) or rank == 0 and not states[0]:
            wrong.append("a state dict")
        for engine in (one, other):
            engine.destroy()
    return wrong


@pytest.mark.parametrize("world, stage", [(1, 1), (1, 3), (2, 2), (2, 3)])
def test_whoever_looks_at_the_weights_sees_those_of_the_last_step(tmp_path: Path, world: int, stage: int) -> None:
    assert run_ranks(looked_at, world, stage, tmp_path) == [[]] * world


def sums(tensor: bool) -> float:
    """Of the weights after three steps whose rate a scheduler moves while the update is held up."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    go, step = Event(), AdamW.step

    def held_up(rule: AdamW, *arguments: Any) -> bool:
        assert go.wait(60)
        return step(rule, *arguments)

    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2) if tensor else 1e-2)
    offload = {"device": "cpu", "delayed_param_update": True}
    engine, *_ = initialize(
        model=model, optimizer=optimizer, device=torch.device("cpu"), config={
            "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "offload_optimizer": offload}},
        lr_scheduler=lambda of: torch.optim.lr_scheduler.ExponentialLR(of, 0.1))
    with patch.object(AdamW, "step", held_up):
        for number in range(3):
            rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
            go.set()
            engine.backward(engine(rows).pow(2).mean())
            engine.finish_step()
            go.clear()
            engine.step()  # and the rate moves before the update begins
        go.set()
        engine.finish_step()
    return sum(parameter.double().sum().item() for parameter in engine.module.parameters())


def test_a_rate_that_is_a_tensor_is_that_of_its_step() -> None:
    with accelerator_side(), late_copy_streams():
        assert sums(tensor=True) == pytest.approx(sums(tensor=False), rel=1e-6)  # of which one is fp32


def test_the_trainer_goes_on_beside_an_update(tmp_path: Path) -> None:
    """And its evaluations do not."""
    beside: list[tuple[bool, bool]] = []
    before_forward = PassCoordinator.before_forward

    def noted(passes: PassCoordinator, unit: Unit) -> None:
        before_forward(passes, unit)
        if unit.is_root and not passes.in_backward:
            update, = made
            beside.append((torch.is_grad_enabled(), update.running is not None))

    made: list[DelayedOptimizerUpdate] = []
    begin = DelayedOptimizerUpdate.__init__

    def kept(update: DelayedOptimizerUpdate, *arguments: Any) -> None:
        begin(update, *arguments)
        made.append(update)

    flags = "--preset tiny --mock-data --train-iters 6 --eval-interval 3 --eval-iters 1 --batch-size 2 " \
            "--zero-stage 2 --offload-optimizer-device cpu --delayed-param-update --checkpoint-activations"
    with accelerator_side(), late_copy_streams(), patch.object(PassCoordinator, "before_forward", noted), \
            patch.object(DelayedOptimizerUpdate, "__init__", kept):
        train_by_flags(flags.split())
    training, evaluating = ([is_beside for learns, is_beside in beside if learns is which] for which in (True, False))
    assert training == [False, True, True, False, True, True] and evaluating and not any(evaluating)


def resumed(rank: int, world: int, folder: Path) -> bool:
    """A save completes the update; what goes on from there, here or in a new run, is the same."""
    rows = batches(6)
    with accelerator_side(), late_copy_streams():
        one, other = (engine_of(world) for _ in range(2))
        train(one.core, rows[:3])
        one.save_checkpoint(str(folder), tag="three")
        other.load_checkpoint(str(folder), tag="three")
        here, there = (train(engine.core, rows[3:]) for engine in (one, other))
        for engine in (one, other):
            engine.core.finish_step()
        same = here == there and all(map(torch.equal, weights(one.core).values(), weights(other.core).values()))
        for engine in (one, other):
            engine.destroy()
    return same


def engine_of(world: int, **settings: Any) -> Engine:
    grid = groups.build(1)
    config = configure_gpt2(**{"zero_stage": 2, "bf16": True, "batch_size": ROWS // world, "global_batch_size": ROWS,
                               **DELAYED, **settings})
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
        engine.finish_step()
        with patch.object(engine.rule, "step", side_effect=MemoryError("no room")):
            train(engine, rows[1:2])
            wait([engine.update.running])
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
