"""Beside an accelerator: nothing on the host meets what is on the device, and in passes and steps nobody waits for a
copy but where that is the point."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero import utils
from megatron.zero.api.engine import Engine
from megatron.zero.api.init import GatheredParameters, Init
from megatron.zero.api.initialize import initialize
from mpu import groups
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero.offload.test_equal import storages
from tests.megatron.zero.run import configure_gpt2
from tests.two_sides import DEVICE, Sides, two_sides

PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True},
                                         "fp16": {"fp16": True, "initial_loss_scale": 1024.0}}
RULES = ("adamw", "lamb", "lion", "nadam")

REASONS = {
    "mpu/device.py:HostScalars.values: tolist":
        "on a GPU it comes by a copy with an event; an update on the host begins with the factor",
    "megatron/zero/offload/storage.py:StoredShard.write: copy_ from device to host":
        "updated on the device, and at work from a drive: its tiles are written from the host",
    "megatron/zero/update.py:OptimizerUpdate._reduce_slot_values: to the device":
        "Lamb's sums over ranks, by the wire of the device",
    "megatron/zero/update.py:OptimizerUpdate._reduce_slot_values: to the host":
        "Lamb's sums over ranks, by the wire of the device",
}
"""What may make somebody wait in a forward, a backward or a step."""


def cases(folder: Path, world: int) -> Iterator[dict[str, Any]]:
    """Settings: stage x precision x home, each with one of the rules; half of two ranks are tensor parallel."""
    number = 0
    for stage, precision in product((1, 2, 3), PRECISIONS):
        for storage in storages(folder, stage, number, True).values():
            tp = 1 + number % 2 * (world - 1)
            yield {"zero_stage": stage, **PRECISIONS[precision], **storage, "optimizer": RULES[number % 4],
                   "model_parallel_size": tp, "batch_size": 2, "vocab_size": 64,
                   "global_batch_size": 2 * (world // tp) * (1 + number // 4 % 2),
                   "checkpoint_activations": number % 3 == 1, "max_skipped_in_a_row": 3,
                   "stage3_gather_16bit_weights_on_model_save": True}
            number += 1


def up_to_the_last_backward(engine: Engine, rows: Tensor) -> None:
    for number, part in enumerate(rows.chunk(engine.core.accumulation_steps)):
        if number:
            engine.step()
        engine.backward(engine(part[:, :-1], part[:, 1:], grad_scale=engine.core.backward_scale).mean())


def step(engine: Engine, rows: Tensor) -> None:
    up_to_the_last_backward(engine, rows)
    engine.step()


def life(engine: Engine, rows: Tensor, sides: Sides, folder: Path) -> list[str]:
    """All that is done with an engine; returns what made somebody wait in passes and a step."""
    step(engine, rows)
    step(engine, rows)  # in these two the engine compares what it has with what it was (units.py)
    with sides.watched() as waits:
        step(engine, rows)
    with torch.no_grad():
        engine.eval()(rows[:1, :-1], rows[:1, 1:])
        engine.train()
    parameters = [*engine.module.parameters()]
    up_to_the_last_backward(engine, rows)
    for parameter in (parameters[0], parameters[-1]):
        get_and_set(sides, parameter, engine.core.rule.states)
    engine.step()
    engine.save_checkpoint(folder)
    with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)
    step(engine, rows)
    engine.load_checkpoint(folder)
    if engine.groups.tp.is_solo:
        engine.load_module_state_dict(engine.module_state_dict())
    skipped(engine, rows, parameters[0])
    engine.offload_states()
    engine.reload_states()
    engine.save_16bit_model(folder)
    step(engine, rows)
    engine.destroy()
    return waits


def get_and_set(sides: Sides, parameter: nn.Parameter, states: tuple[str, ...]) -> None:
    """With each function of utils; values are taken from either side."""
    things = [("grad", ()), ("fp32_param", ()), *(("optimizer_state", (state,)) for state in states)]
    for of, (thing, key) in product(("full", "local"), things):
        value = getattr(utils, f"safe_get_{of}_{thing}")(parameter, *key)
        assert sides.of(value) == "device"
        for given in (value, value.cpu()):
            getattr(utils, f"safe_set_{of}_{thing}")(parameter, given, *key)


def skipped(engine: Engine, rows: Tensor, parameter: nn.Parameter) -> None:
    """A step that a gradient spoils."""
    before = engine.skipped_steps
    up_to_the_last_backward(engine, rows)
    grad = utils.safe_get_full_grad(parameter)
    assert grad is not None
    utils.safe_set_full_grad(parameter, torch.full_like(grad, float("inf")))
    engine.step()
    assert engine.skipped_steps == before + 1


def lives(rank: int, world: int, folder: Path, number: slice) -> list[str]:
    found = []
    for case in [*cases(folder / "drive", world)][number]:
        try:
            with two_sides() as sides:
                config = configure_gpt2(**case)
                grid = groups.build(config.parallel.model_parallel_size)
                engine = build_engine(config, build_model(config, grid), grid, DEVICE)
                assert engine.device == DEVICE
                rows = torch.randint(64, (2 * engine.core.accumulation_steps, 9), device=DEVICE)
                waits = {*life(engine, rows, sides, folder / "saved")} - REASONS.keys()
            found += [f"{case}: {wait}" for wait in sorted(waits)]
        except Exception as error:
            found.append(f"{case}: {type(error).__name__}: {error}")
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("world, number", [(1, slice(None)), (2, slice(None)), (2, slice(5, None, 13))], ids=str)
def test_sides_do_not_mix_and_nobody_waits(tmp_path: Path, world: int, number: slice) -> None:
    (tmp_path / "drive").mkdir()
    assert run_ranks(lives, world, tmp_path, number, timeout=900) == [[]] * world


# -- before there is an engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [DEVICE, torch.device("cpu")], ids=["on device", "on host"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
@on_ranks(1)
def test_parameters_that_wait_may_be_on_either_side(rank: int, world: int, tmp_path: Path, place: str,
                                                    device: torch.device) -> None:
    home = {"device": place, "nvme_path": str(tmp_path)}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 3, "offload_param": home, "offload_optimizer": home}}
    with two_sides():
        with Init(remote_device=place, config_dict_or_path=config):
            model = nn.Sequential(nn.Linear(8, 8, device=device), nn.GELU(), nn.Linear(8, 4, device=device))
            model[0].weight.data.mul_(2.0)
        with GatheredParameters(model.parameters()):
            model[0].weight.sum()
        with GatheredParameters(model.parameters(), modifier_rank=0):
            model[0].weight.mul_(2.0)
        engine = initialize(model=model, config=config, device=DEVICE)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8, device=DEVICE, dtype=torch.bfloat16)).float().mean())
            engine.step()
        engine.destroy()
    assert engine.global_steps == 2
