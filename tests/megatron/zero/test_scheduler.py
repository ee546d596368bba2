"""The configuration's scheduler: the rates of zero.initialize are DeepSpeed's closed forms, and the trainer's."""

from __future__ import annotations

import inspect
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.cli import parse_args
from megatron.config.optimizer_config import DEEPSPEED_TYPES, OPTIMIZERS
from megatron.zero.api.torch_interfaces import build_lr_schedule
from tests.covering import pairs

PEAK, WARMUP, TOTAL = 0.01, 10, 20
TYPES = (None, "log", "linear")
PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": PEAK},
    "WarmupDecayLR": {"warmup_max_lr": PEAK, "total_num_steps": TOTAL},
    "WarmupCosineLR": {"total_num_steps": TOTAL},
}


def configuration(kind: str, warmup_type: str | None) -> dict[str, Any]:
    params = {**PARAMS[kind], "warmup_num_steps": WARMUP, **({"warmup_type": warmup_type} if warmup_type else {})}
    return {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": PEAK}},
            "scheduler": {"type": kind, "params": params}}


def wanted(kind: str, warmup_type: str | None, step: int) -> float:
    """The rate of step 0, 1, 2 ...: log(2)/log(10), log(3)/log(10) ... of the peak is DeepSpeed's default warm-up."""
    if step < WARMUP:
        share = (step + 1) / WARMUP if warmup_type == "linear" else math.log(step + 2) / math.log(WARMUP)
        return PEAK * min(1.0, share)
    done = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
    after = {"WarmupLR": 1.0, "WarmupDecayLR": 1 - done,
             "WarmupCosineLR": 0.0001 + 0.9999 * (1 + math.cos(math.pi * done)) / 2}
    return PEAK * after[kind]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("made_for, make", pairs(["the client's optimizer", "the engine's optimizer"], [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK, total_steps=TOTAL),
    lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])],
    each=1))
def test_torch_warns_of_a_schedulers_step_before_the_engines_and_only_then(made_for: str, make: Any) -> None:
    for early in (False, True):
        model = nn.Linear(2, 1)
        client = torch.optim.AdamW(model.parameters(), lr=PEAK)
        before = make(client)
        engine, optimizer, _, _ = zero.initialize(model=model, optimizer=client, config={"train_batch_size": 4})
        scheduler = before if made_for.startswith("the client") else make(optimizer)
        if early:
            with pytest.raises(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
                scheduler.step()
        for _ in range(0 if early else 3):
            engine.backward(engine(torch.ones(4, 2)).mean())
            engine.step()
            scheduler.step()


@pytest.mark.parametrize("kind, warmup_type", pairs([*PARAMS], TYPES, each=1))
def test_rates_are_those_the_file_names_and_the_trainers(kind: str, warmup_type: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(configuration(kind, warmup_type)))
    trainer = build_lr_schedule(parse_args(["--preset", "tiny", "--mock-data", "--deepspeed", "--deepspeed_config",
                                            str(path)], 1))
    engine, _, _, scheduler = zero.initialize(model=nn.Linear(2, 1), config=str(path))
    for step in range(TOTAL + 3):
        assert scheduler is not None and scheduler.get_last_lr() == engine.get_lr() == [trainer(step)]
        assert trainer(step) == pytest.approx(wanted(kind, warmup_type, step), rel=1e-9, abs=1e-15)
        engine.backward(engine(torch.ones(4, 2)).mean())
        engine.step()


OWN_RATES = ((3e-4,), (1e-5, 1e-3))  # of one and of two param groups


def engine_with_rates(rates: tuple[float, ...], kind: str, params: dict[str, Any], *, by: str) -> zero.Engine:
    """An engine whose groups were given these rates, through an optimizer of the client's or of the configuration."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in rates)
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(model, rates, strict=True)]
    config = {**configuration(kind, "linear"), "optimizer": {"type": "AdamW", "params": {}}}
    config["scheduler"]["params"] = {"warmup_num_steps": WARMUP, "warmup_type": "linear", **params}
    if by == "config":
        return zero.initialize(model=model, model_parameters=groups, config=config)[0]
    del config["optimizer"]
    return zero.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]


@pytest.mark.parametrize("kind, rates, by, peak", pairs(
    ["WarmupLR", "WarmupDecayLR"], OWN_RATES, ["client", "config"], [None, 2e-3]))
def test_a_warm_up_rises_to_its_peak_or_to_each_groups_own_rate(kind: str, rates: tuple[float, ...], by: str,
                                                                peak: float | None) -> None:
    params = {**({"total_num_steps": TOTAL} if kind == "WarmupDecayLR" else {}),
              **({} if peak is None else {"warmup_max_lr": peak})}
    engine = engine_with_rates(rates, kind, params, by=by)
    for step in range(TOTAL + 3):
        done = min(1.0, max(0.0, (step - WARMUP) / (TOTAL - WARMUP)))
        share = (step + 1) / WARMUP if step < WARMUP else 1.0 if kind == "WarmupLR" else 1 - done
        assert engine.get_lr() == pytest.approx([(peak or rate) * share for rate in rates], rel=1e-9, abs=1e-15)
        engine.lr_scheduler.step()


@pytest.mark.parametrize("params", [{}, {"lr": 2e-5}])
def test_the_floor_is_a_share_of_the_rate_the_configuration_names(params: dict[str, Any]) -> None:
    config = {**configuration("WarmupCosineLR", "linear"), "optimizer": {"type": "AdamW", "params": params}}
    config["scheduler"]["params"]["cos_min_ratio"] = 0.25
    section = zero.initialize(model=nn.Linear(2, 1), config=config)[0].config.schedule
    assert section.min_lr == pytest.approx(0.25 * params.get("lr", 1e-3)) and section.lr == params.get("lr", 1e-3)


def test_a_type_without_a_rate_has_deepspeeds_which_is_torchs_where_the_class_is() -> None:
    for kind, params in product(DEEPSPEED_TYPES, ({}, {"lr": "auto"})):
        name = OPTIMIZERS[DEEPSPEED_TYPES[kind]].torch_name
        default = inspect.signature(getattr(torch.optim, name)).parameters["lr"].default if name else 1e-3
        config = {"train_batch_size": 4, "optimizer": {"type": kind, "params": params}}
        assert set(zero.initialize(model=nn.Linear(2, 1), config=config)[0].get_lr()) == {default}
