"""A run that resumes trains on as the one that was not interrupted: rates, states, gradients under way, epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_schedulers

from megatron.checkpoint.reader import open_checkpoint
from megatron.errors import CheckpointError
from megatron.zero.api.checkpoint_io import LoadOptions
from megatron.zero.api.engine import Engine
from tests.covering import pairs
from tests.megatron.zero import small
from tests.megatron.zero.small import Model, rows, whole

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the engine steps the optimizer


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": [p for name, p in named if "weight" in name]},
            {"params": [p for name, p in named if "bias" in name], "lr": 0.03, "weight_decay": 0.0}]


def engine_of(scheduler: Any = None, *, stage: int = 0, groups: Callable[[nn.Module], Any] = two_groups,
              kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, rate: float | Tensor = 0.1,
              **changes: Any) -> Engine:
    model = Model()
    return small.engine_of(stage, model, keys=changes, given={
        "optimizer": kind(groups(model), lr=rate), "lr_scheduler": scheduler})


def train(engine: Engine, numbers: range) -> list[list[float]]:
    rates = []
    for number in numbers:
        rates.append(engine.get_lr())
        small.train(engine, number)
    return rates


def hyper(engine: Engine) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in engine.core.param_groups]


# ---- hyper-parameters ----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch_schedulers.StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: torch_schedulers.CosineAnnealingLR(o, 20),
    "lambda": lambda o: torch_schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: torch_schedulers.OneCycleLR(o, 0.2, total_steps=20),
    "cycles": lambda o: torch_schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "sequence": lambda o: torch_schedulers.SequentialLR(
        o, [torch_schedulers.LinearLR(o, 0.1, 1, 3), torch_schedulers.CosineAnnealingLR(o, 10)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_with_a_scheduler_of_torchs_goes_on_at_its_rates(name: str, tmp_path: Path) -> None:
    kind = torch.optim.NAdam if name == "step" else torch.optim.AdamW  # NAdam's product of momenta is kept, too
    straight, first, second = (engine_of(SCHEDULERS[name], kind=kind) for _ in range(3))
    wanted = train(straight, range(8))
    rates = train(first, range(4))
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert rates + train(second, range(4, 8)) == wanted
    assert torch.equal(whole(second), whole(straight)) and hyper(second) == hyper(straight)


def set_by_hand(folder: Path) -> Engine:
    engine = engine_of()
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"], group["betas"] = 0.001, 0.5, (0.5, 0.6)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    return engine


def test_what_was_set_by_hand_comes_back_as_the_options_say(tmp_path: Path) -> None:
    saved = hyper(set_by_hand(tmp_path))
    own = hyper(engine_of())
    wanted = {
        "all": ({}, saved),
        "no scheduler": ({"load_lr_scheduler_states": False},
                         [{**there, "lr": here["lr"], "betas": here["betas"]}
                          for there, here in zip(saved, own, strict=True)]),
        "no optimizer": ({"load_optimizer_states": False}, own),
        "weights": ({"load_module_only": True}, own),
    }
    for name, (options, groups) in wanted.items():
        engine = engine_of()
        engine.load_checkpoint(tmp_path, **options)
        assert hyper(engine) == groups, name
    trainer = engine_of()  # pretrain_gpt2's flags decide
    trainer.restore(open_checkpoint(tmp_path, world=trainer.groups.world), LoadOptions(hyper_parameters=False))
    assert hyper(trainer) == own


def test_a_schedulers_rates_come_without_the_optimizers_state_and_a_new_scheduler_sets_its_own(tmp_path: Path) -> None:
    first = engine_of(SCHEDULERS["step"])
    train(first, range(5))
    first.save_checkpoint(tmp_path / "with")
    second = engine_of(SCHEDULERS["step"])
    second.load_checkpoint(tmp_path / "with", load_optimizer_states=False)
    assert second.get_lr() == first.get_lr() == [0.025, 0.0075]
    set_by_hand(tmp_path / "without")
    third = engine_of(SCHEDULERS["cosine"])
    before = third.get_lr()
    third.load_checkpoint(tmp_path / "without")
    assert third.get_lr() == before and third.core.param_groups[0]["weight_decay"] == 0.5


def test_a_rate_that_is_a_tensor_stays_one_and_is_filled(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"groups": lambda model: model.parameters(), "kind": torch.optim.SGD}
    engine_of(rate=torch.tensor(0.5), **kinds).save_checkpoint(tmp_path)
    rate = torch.tensor(0.25)
    engine = engine_of(rate=rate, **kinds)
    engine.load_checkpoint(tmp_path)
    assert engine.core.param_groups[0]["lr"] is rate and float(rate) == 0.5


def test_other_param_groups_are_refused_before_anything_changes(tmp_path: Path) -> None:
    set_by_hand(tmp_path)
    other = engine_of(groups=lambda model: model.parameters())
    before = whole(other)
    with pytest.raises(CheckpointError, match="hyper-parameters of 2 param groups, the optimizer has 1: [^\n]+$"):
        other.load_checkpoint(tmp_path)
    assert torch.equal(whole(other), before) and other.global_steps == 0
    other.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)


# ---- states and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, option", [(torch.optim.AdamW, "load_optimizer_states"),
                                          (torch.optim.NAdam, "load_module_only")])
def test_without_its_states_the_optimizer_starts_anew_in_an_engine_that_has_trained(
        kind: Any, option: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {option: option == "load_module_only"}
    used, fresh = engine_of(kind=kind), engine_of(kind=kind)
    train(used, range(3))
    used.save_checkpoint(tmp_path)
    train(used, range(3, 6))
    for engine in (used, fresh):
        engine.load_checkpoint(tmp_path, **options)
        train(engine, range(9, 11))
    assert torch.equal(whole(used), whole(fresh))


@pytest.mark.parametrize("stage, accumulation", pairs(range(4), [1, 2], each=1))
def test_a_load_discards_what_has_been_accumulated(stage: int, accumulation: int, tmp_path: Path) -> None:
    used, fresh = (engine_of(stage=stage, gradient_accumulation_steps=accumulation) for _ in range(2))
    used.save_checkpoint(tmp_path)
    used.backward(used(rows(0, 7) * 100))
    if accumulation == 2:
        used.step()
        used.backward(used(rows(0, 8) * 100))
    for engine in (used, fresh):
        engine.load_checkpoint(tmp_path)
        engine.set_train_batch_size(engine.train_batch_size())  # no step is under way
        train(engine, range(accumulation))
    assert used.global_steps == fresh.global_steps == 1 and torch.equal(whole(used), whole(fresh))
