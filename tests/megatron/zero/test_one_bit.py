"""1-bit Adam in the engine: Adam until it freezes, then what NumPy makes of workers and servers; any stage, any layout,
and on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_full_grad, safe_set_full_grad, safe_set_full_optimizer_state
from mpu import groups
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.zero.given_gradients import (Flat, Net, all_state, assert_goes_on_bit_for_bit,
                                                 assert_mean_of_debts_stays, gpt2_trained, noisy, same, saved, train,
                                                 with_numbers)
from tests.megatron.zero.run import configure, engine_around, weights

FREEZE, LR, DECAY, BETAS, EPS = 6, 2**-9, 2**-3, (0.9, 0.99), 1e-4  # 1 - LR * DECAY is exact in fp32
SETTINGS = {"optimizer": "onebit_adam", "onebit_freeze_step": str(FREEZE), "clip_grad": 0.0, "weight_decay": DECAY,
            "adam_beta2": BETAS[1], "adam_eps": EPS, "lr": LR}


def engine_of(stage: int = 0, accumulation: int = 1, **settings: Any) -> Engine:
    config = configure(**{**SETTINGS, "zero_stage": stage, **settings})
    return engine_around(Net(), config, groups.build(1), accumulation)


def trained(rank: int, world: int, steps: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(**settings)
    train(engine, 0, steps)
    return weights(engine)


# ---- beside Adam, and beside the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("stage, bias", [(0, True), (1, False)])
def test_until_it_freezes_it_is_adam_bit_for_bit(stage: int, bias: bool) -> None:
    own = {"zero_stage": stage, "clip_grad": 0.2, "optimizer_params": (f"bias_correction={str(bias).lower()}",)}
    found = run_ranks(trained, 2, FREEZE, own)
    assert same(found, run_ranks(trained, 2, FREEZE, {**own, "optimizer": "adam"}))
    later = run_ranks(trained, 2, FREEZE + 1, own)
    assert not same(later, run_ranks(trained, 2, FREEZE + 1, {**own, "optimizer": "adam"})), "it never froze"


def reference(ranks: int, steps: int, clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms by NumPy in fp64, all ranks at once."""
    model, flat = Net().double(), Flat(ranks)
    places, numel, parameters = flat.places, flat.numel, list(model.named_parameters())
    decay = np.zeros(numel)
    for name, parameter in parameters:
        decay[places[name]] = DECAY if parameter.dim() >= 2 else 0
    m, v, owed, served = np.zeros(numel), np.zeros(numel), np.zeros((ranks, numel)), np.zeros(numel)
    norms = []

    for step in range(steps):
        grads = np.zeros((ranks, numel))
        for rank in range(ranks):
            model.zero_grad()
            model(noisy(step, rank).double()).backward()
            for name, parameter in parameters:
                grads[rank][places[name]] = parameter.grad.flatten().numpy()
        if step < FREEZE:
            mean = grads.mean(0)
            norms.append(np.linalg.norm(mean))
            mean *= min(1, clip / (norms[-1] + 1e-6)) if clip else 1
            m, v = BETAS[0] * m + (1 - BETAS[0]) * mean, BETAS[1] * v + (1 - BETAS[1]) * mean ** 2
            of_v = 1 - BETAS[1] ** (step + 1)
        else:
            flat.forget_negligible(v)
            owed += BETAS[0] * m + (1 - BETAS[0]) * grads
            owed *= v != 0
            if ranks == 1:  # one rank says everything
                m, owed = owed[0], np.zeros_like(owed)
            else:
                says = np.stack([flat.say(one, v) for one in owed])
                owed -= says
                served += says.mean(0)
                m = flat.say(served, v)
                served -= m
            norms.append(np.linalg.norm(m))
            m *= min(1, clip / (norms[-1] + 1e-6)) if clip else 1
        update = m / (1 - BETAS[0] ** (step + 1)) / (np.sqrt(v / of_v) + EPS)
        with torch.no_grad():
            for name, parameter in parameters:
                place = places[name]
                run = parameter.flatten().numpy()
                run = run * (1 - LR * decay[place]) - LR * update[place]
                parameter.copy_(torch.from_numpy(run).view(parameter.shape))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def _told(rank: int, world: int, steps: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(**settings)
    norms = train(engine, 0, steps)
    return weights(engine), norms


@pytest.mark.parametrize("ranks, stage, clip", [(1, 0, 0.2), (2, 0, 0.0), (2, 1, 0.2), (3, 1, 0.0)])
def test_fifty_steps_are_those_of_the_reference(ranks: int, stage: int, clip: float) -> None:
    wanted, wanted_norms = reference(ranks, 50, clip)
    by_rank = run_ranks(_told, ranks, 50, {"stage": stage, "clip_grad": clip})
    for found, norms in by_rank:
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        for name, weight in with_numbers(found):
            assert (weight.double() - wanted[name]).abs().max() < 1e-6 * wanted[name].abs().max().clamp(min=1), name
    assert same([by_rank[0][0]] * ranks, [found for found, _ in by_rank]), "the ranks have other weights"


# ---- any split of the work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation, precision", pairs(
    [1, 2], [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}], each=1))
def test_stages_0_and_1_are_the_same_bits(precision: dict[str, Any], accumulation: int) -> None:
    """On two ranks, where the sums of the warm-up are (mpu/backends.py)."""
    own = {**precision, "accumulation": accumulation, "clip_grad": 0.2}
    assert same(*(run_ranks(trained, 2, 15, {**own, "stage": stage}) for stage in (0, 1)))


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_gpt2_trains_alike_at_stages_0_and_1_of_tensor_parallel_ranks(precision: dict[str, Any]) -> None:
    first, second = (run_ranks(gpt2_trained, 4, 2, {**SETTINGS, "zero_stage": stage, **precision}, 2 * FREEZE)
                     for stage in (0, 1))
    for (found, replicated, tp, _), (other, *_) in zip(first, second, strict=True):
        same = next(one for one, _, rank, _ in first if rank == tp)
        for name, weight in found.items():
            assert torch.equal(weight, other[name]) and torch.equal(weight, same[name]), name
            assert name not in replicated or torch.equal(weight, first[0][0][name]), f"{name} on other tp ranks"


