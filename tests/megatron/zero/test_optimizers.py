"""Every optimizer trains alike however the model is split, and goes on from a checkpoint of another split.
DeepSpeedCPUAdam is torch's Adam. The scheduler of a configuration has DeepSpeed's closed forms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.config.cli import parse_args
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.zero.api.engine import Engine
from megatron.zero.api.torch_interfaces import build_lr_schedule
from megatron.zero.ops.adam import DeepSpeedCPUAdam
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.zero.run import built, configure_gpt2, join_runs, master_runs
from tests.megatron.zero.small import gathered

STEPS, ROWS = 4, 8
RATES = {"lamb": 1e-2, "lion": 1e-3, "sgd": 0.5, "adagrad": 1e-2, "nadam": 1e-3, "rmsprop": 1e-3}


def engine_of(optimizer: str, stage: int, tp: int = 1) -> Engine:
    # Its decay is 0.1, and its epsilon no blow-up of key biases.
    config = configure_gpt2(lr=RATES[optimizer], lr_decay_style="constant", warmup=0.0, optimizer=optimizer,
                            zero_stage=stage, model_parallel_size=tp, global_batch_size=ROWS, adam_eps=1e-4,
                            batch_size=ROWS * tp // torch.distributed.get_world_size())
    return built(config)


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        rows = torch.randint(0, 61, (ROWS, 17), generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(engine.groups.dp.size)[engine.groups.dp.rank]
        engine.backward(engine(mine[:, :-1], mine[:, 1:], grad_scale=engine.backward_scale))
        engine.step()


def trained(rank: int, world: int, optimizer: str, layouts: list[tuple[int, int]]) -> list[Any]:
    found = []
    for stage, tp in layouts:
        engine = engine_of(optimizer, stage, tp)
        train(engine, 0, STEPS)
        found.append(master_runs(engine.core))
    return found


def forget_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their gradients are nothing but rounding, which the sign of Lion and the norms of Lamb blow up."""
    return {name: torch.cat([w[:32], w[64:]]) if name.endswith("qkv.bias") else w for name, w in weights.items()}


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", RATES)
def test_every_split_is_the_same_training(optimizer: str) -> None:
    model = GPT2(configure_gpt2().model)
    wanted = forget_key_biases(join_runs(*zip(*run_ranks(trained, 1, optimizer, [(0, 1)])), 1, model))
    layouts = [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2)]
    for (_, tp), by_rank in zip(layouts, zip(*run_ranks(trained, 2, optimizer, layouts)), strict=True):
        found = forget_key_biases(join_runs(by_rank, tp, model))
        for name, weight in wanted.items():
            # Sums in another order; Lion moves by a sign, which may turn where an update is almost zero.
            off = (found[name][: len(weight)] - weight).abs()
            assert off.mean() < 1e-6 and (optimizer == "lion" or off.max() < 2e-5), f"{name} in layout {layouts, tp}"


# ---- DeepSpeedCPUAdam, named in a file and passed in -----------------------------------------------------------------


KINDS: list[dict[str, bool]] = [{}, {"adamw_mode": False}, {"bias_correction": False},
                                {"adamw_mode": False, "bias_correction": False}]
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def cpu_adam_config(stage: int, **changes: Any) -> dict[str, Any]:
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {**section, **({"offload_optimizer": {"device": "cpu"}} if stage else {})}, **changes}


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def by_object(stage: int, kind: dict[str, bool]) -> Engine:
    made = small_net()
    return zero.initialize(model=made, optimizer=DeepSpeedCPUAdam(made.parameters(), **HYPER, **kind),
                           config=cpu_adam_config(stage))[0]


def by_file(stage: int, kind: dict[str, bool]) -> Engine:
    params = {"adam_w_mode" if name == "adamw_mode" else name: value for name, value in kind.items()}
    optimizer = {"type": "DeepSpeedCPUAdam", "params": {**HYPER, "betas": list(HYPER["betas"]), **params}}
    return zero.initialize(model=small_net(), config=cpu_adam_config(stage, optimizer=optimizer))[0]


def gradient(step: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(step))


def weights_after(engine: Engine, steps: int = 4, first: int = 0) -> list[torch.Tensor]:
    for step in range(first, first + steps):
        engine.backward(engine(gradient(step)).square().mean())
        engine.step()
    return gathered(engine.module)


def by_torch(make: Any, steps: int = 4) -> list[torch.Tensor]:
    made = small_net()
    optimizer = make(made.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        made(gradient(step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in made.parameters()]


@pytest.mark.parametrize("decoupled", (True, False))
def test_it_is_torchs_adam_with_and_without_an_engine(decoupled: bool) -> None:
    wanted = by_torch(lambda parameters: torch.optim.Adam(
        parameters, **HYPER, fused=True, decoupled_weight_decay=decoupled))
    alone = by_torch(lambda parameters: DeepSpeedCPUAdam(parameters, **HYPER, adamw_mode=decoupled))
    assert all(map(torch.equal, alone, wanted))
    assert all(map(torch.equal, weights_after(by_object(2, {"adamw_mode": decoupled})), wanted))


def test_a_checkpoint_of_one_is_continued_by_the_other(tmp_path: Path) -> None:
    for kind in KINDS:
        first, second = by_file(1, kind), by_object(1, kind)
        weights_after(first)
        first.save_checkpoint(tmp_path)
        second.load_checkpoint(tmp_path)
        assert all(map(torch.equal, weights_after(first, 2, 4), weights_after(second, 2, 4)))


def mixed_correction() -> None:
    first, second = small_net(), small_net()
    DeepSpeedCPUAdam([{"params": [*first.parameters()]},
                      {"params": [*second.parameters()], "bias_correction": False}]).step()


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: DeepSpeedCPUAdam(small_net().parameters(), amsgrad=True),
     "^DeepSpeedCPUAdam: amsgrad=True is not supported, as in DeepSpeed; leave"),
    (lambda: DeepSpeedCPUAdam(small_net().parameters(), fp32_optimizer_states=False),
     "^DeepSpeedCPUAdam: fp32_optimizer_states=False is not supported: masters "),
    (mixed_correction, "bias_correction differs between param groups"),
    (lambda: by_torch(lambda parameters: DeepSpeedCPUAdam(parameters, bias_correction=False)),
     "only an engine steps with bias_correction=False")]


def test_what_it_cannot_do_is_refused() -> None:
    for use, told in REFUSED:
        with pytest.raises(ConfigError, match=told):
            use()


# ---- the configuration's scheduler -----------------------------------------------------------------------------------


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
