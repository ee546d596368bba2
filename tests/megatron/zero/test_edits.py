"""What a user writes to weights and gradients by hand, or changes of the model, lasts beyond the next step, or the step
is refused in words; nothing is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_full_grad
from tests.covering import pairs
from tests.distributed import on_ranks
from tests.megatron.zero import small
from tests.megatron.zero.run import master
from tests.megatron.zero.small import STAGES, WIDTH, Model, backward, rows, train, whole
from tests.wires import accelerator_side

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


class Renormed(Model):
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


# ---- models that are changed -----------------------------------------------------------------------------------------


def half(model: nn.Module) -> None:
    model.half().float()  # back again, so that the forward goes on working


PERSISTS = 10**6  # all parameters stay gathered at stage 3


def of_some_frozen(stage: int, **section: object) -> Engine:
    model = Model()
    model.blocks[0].weight.requires_grad_(False)
    return small.engine_of(stage, model, **section)


@pytest.mark.parametrize("change, stages, said", [
    (half, STAGES, "has left the engine's buffers"),
    (lambda model: setattr(model.head.weight, "data", torch.ones(1, WIDTH)), (0, 1, 2), "head.weight has left"),
    (lambda model: model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()},
                                         assign=True), (0, 1, 2), "is another Parameter"),
    (lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(1, WIDTH))), STAGES,
     "head.weight is another Parameter"),
    (lambda model: model.blocks.append(nn.Linear(WIDTH, WIDTH)), STAGES, "blocks.3.weight came to the model"),
    (lambda model: model.head.weight.requires_grad_(False), STAGES, "head.weight was frozen after"),
    (lambda model: model.blocks[0].weight.requires_grad_(True), STAGES, "blocks.0.weight was unfrozen after")])
def test_a_changed_model_is_refused_before_anything_moves(change: Callable[[nn.Module], None], stages: tuple[int, ...],
                                                          said: str) -> None:
    for stage in stages:
        engine = of_some_frozen(stage, stage3_param_persistence_threshold=PERSISTS if change is half else 0)
        train(engine, 0)
        masters = [master(bucket) for bucket in engine.core.buckets]
        change(engine.module)
        backward(engine, 1)
        with pytest.raises(ConfigError, match=said):
            engine.step()
        assert all(torch.equal(master(bucket), old) for bucket, old in zip(engine.core.buckets, masters))
        assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_what_changes_no_training_goes_on(stage: int) -> None:
    plain, engine = of_some_frozen(stage), of_some_frozen(stage)
    for number in range(3):
        engine.module.head.weight.requires_grad_(False)  # for a while
        engine.module.float().to("cpu")
        engine.module.head.weight.requires_grad_(True)
        engine.module.teacher = Model().requires_grad_(False)
        for each in (plain, engine):
            train(each, number)
    del engine.module.teacher
    assert torch.equal(whole(engine), whole(plain))


@pytest.mark.parametrize("stage, part, work", [(0, "", "bf16"), (2, "head", "fp16"), (1, "head", "fp32")])
def test_a_load_through_the_module_lasts_or_is_refused(stage: int, part: str, work: str) -> None:
    engine = small.engine_of(stage, precision=work, lr=0.0)
    module = engine.module.get_submodule(part)
    new = {name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()}
    if work == "fp32":
        module.load_state_dict(new)
    else:
        with pytest.raises(ConfigError, match="call engine.load_module_state_dict"):
            module.load_state_dict(new)
        with zero.GatheredParameters(module.parameters(), modifier_rank=0):
            module.load_state_dict(new)
    step(engine)
    assert all(bool((p == 0.5).all()) for p in module.parameters())
    engine.load_module_state_dict(engine.module_state_dict())
    engine.destroy()
    module.load_state_dict(new)


def test_a_param_group_that_comes_later_is_refused() -> None:
    engine = small.engine_of(0)
    with pytest.raises(ConfigError, match="add_param_group after zero.initialize"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(engine.core.param_groups) == 1


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "accelerator"])
def side(request: pytest.FixtureRequest) -> Iterator[str]:
    with accelerator_side(request.param == "accelerator"):
        yield request.param


EDITS: list[Callable[[Any], object]] = [
    lambda p: setattr(p, "grad", p.grad * 0.5), lambda p: p.grad.mul_(0.5),
    lambda p: setattr(p, "grad", torch.ones_like(p)), lambda p: setattr(p, "grad", None), nn.Module.zero_grad]


@pytest.mark.parametrize("stage", [0, 1])
def test_between_backwards_the_view_is_the_gradient(stage: int, side: str) -> None:
    for edit in EDITS:
        engine, plain = small.engine_of(stage, None, 2), Model()
        for number in range(2):
            engine.backward(engine(rows(0, number)))
            (plain(rows(0, number)) / 2).backward()
            if number == 0:
                engine.step()
                for net in (engine.module, plain):
                    for thing in [net] if edit is nn.Module.zero_grad else net.parameters():
                        edit(thing)
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(safe_get_full_grad(ours), theirs.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage, when", pairs(  # at stage 3 torch refuses it: the parameter has no elements
    [0, 1, 2], ["before a backward", "before a step", "between micro-batches, where it is no view"], each=1))
def test_a_gradient_that_nobody_would_look_at_is_refused(when: str, stage: int, side: str) -> None:
    engine = small.engine_of(stage, None, 2, "bf16" if "no view" in when else "fp32")
    parameter = engine.module.head.bias

    def set_by_hand() -> None:
        parameter.grad = torch.ones_like(parameter)

    with pytest.raises(ConfigError, match="head.bias.grad was set by hand"):
        if when == "before a backward":
            set_by_hand()
        train(engine, 0)
        if when.endswith("view"):
            set_by_hand()
        backward(engine, 1)
        if when == "before a step":
            set_by_hand()
        engine.step()
        engine.finish_step()
    engine.zero_grad()
    assert parameter.grad is None


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32")])
def test_after_a_refusal_the_step_begins_anew(stage: int, precision: str, side: str) -> None:
    """As the error of the step says: a micro-batch from before it does not count twice."""
    norms = []
    for refused in (False, True):
        engine = small.engine_of(stage, None, 2, precision)
        if refused:
            train(engine, 7)
            parameter = engine.module.head.bias
            parameter.grad = torch.ones_like(parameter)
            with pytest.raises(ConfigError, match="was set by hand"):
                backward(engine, 8)
            with pytest.raises(ConfigError, match="what had been accumulated is gone"):
                engine.step()
        train(engine, 0, 1)
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == norms[1]


@on_ranks(2)
def test_set_on_one_rank_it_is_refused_by_all(rank: int, world: int) -> None:
    engine = small.engine_of(1, None, 2)
    train(engine, 0)
    backward(engine, 1)
    if rank == 1:
        engine.module.head.bias.grad = torch.ones(1)
    with pytest.raises(ConfigError, match=r"^head.bias.grad was set by hand.*\(so on rank 1, not on all\)$"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_those_of_a_backward_before_the_engine_are_dropped_with_a_word(stage: int, side: str) -> None:
    model = Model()
    model(rows(0, 7)).backward()
    with pytest.warns(UserWarning, match="blocks.0.weight.grad, made before zero.initialize, is dropped"):
        engines = small.engine_of(stage, model, 2), small.engine_of(stage, None, 2)
    for engine in engines:
        train(engine, 0, 1)
    norms = [engine.get_global_grad_norm() for engine in engines]
    assert norms[0] == norms[1]