def _overflows(rank: int, world: int, stage: int) -> list[tuple[Tensor, ...]]:
    engine = engine_of(stage, fp16=True, initial_loss_scale=2.0**8)
    train(engine, 0, 2 * FREEZE)
    assert engine.core.compressed_exchanges
    before = all_state(engine)
    loss = engine(noisy(99, rank))
    engine.backward(loss * (float("inf") if rank else 1.0))
    report = engine.step()
    assert report is not None and not report.applied
    after = all_state(engine)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    train(engine, FREEZE + 3, FREEZE + 5)
    assert not torch.equal(all_state(engine)[0], after[0])
    return []


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_overflows_on_one_rank_leaves_everything_as_it_was(stage: int) -> None:
    run_ranks(_overflows, 2, stage)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, at", pairs([0, 1], [FREEZE - 1, FREEZE, FREEZE + 5], each=1))
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, stage: int, at: int) -> None:
    assert_goes_on_bit_for_bit(engine_of, noisy, tmp_path, stage, at)


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_ranks_the_mean_of_what_is_owed_stays(tmp_path: Path, ranks: int) -> None:
    assert_mean_of_debts_stays(engine_of, noisy, tmp_path, (1, 1), FREEZE + 5, ranks)


def _starts_anew(rank: int, world: int, folder: str) -> bool:
    engine = engine_of(0)
    engine.load_checkpoint(folder, tag="kept", load_optimizer_states=False)
    froze = bool(engine.core.compressed_exchanges)
    train(engine, 0, FREEZE)
    warm = bool(engine.core.compressed_exchanges)
    train(engine, FREEZE, FREEZE + 1)
    return not froze and not warm and bool(engine.core.compressed_exchanges)


def test_without_the_optimizers_state_the_warm_up_begins_anew(tmp_path: Path) -> None:
    run_ranks(saved, 2, engine_of, noisy, str(tmp_path), 0, FREEZE + 2)
    assert all(run_ranks(_starts_anew, 2, str(tmp_path)))


def _explodes(rank: int, world: int) -> str:
    engine = engine_of(max_skipped_in_a_row=0)
    train(engine, 0, FREEZE + 2)
    engine.backward(engine(noisy(FREEZE + 2, rank)) * (float("nan") if rank else 1.0))
    with pytest.raises(NumericsError) as told:
        engine.step()
    return str(told.value)


def test_an_error_names_the_rank_whose_gradient_was_bad() -> None:
    assert all("in the gradient of rank 1" in told for told in run_ranks(_explodes, 2))


# ---- when it freezes ------------------------------------------------------------------------------------------------


def _frozen_at(rank: int, world: int, stage: int) -> int | None:
    """Of a run whose gradients hardly change, and whose rate rises for 35 steps."""
    engine = engine_of(stage, onebit_freeze_step="auto", adam_beta2=0.9)
    for step in range(60):
        for group in engine.core.param_groups:
            group["lr"] = 1e-6 * min(1.0, (step + 1) / 35)
        engine.backward(engine(noisy(0, rank)))
        engine.step()
    found: int | None = engine.core.rule.scalars()["frozen_at"]
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_the_end_of_the_warm_up_is_found(stage: int) -> None:
    """beta2 of 0.9: looked at every 10 steps; the first time that no rate of the last 10 steps rose is step 50."""
    assert run_ranks(_frozen_at, 2, stage) == [50, 50]


def _skips(rank: int, world: int) -> tuple[int, int | None]:
    """A step is begun twice where the variance is looked at, and has moved."""
    engine = engine_of(onebit_freeze_step="auto", adam_beta2=0.9, fp16=True, initial_loss_scale=2.0**2)
    train(engine, 0, 10)
    engine.backward(engine(noisy(10, rank)) * (float("inf") if rank else 1.0))
    report = engine.step()
    assert report is not None and not report.applied
    train(engine, 10, 11)
    return engine.core.counters.optimizer_steps, engine.core.rule.scalars()["frozen_at"]


def test_a_step_that_was_skipped_is_not_taken_for_a_variance_that_has_settled() -> None:
    assert run_ranks(_skips, 2) == [(11, None)] * 2


# ---- what is set by hand --------------------------------------------------------------------------------------------


def _by_hand(rank: int, world: int, stage: int) -> list[str]:
    engine = engine_of(stage)
    train(engine, 0, FREEZE + 3)
    bias, told = engine.module.body.bias, []
    engine.backward(engine(noisy(FREEZE + 3, rank)))
    assert safe_get_full_grad(bias) is None
    for change in (lambda: safe_set_full_optimizer_state(bias, torch.full((30,), 0.25), "exp_avg"),
                   lambda: safe_set_full_grad(bias, torch.zeros(30))):
        with pytest.raises(ConfigError) as error:
            change()
        told.append(str(error.value))
    engine.step()
    return told


@pytest.mark.parametrize("stage", [0, 1])
def test_what_ranks_know_from_compressed_messages_cannot_be_set_by_hand(stage: int) -> None:
    for momentum, gradient in run_ranks(_by_hand, 2, stage):
        assert "the exp_avg of parameter 'body.bias' of shape (30,) cannot be set now" in momentum
        assert "each has its own" in gradient
