"""Quantisation in training: what a script does to weights that are rounded beside masters that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.distributed import run_ranks


def made(stage: int = 0, precision: str | None = None, **block: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    return zero.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({precision: {"enabled": True}} if precision else {}),
        "quantize_training": {
            "enabled": True, "quantize_groups": 2, "quantize_bits": {"start_bits": 3, "target_bits": 3},
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}, **block}})[0]


def step(engine: Engine, count: int = 1) -> None:
    dtype = next(iter(engine.module.parameters())).dtype
    for index in range(count):
        x = torch.linspace(-1, 1, 16, dtype=dtype).view(2, 8) * (1 + index + engine.groups.dp.rank)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def values(x: Tensor) -> list[int]:
    """How many different numbers each of the two groups has."""
    return [len(half.unique()) for half in x.detach().float().chunk(2)]


def scripted(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    """What a script may do between steps: each time the weights that it sees then, and the masters."""
    found = []

    def look() -> None:
        with zero.GatheredParameters(list(engine.module.parameters())):
            found.append({name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()})
        found.append({name: safe_get_full_fp32_param(parameter)  # type: ignore[misc]
                      for name, parameter in engine.module.named_parameters()})

    engine = made(stage)
    step(engine, 2)
    look()
    with zero.GatheredParameters([engine.module[0].weight], modifier_rank=0):
        if rank == 0:
            engine.module[0].weight[:3] = torch.linspace(-0.3, 0.2, 24).view(3, 8)
    look()
    safe_set_full_fp32_param(engine.module[2].weight, torch.linspace(-1, 1, 128).view(8, 16))
    look()
    with zero.GatheredParameters(list(engine.module.parameters())):
        state = {name: value + 0.01 for name, value in engine.module.state_dict().items()}
    engine.load_module_state_dict(state)
    look()
    step(engine)
    look()
    return found


def test_edits_are_masters_and_are_rounded_at_once() -> None:
    """At every stage the same; what was not edited keeps its exact master."""
    expected = scripted(0, 1, 0)
    weights, masters = expected[0::2], expected[1::2]
    for seen in weights:
        assert max(values(seen["0.weight"])) <= 8 and max(values(seen["2.weight"])) <= 8
    edited, exact = masters[1]["0.weight"], masters[0]["0.weight"]
    assert edited[:3].equal(torch.linspace(-0.3, 0.2, 24).view(3, 8)) and edited[3:].equal(exact[3:])
    assert masters[2]["2.weight"].equal(torch.linspace(-1, 1, 128).view(8, 16))
    assert masters[3]["0.weight"].equal(weights[2]["0.weight"] + 0.01)
    alike = [run_ranks(scripted, 2, stage) for stage in range(4)]
    for ranks in alike:
        for found in ranks:
            assert all(max(values(seen["0.weight"])) <= 8 for seen in found[0::2])
            assert found[3]["0.weight"][3:].equal(found[1]["0.weight"][3:])
            assert found[5]["2.weight"].equal(masters[2]["2.weight"])
            for mine, theirs in zip(found, alike[0][0], strict=True):
                assert all(mine[name].equal(value) for name, value in theirs.items())


def test_a_write_that_would_not_last_is_still_found(tmp_path: Path) -> None:
    """Also one that torch does not count: the weights are compared with what the masters are on the grid."""
    engine = made(0, quantize_algo={"rounding": "stochastic"})
    step(engine, 2)
    engine.save_checkpoint(tmp_path)  # rounded weights are no edit
    engine.module[0].weight.data[0, 0] += 1
    with pytest.raises(ConfigError, match="0.weight was written to in place"):
        engine.save_checkpoint(tmp_path)


def test_the_weights_that_are_saved_for_others_are_the_rounded_ones(tmp_path: Path) -> None:
    engine = made(0, "bf16", quantize_bits={"start_bits": 4, "target_bits": 4})
    step(engine)
    engine.save_16bit_model(tmp_path, "weights.bin")
    saved = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert max(values(saved["0.weight"])) <= 16 and saved["0.weight"].equal(engine.module[0].weight)
