"""DeepSpeedCPUAdam: named in a file and passed in are one optimizer, and it is torch's Adam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.ops.adam import DeepSpeedCPUAdam
from tests.covering import pairs

KINDS: list[dict[str, bool]] = [{}, {"adamw_mode": False}, {"bias_correction": False},
                                {"adamw_mode": False, "bias_correction": False}]
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def config(stage: int, **changes: Any) -> dict[str, Any]:
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {**section, **({"offload_optimizer": {"device": "cpu"}} if stage else {})}, **changes}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def by_object(stage: int, kind: dict[str, bool]) -> Engine:
    made = model()
    return zero.initialize(model=made, optimizer=DeepSpeedCPUAdam(made.parameters(), **HYPER, **kind),
                           config=config(stage))[0]


def by_file(stage: int, kind: dict[str, bool]) -> Engine:
    params = {"adam_w_mode" if name == "adamw_mode" else name: value for name, value in kind.items()}
    optimizer = {"type": "DeepSpeedCPUAdam", "params": {**HYPER, "betas": list(HYPER["betas"]), **params}}
    return zero.initialize(model=model(), config=config(stage, optimizer=optimizer))[0]


def gradient(step: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(step))


def trained(engine: Engine, steps: int = 4, first: int = 0) -> list[torch.Tensor]:
    for step in range(first, first + steps):
        engine.backward(engine(gradient(step)).square().mean())
        engine.step()
    with zero.GatheredParameters(list(engine.parameters())):
        return [parameter.detach().clone() for parameter in engine.parameters()]


def by_torch(make: Any, steps: int = 4) -> list[torch.Tensor]:
    made = model()
    optimizer = make(made.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        made(gradient(step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in made.parameters()]


@pytest.mark.parametrize("stage, kind", pairs((0, 2, 3), KINDS, each=1))
def test_passed_in_it_is_the_optimizer_of_the_file(stage: int, kind: dict[str, bool]) -> None:
    given, named = by_object(stage, kind), by_file(stage, kind)
    assert given.get_type() == named.get_type()
    assert all(map(torch.equal, trained(given), trained(named)))


@pytest.mark.parametrize("decoupled", (True, False))
def test_it_is_torchs_adam_with_and_without_an_engine(decoupled: bool) -> None:
    wanted = by_torch(lambda parameters: torch.optim.Adam(
        parameters, **HYPER, fused=True, decoupled_weight_decay=decoupled))
    alone = by_torch(lambda parameters: DeepSpeedCPUAdam(parameters, **HYPER, adamw_mode=decoupled))
    assert all(map(torch.equal, alone, wanted))
    assert all(map(torch.equal, trained(by_object(2, {"adamw_mode": decoupled})), wanted))


def test_a_checkpoint_of_one_is_continued_by_the_other(tmp_path: Path) -> None:
    for kind in KINDS:
        first, second = by_file(1, kind), by_object(1, kind)
        trained(first)
        first.save_checkpoint(tmp_path)
        second.load_checkpoint(tmp_path)
        assert all(map(torch.equal, trained(first, 2, 4), trained(second, 2, 4)))


def test_what_it_cannot_do_is_refused() -> None:
    """Bias correction is one for all groups, and needs an engine where it is off."""
    with pytest.raises(ConfigError, match="^DeepSpeedCPUAdam: amsgrad=True is not supported, as in DeepSpeed; leave"):
        DeepSpeedCPUAdam(model().parameters(), amsgrad=True)
    with pytest.raises(ConfigError, match="^DeepSpeedCPUAdam: fp32_optimizer_states=False is not supported: masters "):
        DeepSpeedCPUAdam(model().parameters(), fp32_optimizer_states=False)
    first, second = model().parameters(), model().parameters()
    mixed = DeepSpeedCPUAdam([{"params": list(first)}, {"params": list(second), "bias_correction": False}])
    with pytest.raises(ConfigError, match="bias_correction differs between param groups"):
        mixed.step()
    with pytest.raises(ConfigError, match="only an engine steps with bias_correction=False"):
        by_torch(lambda parameters: DeepSpeedCPUAdam(parameters, bias_correction=False))


def test_it_is_where_a_deepspeed_script_looks_for_it() -> None:
    deepspeed: Any = zero
    assert deepspeed.ops.adam.DeepSpeedCPUAdam is DeepSpeedCPUAdam
    for name in ("ops.lamb", "ops.adam.FusedAdam"):
        with pytest.raises(AttributeError, match=f"megatron.zero.{name} is not supported: give \"optimizer\""):
            eval(f"deepspeed.{name}")
