"""What a `zero.initialize` leaves that is refused, or fails: the model as it was, or one that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError, StorageError
from megatron.zero.api import checkpoint_io

STAGES = pytest.mark.parametrize("stage", [0, 1, 3])


class Model(nn.Module):
    def __init__(self, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk or nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.register_buffer("third", torch.ones(4) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x) + self.third).square().mean()


def config(stage: int = 0, **keys: Any) -> dict[str, Any]:
    parts = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, **parts}, **keys}


def of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return all(now[name].dtype == value.dtype and now[name].equal(value) for name, value in before.items())


@STAGES
def test_a_refused_one_leaves_every_bit(stage: int) -> None:
    """A buffer that was rounded to bf16 would stay so in the corrected call, without a word."""
    model = Model()
    before = of(model)
    with pytest.raises(ConfigError, match="in no param group"):
        zero.initialize(model=model, config=config(stage, bf16={"enabled": True}),
                        model_parameters=[model.head.weight])
    assert same(model, before) and not any(module._forward_pre_hooks for module in model.modules())
    zero.initialize(model=model, config=config(stage))


@STAGES
def test_one_that_shares_a_part_with_another_engine_is_refused_whole(stage: int) -> None:
    actor = Model()
    engine = zero.initialize(model=actor, config=config(stage))[0]
    critic = Model(actor.trunk)
    head = of(critic.head)
    with pytest.raises(ConfigError, match="trunk.weight belongs to another engine already"):
        zero.initialize(model=critic, config=config(stage))
    assert same(critic.head, head)
    critic.trunk = nn.Linear(4, 4)
    zero.initialize(model=critic, config=config(stage))
    engine.backward(engine(torch.ones(4)))
    engine.step()


def refuses(*_: Any) -> NoReturn:
    raise ValueError("of the user's")


class Endless:
    def __len__(self) -> int:
        raise TypeError("endless")


@pytest.mark.parametrize("keys, arguments, kind, stage", [
    ({}, {"lr_scheduler": refuses}, ValueError, 0),
    ({"csv_monitor": {"enabled": True, "output_path": "file", "job_name": "x"}}, {}, StorageError, 1),
    ({}, {"training_data": Endless()}, TypeError, 3)], ids=["scheduler", "monitor", "data"])
def test_one_that_fails_later_leaves_a_model_that_says_so(
        keys: dict[str, Any], arguments: dict[str, Any], kind: type[Exception], stage: int, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    model = Model()
    with pytest.raises(kind):
        zero.initialize(model=model, config=config(stage, bf16={"enabled": True}, **keys), **arguments)
    with pytest.raises(ConfigError, match=rf"trunk.weight is of an engine that failed half way \({kind.__name__}: "):
        zero.initialize(model=model, config=config(stage))
    zero.initialize(model=Model(), config=config(stage))


def test_a_folder_on_a_drive_goes_with_the_failure(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ValueError) as kept:
        zero.initialize(model=Model(), lr_scheduler=refuses,
                        config=config() | {"zero_optimization": {"stage": 2, "offload_optimizer": offload}})
    assert kept.value and [*tmp_path.iterdir()] == []


@STAGES
def test_weights_that_were_being_gathered_are_given_back(stage: int, tmp_path: Path) -> None:
    """Ctrl-C in `save_16bit_model`, and training goes on."""
    settings = config(stage)
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = zero.initialize(model=Model(), config=settings)[0]
    with mock.patch.object(checkpoint_io, "partition_of",
                           side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.save_16bit_model(tmp_path)
    engine.backward(engine(torch.ones(4)))
    engine.step()
    with zero.GatheredParameters(list(engine.module.parameters())):
        pass
