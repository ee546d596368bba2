"""The planner against the real engine at sizes and numbers of ranks that no machine of a developer holds.

The engine runs on fake tensors (fake_rank.py): exact, and a thousand times slower than the arithmetic
(docs/decisions/007-planner-by-arithmetic.md)."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.tree import build_config
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import all_phases
from tests.megatron.plan.fake_rank import fake_peaks

SHAPE: dict[str, Any] = {"vocab_size": 50257, "attention_dropout": 0.0, "hidden_dropout": 0.0, "bf16": True}
SMALL = {**SHAPE, "num_layers": 6, "hidden_size": 768, "num_attention_heads": 12, "batch_size": 4}
LARGE = {**SHAPE, "num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25, "batch_size": 8}
KEPT = {"checkpoint_activations": True}

TOLERANCE = 0.03


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("world, values", [
    (8, {**SMALL, "zero_stage": 2}),
    (64, {**SMALL, **KEPT, "zero_stage": 3, "num_layers": 3}),
    (8, {**SMALL, **KEPT, "model_parallel_size": 4, "partition_activations": True, "zero_stage": 1, "batch_size": 32}),
    (8, {**LARGE, **KEPT, "zero_stage": 2}),
], ids=str)
def test_the_plan_is_what_the_engine_does_on_fake_tensors(world: int, values: dict[str, Any]) -> None:
    config = build_config(values)
    building, stepping = fake_peaks(config, world)
    at_building, *others = all_phases(PlannedRun(config, world, "cpu"))
    assert at_building.total == pytest.approx(building, rel=TOLERANCE)
    assert max(moment.total for moment in others) == pytest.approx(stepping, rel=TOLERANCE)
