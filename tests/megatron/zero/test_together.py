"""What one rank calls alone, or with another value than its peers, ends in an error, never in a number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_fp32_param,
                                 safe_set_full_fp32_param, safe_set_full_grad, safe_set_local_fp32_param,
                                 safe_set_local_grad)
from tests.distributed import run_ranks
from tests.megatron.zero.test_watch import ALL, SAME, SIDES, ends_of, engine_of, one_error, rows, train

NAME = "blocks.1.wide.weight"


def weight_of(engine: Engine) -> torch.nn.Parameter:
    found: torch.nn.Parameter = engine.module.get_parameter(NAME)
    return found


# ---- one rank alone ------------------------------------------------------------------------------------------------


def gathers(engine: Engine) -> float:
    with zero.GatheredParameters([weight_of(engine)]):
        return float(weight_of(engine).sum())


CALLS: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "a gradient": (lambda engine: safe_get_full_grad(weight_of(engine)), f"reading the gradient of {NAME}"),
    "masters": (lambda engine: safe_get_full_fp32_param(weight_of(engine)), f"reading the weight of {NAME}"),
    "set weights": (lambda engine: safe_set_full_fp32_param(weight_of(engine), torch.ones(16, 8)),
                    f"setting the weight of {NAME}"),
    "set a gradient": (lambda engine: safe_set_full_grad(weight_of(engine), torch.ones(16, 8)),
                       f"setting the gradient of {NAME}"),
    "a loan": (gathers, f"GatheredParameters of parameter '{NAME}'"),
    "load weights": (lambda engine: engine.load_module_state_dict({}), "a load"),
    "weights": (lambda engine: engine.module_state_dict(), "a save"),
}


def alone(what: str, engine: Engine, rank: int) -> None:
    train(engine)
    engine.backward(engine(rows(), ALL))
    if rank == 1:
        pytest.fail(f"{what}: {CALLS[what][0](engine)}")
    for _ in range(3):
        engine.step()
        engine.backward(engine(rows(), ALL))


@pytest.mark.parametrize("what, stage, side", [
    ("a gradient", 1, False), ("set weights", 0, False), ("a loan", 2, False), ("masters", 3, True),
    ("load weights", 0, False), ("weights", 3, False), ("set a gradient", 3, False)])
def test_what_one_rank_calls_alone(what: str, stage: int, side: bool) -> None:
    section: dict[str, Any] = {"stage3_gather_16bit_weights_on_model_save": True} if what == "weights" else {}
    error = one_error(ends_of(partial(alone, what), 2, SAME, stage, side, **section))
    assert "rank 0 is at a step" in error and f"rank 1 is at {CALLS[what][1]}" in error


def another_parameter(engine: Engine, rank: int) -> None:
    train(engine)
    block = engine.module.blocks[rank]
    pytest.fail(str(safe_get_full_fp32_param(block.wide.weight)))


@SIDES
def test_another_parameter_of_the_same_size(side: bool) -> None:
    error = one_error(ends_of(another_parameter, 2, SAME, 1, side))
    assert "rank 0 is at reading the weight of blocks.0." in error
    assert "rank 1 is at reading the weight of blocks.1." in error


# ---- another value -------------------------------------------------------------------------------------------------


def sets_differently(rank: int, world: int, stage: int) -> list[str]:
    engine = engine_of(SAME, stage)
    weight = weight_of(engine)
    run = safe_get_local_fp32_param(weight)
    assert run is not None
    engine.backward(engine(rows(), ALL))
    said = []
    for setter, size in ((safe_set_full_fp32_param, (16, 8)), (safe_set_full_grad, (16, 8)),
                         (safe_set_local_grad, run.shape), (safe_set_local_fp32_param, run.shape)):
        try:
            setter(weight, torch.full(size, float(rank)))
            said.append("accepted")
        except ConfigError as error:
            said.append(str(error).partition(":")[0])
    engine.step()
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 1])
def test_values_that_differ_are_refused_where_ranks_hold_the_same(stage: int) -> None:
    first, second = run_ranks(sets_differently, 2, stage)
    assert first == second
    weight, gradient = (f"the {kind} given for {NAME} is not the same on all data parallel ranks"
                        for kind in ("weight", "gradient"))
    assert first == [weight, gradient, *([gradient, weight] if stage == 0 else ["accepted"] * 2)]


# ---- between a forward and its backward ----------------------------------------------------------------------------


def edits(engine: Engine) -> None:
    with zero.GatheredParameters([weight_of(engine)], modifier_rank=0):
        weight_of(engine).mul_(2)


CHANGES: dict[str, Callable[[Engine, str], Any]] = {
    "a setter": lambda engine, folder: safe_set_full_fp32_param(weight_of(engine), torch.ones(16, 8)),
    "a loan": lambda engine, folder: edits(engine),
    "a state dict": lambda engine, folder: engine.load_module_state_dict(
        {name: torch.ones_like(value) for name, value in engine_of(SAME, 0).module.state_dict().items()}),
    "a checkpoint": lambda engine, folder: engine.load_checkpoint(folder)}


def test_new_weights_between_a_forward_and_its_backward_are_refused(tmp_path: Path) -> None:
    for stage in range(4):
        for what, change in CHANGES.items():
            engine = engine_of(SAME, stage)
            engine.save_checkpoint(tmp_path)
            loss = engine(rows(), ALL)
            change(engine, str(tmp_path))
            with pytest.raises((ConfigError, RuntimeError), match="before the weights changed|modified by an inplace|"
                                                                  "after it was written to"):
                engine.backward(loss)
            train(engine)
            engine.destroy()
