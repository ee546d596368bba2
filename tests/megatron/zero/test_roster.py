"""A model that was changed behind the engine's back is refused at the next step; nothing has moved by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from tests.covering import pairs
from tests.megatron.zero.run import master
from tests.megatron.zero.small import STAGES, WIDTH, Model, engine_of, rows, whole


def half(model: nn.Module) -> None:
    model.half().float()  # back again, so that the forward goes on working


def replaced_data(model: nn.Module) -> None:
    model.head.weight.data = torch.ones(1, WIDTH)


def replaced(model: nn.Module, trains: bool = True) -> None:
    model.head.weight = nn.Parameter(torch.ones(1, WIDTH), trains)


def of_some_frozen(stage: int, **section: object) -> Engine:
    model = Model()
    model.blocks[0].weight.requires_grad_(False)
    return engine_of(stage, model, **section)


@pytest.mark.parametrize("change, stages, said", [
    (half, (0, 1, 2), "has left the engine's buffers"), (replaced_data, (0, 1, 2), "head.weight has left"),
    (lambda model: model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()},
                                         assign=True), (0, 1, 2), "is another Parameter"),
    (replaced, STAGES, "head.weight is another Parameter"),
    (lambda model: replaced(model, False), STAGES, "head.weight is another Parameter"),
    (lambda model: model.blocks.append(nn.Linear(WIDTH, WIDTH)), STAGES, "blocks.3.weight came to the model"),
    (lambda model: model.head.weight.requires_grad_(False), STAGES, "head.weight was frozen after"),
    (lambda model: model.blocks[0].weight.requires_grad_(True), STAGES, "blocks.0.weight was unfrozen after")])
def test_a_changed_model_is_refused_before_anything_moves(change: Callable[[nn.Module], None], stages: tuple[int, ...],
                                                          said: str) -> None:
    for stage in stages:
        engine = of_some_frozen(stage)
        engine.backward(engine(rows(0, 0)))
        engine.step()
        masters = [master(bucket) for bucket in engine.core.buckets]
        change(engine.module)
        engine.backward(engine(rows(0, 1)))
        with pytest.raises(ConfigError, match=said):
            engine.step()
        assert all(torch.equal(master(bucket), old) for bucket, old in zip(engine.core.buckets, masters))
        assert engine.global_steps == 1


@pytest.mark.parametrize("change", [lambda m: m.half(), replaced_data])
def test_a_load_that_would_not_reach_the_model_is_refused(tmp_path: Path, change: Callable[[nn.Module], None]) -> None:
    for stage in (0, 1, 2):
        engine = of_some_frozen(stage)
        engine.save_checkpoint(tmp_path)
        change(engine.module)
        with pytest.raises(ConfigError, match="has left the engine's buffers"):
            engine.load_checkpoint(tmp_path)


def test_parameters_that_persist_at_stage_3_are_looked_at_too() -> None:
    engine = of_some_frozen(3, stage3_param_persistence_threshold=10**6)
    half(engine.module)
    engine.backward(engine(rows(0, 0)))
    with pytest.raises(ConfigError, match="has left the engine's buffers"):
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_new_data_inside_gathered_parameters_is_an_edit_if_it_fits(stage: int) -> None:
    engine = engine_of(stage)
    with zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
        engine.module.head.weight.data = torch.ones(1, WIDTH)
    for wrong in (torch.zeros(2, WIDTH), torch.zeros(1, WIDTH).half()):
        with pytest.raises(ConfigError, match="head.weight became a tensor of .* inside GatheredParameters"):
            with zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
                engine.module.head.weight.data = wrong
    with zero.GatheredParameters(engine.module.head.weight):
        assert bool((engine.module.head.weight == 1).all())
    engine.backward(engine(rows(0, 0)))
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_what_changes_no_training_goes_on(stage: int) -> None:
    plain, engine = of_some_frozen(stage), of_some_frozen(stage)
    for number in range(3):
        engine.module.head.weight.requires_grad_(False)  # for a while
        engine.module.float().to("cpu")
        engine.module.head.weight.requires_grad_(True)
        engine.module.teacher = Model().requires_grad_(False)
        for each in (plain, engine):
            each.backward(each(rows(0, number)))
            each.step()
    del engine.module.teacher
    assert torch.equal(whole(engine), whole(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_between_backward_and_step_changes_nothing_and_its_graph_is_stale(stage: int) -> None:
    plain, engine = engine_of(stage), engine_of(stage)
    for number in range(2):
        for each in (plain, engine):
            each.backward(each(rows(0, number)))
        stale = engine(rows(0, 9))
        plain.step()
        engine.step()
        with pytest.raises(ConfigError, match="a forward that ran before the weights changed"):
            engine.backward(stale)
    assert torch.equal(whole(engine), whole(plain))


@pytest.mark.parametrize("stage, part, work", pairs((0, 1, 2), ["", "head"], ["bf16", "fp16", "fp32"], each=1))
def test_a_load_through_the_module_lasts_or_is_refused(stage: int, part: str, work: str) -> None:
    engine = engine_of(stage, precision=work, lr=0.0)
    module = engine.module.get_submodule(part)
    new = {name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()}
    if work == "fp32":
        module.load_state_dict(new)
    else:
        with pytest.raises(ConfigError, match="call engine.load_module_state_dict"):
            module.load_state_dict(new)
        with zero.GatheredParameters(module.parameters(), modifier_rank=0):
            module.load_state_dict(new)
    engine.backward(engine(torch.zeros(2, WIDTH, dtype=engine.working_dtype)))
    engine.step()
    assert all(bool((p == 0.5).all()) for p in module.parameters())
    engine.load_module_state_dict(engine.module_state_dict())
    engine.destroy()
    module.load_state_dict(new)


def test_a_param_group_that_comes_later_is_refused() -> None:
    engine = engine_of(0)
    with pytest.raises(ConfigError, match="add_param_group after zero.initialize"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(engine.core.param_groups) == 1
