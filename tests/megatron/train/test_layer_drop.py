"""Runs that leave blocks out: every layout, stage and recomputation leaves out the same ones, and so does a run that
was resumed; evaluations are whole; what cannot be is one line. How often a block runs is the published rule."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron import layer_drop
from megatron.config.tree import build_config
from megatron.layer_drop import ThetaSchedule, expected_blocks, keep_probability, kept, uniform_draw
from megatron.model import GPT2
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.api.engine import Engine
from megatron.zero.pass_coordinator import PassCoordinator, UnitPhase, UnitState
from megatron.zero.units import Unit
from mpu import groups as mpu_groups
from tests.distributed import run_ranks
from tests.megatron.helpers import (NO_DROPOUT, TINY, TINY_SHAPE, lines, records, steps, tiny_model, total_digest,
                                    train, train_all)
from tests.wires import accelerator_side, counted

LAYERS, STEPS, THETA, GAMMA = 6, 6, 0.4, 0.5
DROPS = ["--progressive-layer-drop", "--pld-theta", THETA, "--pld-gamma", GAMMA]
FLAGS = [*TINY, "--num-layers", LAYERS, "--mock-data", "--train-iters", STEPS, "--lr", 3e-3, "--global-batch-size", 4,
         *DROPS]

RAN = [kept(1234, step, LAYERS, ThetaSchedule(THETA, GAMMA).theta_at(step)) for step in range(STEPS)]
"""The blocks of each step, from the rule."""

TOLERANCE = 1e-4
"""The sums are the same in another order."""

assert len(RAN[0]) == LAYERS and {LAYERS - 1 in ran for ran in RAN} == {True, False} and len(set(map(str, RAN))) >= 4


def cell(folder: Path, name: str, *flags: object) -> list[object]:
    return [*FLAGS, *NO_DROPOUT, "--metrics-file", folder / name, "--save", folder / f"{name}.ckpt", *flags]


def test_every_layout_and_stage_trains_like_one_process(tmp_path: Path) -> None:
    """Also with two micro-batches a step: they share the draw, or the sums would differ."""
    train(cell(tmp_path, "alone", "--batch-size", 4))
    runs = [cell(tmp_path, f"stage {stage}", "--zero-stage", stage, "--batch-size", 2) for stage in range(4)]
    runs += [cell(tmp_path, f"accumulated {stage}", "--zero-stage", stage, "--batch-size", 1) for stage in (1, 3)]
    runs += [cell(tmp_path, "tensor parallel", "--model-parallel-size", 2, "--batch-size", 2)]
    runs += [cell(tmp_path, f"recomputed {stage}", "--zero-stage", stage, "--batch-size", 2, "--checkpoint-activations",
                  "--checkpoint-num-layers", 2, "--stage3-param-persistence-threshold", 0) for stage in (2, 3)]
    run_ranks(train_all, 2, runs, timeout=300)
    expected = steps(tmp_path / "alone")
    assert [row["pld_blocks"] for row in expected] == [len(ran) for ran in RAN]
    for path in sorted(tmp_path.glob("*[!t]")):
        for mine, theirs in zip(steps(path), expected, strict=True):
            assert mine["pld_theta"] == theirs["pld_theta"] and mine["pld_blocks"] == theirs["pld_blocks"]
            assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], abs=TOLERANCE), path.name
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=TOLERANCE), path.name
    same = {total_digest(tmp_path / f"{name}.ckpt") for name in ("stage 0", "stage 1", "stage 2", "stage 3")}
    assert len(same) == 1, "the stages end with other weights, masters or moments"


def test_recomputation_is_bit_equal(tmp_path: Path) -> None:
    """With dropout, whose masks are drawn again for the blocks that ran."""
    again = ["--checkpoint-activations", "--checkpoint-num-layers", 4]
    for name, flags in (("plain", []), ("again", again)):
        train([*FLAGS, "--metrics-file", tmp_path / name, "--save", tmp_path / f"{name}.ckpt", *flags])
    assert lines(tmp_path / "plain") == lines(tmp_path / "again")
    assert total_digest(tmp_path / "plain.ckpt") == total_digest(tmp_path / "again.ckpt")


def test_an_evaluation_is_whole(tmp_path: Path) -> None:
    """That of a run at learning rate 0 is the one of the model that leaves nothing out."""
    for name, flags in (("drops", DROPS), ("whole", ["--no-progressive-layer-drop"])):
        train([*FLAGS, *flags, "--lr", 0, "--eval-interval", 3, "--eval-iters", 1, "--metrics-file", tmp_path / name])
    drops, whole = ([row["lm_loss"] for row in records(tmp_path / name) if "eval" in row]
                    for name in ("drops", "whole"))
    assert drops and drops == whole


# ---- what travels, and when ------------------------------------------------------------------------------------------


def engine_for(stage: int, dp: int, **values: Any) -> Engine:
    config = build_config({
        **TINY_SHAPE, "num_layers": LAYERS, "progressive_layer_drop": True, "pld_theta": THETA, "pld_gamma": GAMMA,
        "zero_stage": stage, "batch_size": 2, "global_batch_size": 2 * dp, "stage3_param_persistence_threshold": 0,
        **values})
    groups = mpu_groups.build(1)
    return build_engine(config, build_model(config, groups), groups, torch.device("cpu"))


def one_step(engine: Engine) -> None:
    tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(engine.groups.dp.rank))
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:], grad_scale=engine.backward_scale))
    engine.step()


def gathered(rank: int, world: int) -> list[list[int]]:
    """Units gathered in each step at stage 3, on the accelerator's wire, without and with recomputation."""
    found: list[list[int]] = []
    with accelerator_side():
        for recomputes in (False, True):
            engine = engine_for(3, world, checkpoint_activations=recomputes)
            found.append([])
            for _ in range(STEPS):
                with counted() as sent:
                    one_step(engine)
                found[-1].append(sum(kind == "all_gather" and numel >= 1000 for kind, numel, _ in sent))
    return found


