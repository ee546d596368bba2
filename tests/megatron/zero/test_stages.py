"""Gradients at every stage: when they are reduced, what a parameter without one counts. (Weights: test_matrix.py.)"""

from __future__ import annotations

import pytest
import torch

from megatron import zero
from megatron.config.cli import build_config
from megatron.train.build import engine as build_engine, model as build_model
from mpu import groups
from tests.distributed import RankError, run_ranks


class Forgetful(torch.nn.Module):
    """One of its two layers never reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


def step_forgetful(rank: int, world: int, stage: int, ignore: bool) -> float:
    config = build_config({"zero_stage": stage, "ignore_unused_parameters": ignore})
    model = Forgetful()
    engine = zero.initialize(model=model, config=config, mpu=groups.build(1))[0]
    engine.backward(engine(torch.ones(2, 3)))
    return engine.step().grad_norm  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_count_as_zero_or_are_named(stage: int) -> None:
    # d loss / d weight is 2 for three inputs, 2 for the bias: norm 4
    assert run_ranks(step_forgetful, 2, stage, True) == pytest.approx([4.0, 4.0])
    with pytest.raises(RankError, match="2 parameters got no gradient, unused.weight first"):
        run_ranks(step_forgetful, 2, stage, False)


def reductions_during_backward(rank: int, world: int, stage: int) -> dict[str, bool]:
    """Bucket name -> whether its reduction was launched while backward was still running."""
    grid = groups.build(1)
    config = build_config({
        "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16, "vocab_size": 61,
        "zero_stage": stage, "stage3_param_persistence_threshold": 0})
    engine = build_engine(config, build_model(config, grid), grid, torch.device("cpu")).core
    seen: dict[str, bool] = {}
    for bucket in engine.buckets:
        def reduce(bucket=bucket, launch=bucket.grads.start_reduction) -> None:  # type: ignore[no-untyped-def]
            seen[bucket.name] = engine.pass_coordinator.in_backward
            launch()

        bucket.grads.start_reduction = reduce  # type: ignore[method-assign]
    rows = torch.randint(0, 61, (2, 17))
    engine.backward(engine(rows[:, :-1], rows[:, 1:]))
    return seen


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_reduced_while_backward_still_runs(stage: int) -> None:
    seen = run_ranks(reductions_during_backward, 2, stage)[0]
    assert {name: during for name, during in seen.items() if name != "root"} == dict.fromkeys(
        ("blocks.0", "blocks.1", "blocks.2"), True)
