"""Weights that are written to by hand outlast the next step, or the step is refused in words; nothing is undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_full_fp32_param
from tests.covering import pairs
from tests.megatron.zero import small
from tests.megatron.zero.run import master
from tests.megatron.zero.small import STAGES, WIDTH, Model

WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.5)), "fill_": lambda p: p.fill_(0.5),
    "init": lambda p: nn.init.constant_(p, 0.5), "detach": lambda p: p.detach().fill_(0.5),
    "one row": lambda p: p[0].fill_(0.5), "clamp_": lambda p: p.clamp_(-1e-3, 1e-3),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
}
UNCOUNTED: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda p: p.data.fill_(0.5), "one number of data": lambda p: p.data.view(-1)[-1:].add_(1),
    "kept data": lambda p: p.data[0].mul_(-1),
}


def engine_of(stage: int, work: str, model: nn.Module | None = None, **section: Any) -> Engine:
    return small.engine_of(stage, model, precision=work, lr=0.0, **section)


def step(engine: Engine, count: int = 1) -> None:
    for _ in range(count):
        engine.backward(engine(torch.zeros(2, WIDTH, dtype=engine.working_dtype)))
        engine.step()


def values(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_to_fp32_weights_lasts(stage: int) -> None:
    """At stage 3, of those that persist."""
    for name, write in {**WRITES, **UNCOUNTED}.items():
        engine = engine_of(stage, "fp32", stage3_param_persistence_threshold=1000)
        for _ in range(2):
            with torch.no_grad():
                write(engine.module.head.weight)
            wanted = values(engine)
            step(engine)
            assert all(map(torch.equal, values(engine), wanted)), name


@pytest.mark.parametrize("stage, work, before", pairs(STAGES, ("bf16", "fp16"), (0, 1, 5)))
def test_what_masters_would_undo_is_refused(tmp_path: Path, stage: int, work: str, before: int) -> None:
    for name, write in {**WRITES, **({} if before == 5 else UNCOUNTED)}.items():
        engine = engine_of(stage, work, stage3_param_persistence_threshold=1000)
        step(engine, before)
        with torch.no_grad():
            write(engine.module.head.weight)
        masters = [master(bucket) for bucket in engine.core.buckets]
        for go_on in (step, lambda engine: engine.save_checkpoint(tmp_path)):
            with pytest.raises(ConfigError, match="^head.weight was written to in place .* zero.GatheredParameters"):
                go_on(engine)
        assert engine.global_steps == before, name
        assert all(torch.equal(master(bucket), old) for bucket, old in zip(engine.core.buckets, masters))


def test_uncounted_writes_are_found_at_steps_1_2_4_8_and_after_a_load(tmp_path: Path) -> None:
    engine = engine_of(0, "bf16")
    engine.save_checkpoint(tmp_path)
    found = []
    for number in range(1, 20):
        if number == 11:
            engine.load_checkpoint(tmp_path)
        kept = engine.module.head.weight.detach().clone()
        engine.module.head.weight.data.add_(1)
        try:
            step(engine)
        except ConfigError:
            found.append(number)
            engine.module.head.weight.data.copy_(kept)
            engine.core.zero_grad()
    assert found == [1, 2, 4, 8, 11, 12, 14, 18]


@pytest.mark.parametrize("stage, work", pairs((0, 1, 2), ("bf16", "fp16", "fp32"), each=1))
def test_weights_that_were_exchanged_for_a_while_are_no_edit(stage: int, work: str) -> None:
    engine = engine_of(stage, work)
    for _ in range(3):
        wanted = values(engine)
        with torch.no_grad():
            for p in engine.module.parameters():
                p.fill_(0.5)
            for p, kept in zip(engine.module.parameters(), wanted, strict=True):
                p.copy_(kept)
        step(engine)
        assert all(map(torch.equal, values(engine), wanted))


@pytest.mark.parametrize("stage, work", pairs(STAGES, ("bf16", "fp16", "fp32"), each=1))
def test_documented_ways_to_write_are_no_edit(tmp_path: Path, stage: int, work: str) -> None:
    engine = engine_of(stage, work, stage3_gather_16bit_weights_on_model_save=True)
    parameters = [*engine.module.parameters()]
    for _ in range(3):
        with zero.GatheredParameters(parameters, modifier_rank=0):
            for p in parameters:
                p.add_(1)
        engine.load_module_state_dict(engine.module_state_dict())
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        with zero.GatheredParameters(parameters), torch.no_grad():
            parameters[0].add_(0)
        step(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loan_takes_over_what_was_written_before_it(stage: int) -> None:
    for write in {**WRITES, **UNCOUNTED}.values():
        engine = engine_of(stage, "bf16", stage3_param_persistence_threshold=1000)
        step(engine, 2)
        weight = engine.module.get_parameter("head.weight")
        with torch.no_grad():
            write(weight)
        with pytest.raises(ConfigError, match="by hand before it"), zero.GatheredParameters(weight):
            pass
        with torch.no_grad():
            write(weight)
        with zero.GatheredParameters(weight, modifier_rank=0):
            wanted = values(engine)
        step(engine, 2)
        assert all(map(torch.equal, values(engine), wanted))


IN_A_LOAN: dict[str, Callable[[Engine, Path], object]] = {
    "step": lambda engine, folder: engine.step(), "load": lambda engine, folder: engine.load_checkpoint(folder),
    "save": lambda engine, folder: engine.save_checkpoint(folder),
    "weights": lambda engine, folder: engine.load_module_state_dict(
        {"head.weight": torch.zeros(1, WIDTH)}, strict=False),
    "loan": lambda engine, folder: zero.GatheredParameters([*engine.module.parameters()]).__enter__(),
}


@pytest.mark.parametrize("stage, work", pairs(STAGES, ("bf16", "fp32"), each=1))
def test_what_would_meet_half_an_edit_is_refused(tmp_path: Path, stage: int, work: str) -> None:
    engine = engine_of(stage, work)
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(torch.zeros(2, WIDTH, dtype=engine.working_dtype)))
    with zero.GatheredParameters(engine.module.head.weight, modifier_rank=0):
        engine.module.head.weight.fill_(0.5)
        for name, act in IN_A_LOAN.items():
            with pytest.raises(ConfigError, match=r"inside zero.GatheredParameters, which has .* leave it first"):
                act(engine, tmp_path)
                pytest.fail(f"{name} was not refused")
    engine.step()
    step(engine)
    with zero.GatheredParameters(engine.module.head.weight):
        assert bool((engine.module.head.weight == 0.5).all())


class Looking(Model):
    """Looks at a weight of its own in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with zero.GatheredParameters(self.blocks[1].weight):
            x = x + 0 * self.blocks[1].weight.sum()
        return super().forward(x)