def test_stage_3_gathers_only_what_runs() -> None:
    """Each block that runs for its forward and its backward, but the last one once, and the root once: the formula of
    test_traffic.py. Nothing is gathered ahead that is not used."""
    for found in run_ranks(gathered, 2):
        assert found == [[2 * len(ran) for ran in RAN]] * 2


def not_foreseen(rank: int, world: int) -> list[list[str]]:
    """Units that were away when a step needed them, in order."""
    found: list[list[str]] = []
    enter = PassCoordinator._gather_unit

    def noted(coordinator: PassCoordinator, unit: Unit, phase: UnitPhase) -> None:
        if coordinator._states[unit] is UnitState.UNUSED:
            found[-1].append(unit.name)
        enter(coordinator, unit, phase)

    PassCoordinator._gather_unit = noted  # type: ignore[method-assign]
    engine = engine_for(3, world, checkpoint_activations=True)
    for _ in range(STEPS):
        found.append([])
        one_step(engine)
    return found


def test_stage_3_gathers_ahead_what_runs_next() -> None:
    """However the set of blocks changes: only the root, which is first, is not on its way before it is needed."""
    for found in run_ranks(not_foreseen, 2):
        assert found == [["root"]] * STEPS


def test_a_setting_that_leaves_nothing_out_is_told() -> None:
    for flags in ("--pld-theta 1", "--pld-gamma 0"):
        said = train([*TINY, "--mock-data", "--train-iters", 1, "--progressive-layer-drop", *flags.split()])
        assert f"note: --progressive-layer-drop leaves no block out: {flags.replace(' ', ' is ')}" in said


# ---- the rule ------------------------------------------------------------------------------------------------------

DRAWS = 10_000
BLOCKS = 12


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
    times = [0] * BLOCKS
    for step in range(DRAWS):
        for block in kept(1234, step, BLOCKS, theta):
            times[block] += 1
    for block, count in enumerate(times):
        chance = keep_probability(block, BLOCKS, theta)
        assert abs(count - DRAWS * chance) <= 4.5 * math.sqrt(DRAWS * chance * (1 - chance)), block
    assert times[0] == DRAWS
    mean = sum(times) / DRAWS
    assert mean == pytest.approx(expected_blocks(BLOCKS, theta), rel=0.01)


def test_draws_of_steps_blocks_and_seeds_are_independent() -> None:
    """Neighbours of each kind correlate as little as independent numbers do: within 4.5 deviations of 1 / sqrt(n)."""
    def numbers(seed: int, first: int, block: int) -> Tensor:
        return torch.tensor([uniform_draw(seed, first + step, block) for step in range(DRAWS)], dtype=torch.float64)

    one = numbers(1, 0, 3)
    assert 0 <= one.min() < 0.001 and 0.999 < one.max() < 1
    for other in (numbers(2, 0, 3), numbers(1, 1, 3), numbers(1, 0, 4)):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 4.5 / math.sqrt(DRAWS)


class Nothing(nn.Module):
    def forward(self, x: Tensor, *others: object) -> Tensor:
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
