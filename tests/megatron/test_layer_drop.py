"""Progressive layer dropping, the rule: how often a block runs, and that its mean is the whole block."""

from __future__ import annotations

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron import layer_drop
from megatron.layer_drop import ThetaSchedule, expected_blocks, keep_probability, kept, uniform_draw
from megatron.model import GPT2
from megatron.train.flops import flops_per_token
from tests.megatron.helpers import tiny_model

DRAWS = 10_000
LAYERS = 12


def test_theta_falls_from_1_to_its_limit_as_published() -> None:
    schedule = ThetaSchedule(0.5, 0.001)
    assert schedule.theta_at(0) == 1.0
    assert schedule.theta_at(1000) == pytest.approx(0.5 * math.exp(-1) + 0.5)
    assert schedule.theta_at(10**6) == 0.5
    assert schedule.mean(3000) == pytest.approx(sum(schedule.theta_at(step) for step in range(3000)) / 3000)
    assert ThetaSchedule(0.5, 0.0).mean(7) == ThetaSchedule(1.0, 0.1).mean(7) == 1.0


@pytest.mark.parametrize("theta", [0.5, 0.9])
def test_each_block_runs_as_often_as_its_probability_says(theta: float) -> None:
    """Within 4.5 standard deviations of a binomial: false for one of 12 blocks once in 10,000 seeds."""
    times = [0] * LAYERS
    for step in range(DRAWS):
        for block in kept(1234, step, LAYERS, theta):
            times[block] += 1
    for block, count in enumerate(times):
        chance = keep_probability(block, LAYERS, theta)
        assert abs(count - DRAWS * chance) <= 4.5 * math.sqrt(DRAWS * chance * (1 - chance)), block
    assert times[0] == DRAWS
    mean = sum(times) / DRAWS
    assert mean == pytest.approx(expected_blocks(LAYERS, theta), rel=0.01)


def test_draws_of_steps_blocks_and_seeds_are_independent() -> None:
    """Neighbours of each kind correlate as little as independent numbers do: within 4.5 deviations of 1 / sqrt(n)."""
    def numbers(seed: int, first: int, block: int) -> Tensor:
        return torch.tensor([uniform_draw(seed, first + step, block) for step in range(DRAWS)], dtype=torch.float64)

    one = numbers(1, 0, 3)
    assert 0 <= one.min() < 0.001 and 0.999 < one.max() < 1
    for other in (numbers(2, 0, 3), numbers(1, 1, 3), numbers(1, 0, 4)):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 4.5 / math.sqrt(DRAWS)


@pytest.mark.parametrize("layers, percent", [(12, 22.9), (24, 24.0)])
def test_the_saving_is_the_published_one(layers: int, percent: float) -> None:
    assert round(100 * (1 - expected_blocks(layers, 0.5) / layers), 1) == percent
    model = tiny_model(num_layers=layers)
    whole, ran = (flops_per_token(model, 16, blocks) for blocks in (None, expected_blocks(layers, 0.5)))
    outside = flops_per_token(model, 16, 0)
    assert 1 - (ran - outside) / (whole - outside) == pytest.approx(0.5 * (layers - 1) / (2 * layers))
    assert flops_per_token(model, 16, layers) == whole


class Nothing(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, kv: object = None) -> Tensor:
        return torch.zeros_like(x)


def linear_gpt2(layers: int) -> GPT2:
    """Whose blocks are x + W x, in doubles."""
    model = GPT2(tiny_model(num_layers=layers), seed=5)
    for block in model.blocks:
        block.ln_1, block.ln_2, block.attn = nn.Identity(), nn.Identity(), Nothing()
        block.mlp = nn.Linear(32, 32, bias=False)
    model.ln_f = nn.Identity()  # type: ignore[assignment]
    return model.double()


def test_the_mean_output_of_linear_blocks_is_the_whole_one() -> None:
    """Over every set of blocks that can run, by its probability."""
    layers, theta = 4, 0.5
    model, tokens = linear_gpt2(layers), torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        whole, mean, sum_of_chances = model.hidden_states(tokens), torch.zeros(()).double(), 0.0
        for runs in product((True, False), repeat=layers):
            with patch.object(layer_drop, "uniform_draw", lambda seed, step, block: 0.0 if runs[block] else 1.0):
                blocks = model._choose_blocks(0, theta)
            chances = [keep_probability(block, layers, theta) for block in range(layers)]
            chance = math.prod(p if run else 1 - p for p, run in zip(chances, runs, strict=True))
            mean, sum_of_chances = mean + chance * model.hidden_states(tokens, blocks=blocks), sum_of_chances + chance
    assert sum_of_chances == pytest.approx(1.0)
    torch.testing.assert_close(mean, whole)


def test_a_model_is_whole_in_evaluation_and_where_nobody_asks() -> None:
    model, tokens = GPT2(tiny_model(num_layers=4), seed=5), torch.arange(17).reshape(1, 17)
    asked = {"progressive_layer_drop": True, "pld_theta": 0.3, "pld_step": 2}
    whole = model(tokens[:, :-1], tokens[:, 1:])
    assert len(kept(5, 2, 4, 0.3)) < 4 and not model(tokens[:, :-1], tokens[:, 1:], **asked).equal(whole)
    model.eval()
    assert model(tokens[:, :-1], tokens[:, 1:], **asked).equal(whole)