@pytest.mark.parametrize("stage, work, model", pairs(STAGES, ("bf16", "fp32"), (Model, Looking)))
def test_forwards_and_loans_may_be_inside_each_other(stage: int, work: str, model: type[Model]) -> None:
    engine = engine_of(stage, work, model())
    x = torch.ones(2, WIDTH, dtype=engine.working_dtype)
    wanted = engine(x).item()
    for _ in range(2):
        if model is Model:
            with zero.GatheredParameters(engine.module.parameters()):
                assert engine(x).item() == wanted
                assert all(p.sum().isfinite() for p in engine.module.parameters())
        engine.backward(engine(x))
        engine.step()
    assert all(not bucket.is_unsharded for bucket in engine.core.buckets) == (stage == 3)


class Renormed(Model):
    """Its forward writes to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table.weight.renorm_(2, 0, 0.1)
        return super().forward(x + self.table(torch.tensor([1, 2])))


@pytest.mark.parametrize("stage, work", [(0, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")])
def test_a_forward_that_writes_where_nothing_lasts_is_refused(stage: int, work: str) -> None:
    engine = engine_of(stage, work, Renormed())
    with pytest.raises(ConfigError, match="^table.weight was written to in place"):
        step(engine)


@pytest.mark.parametrize("stage, work", pairs(STAGES, ("bf16", "fp32"), each=1))
def test_a_refused_loan_ends(stage: int, work: str) -> None:
    engine = engine_of(stage, work)
    parameters = [*engine.module.parameters()]
    with zero.GatheredParameters(parameters):
        wanted = values(engine)
    for changed in (parameters[:1], parameters):
        with pytest.raises(ConfigError, match="without modifier_rank"):
            with zero.GatheredParameters(parameters), torch.no_grad():
                for p in changed:
                    p.add_(1)
    step(engine)
    with zero.GatheredParameters(parameters):
        assert all(map(torch.equal, values(engine), wanted))


# ---- a second call ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stage, work", pairs(STAGES, ("fp32", "bf16"), each=1))
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
