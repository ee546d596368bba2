"""1-bit Lamb in the engine: Lamb until it freezes, then what NumPy makes of the published algorithm; any stage, any
layout, and on from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.zero.api.engine import Engine
from mpu import groups
from tests.covering import pairs
from tests.distributed import run_ranks
from tests.megatron.zero.given_gradients import (NUMBERS, WIDTH, Flat, Net, assert_goes_on_bit_for_bit,
                                                 assert_mean_of_debts_stays, by_name, gpt2_trained, same, train)
from tests.megatron.zero.run import configure, engine_around, weights

FREEZE, LR, DECAY, BETAS, EPS = 6, 2**-9, 2**-3, (0.9, 0.95), 1e-4
SETTINGS = {"optimizer": "onebit_lamb", "onebit_freeze_step": str(FREEZE), "clip_grad": 0.0, "weight_decay": DECAY,
            "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS, "lr": LR}
DEFAULTS = {"max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5,
            "factor_threshold": 0.1, "bias_correction": True, "eps_inside_sqrt": False}


def batch(step: int, rank: int) -> Tensor:
    """The gradients of one rank: some of the numbers of a parameter large, others small, and two rows of none; so are
    parameters, which change, so that factors move both ways."""
    flat = torch.randn(sum(NUMBERS.values()), generator=torch.Generator().manual_seed(1))
    sizes = by_name(flat)
    sizes["table.weight"][7 * WIDTH : 9 * WIDTH] = 0.0
    sizes["body.weight"] *= 0.3 if step < 2 * FREEZE else 0.01
    sizes["head.weight"] *= 2 if step < 2 * FREEZE else 20
    noise = torch.randn(len(flat), generator=torch.Generator().manual_seed(100 * step + rank))
    return flat * (0.3 + noise) / 10


def engine_of(stage: int = 0, accumulation: int = 1, **settings: Any) -> Engine:
    config = configure(**{**SETTINGS, "zero_stage": stage, **settings})
    return engine_around(Net(), config, groups.build(1), accumulation)


def _trained(rank: int, world: int, steps: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], Any]:
    engine = engine_of(**settings)
    norms = train(engine, 0, steps, batch)
    return weights(engine), norms, engine.core.rule.scalars()


def _same(found: list[Any], wanted: list[Any]) -> bool:
    return same([one for one, *_ in found], [one for one, *_ in wanted])


# ---- beside Lamb, and beside the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage, own", [
    (0, ()), (1, ("bias_correction=false", "max_coeff=0.5", "eps_inside_sqrt=true"))])
def test_until_it_freezes_it_is_lamb_bit_for_bit(stage: int, own: tuple[str, ...]) -> None:
    settings = {"stage": stage, "clip_grad": 0.2, "optimizer_params": own}
    lamb = {**settings, "optimizer": "lamb"}
    assert _same(run_ranks(_trained, 2, FREEZE, settings), run_ranks(_trained, 2, FREEZE, lamb))
    later = run_ranks(_trained, 2, FREEZE + 1, settings)
    assert not _same(later, run_ranks(_trained, 2, FREEZE + 1, lamb)), "it never froze"


@dataclass
class Reference:
    """All ranks at once, by NumPy in fp64. Momenta are scaled as published."""

    ranks: int
    clip: float
    own: dict[str, Any]
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("lowest", "highest", "falling", "rising"), 0))
    """How often a factor was held."""

    def __post_init__(self) -> None:
        flat = self.flat = Flat(self.ranks)
        self.shapes, self.places = flat.shapes, flat.places
        self.w, self.decay, self.m, self.v, self.fresh, self.served = (np.zeros(flat.numel) for _ in range(6))
        for name, parameter in Net().named_parameters():
            self.w[self.places[name]] = parameter.detach().flatten().numpy()
            self.decay[self.places[name]] = DECAY if parameter.dim() >= 2 else 0
        self.owed, self.scale = np.zeros((self.ranks, flat.numel)), np.ones(flat.numel)
        self.average, self.factor = dict.fromkeys(self.places, 0.0), dict.fromkeys(self.places, 1.0)
        self.norms: list[float] = []

    def weights(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(self.w[place]).view(self.shapes[name]) for name, place in self.places.items()}

    def step(self, step: int) -> None:
        self.of_m, self.of_v = (1 - beta ** (step + 1) if self.own["bias_correction"] else 1.0 for beta in BETAS)
        grads = np.zeros((self.ranks, len(self.w)))
        for rank in range(self.ranks):
            for name, run in by_name(batch(step, rank)).items():
                grads[rank][self.places[name]] = run.numpy()
        (self.warm_up if step < FREEZE else self.compressed)(step, grads)

    def clipped(self, came: Any) -> Any:
        self.norms.append(float(np.linalg.norm(came)))
        return came * (min(1, self.clip / (self.norms[-1] + 1e-6)) if self.clip else 1)

    def below(self, v: Any, correction: float) -> Any:
        return np.sqrt(v / correction + EPS) if self.own["eps_inside_sqrt"] else np.sqrt(v / correction) + EPS

    def warm_up(self, step: int, grads: Any) -> None:
        grad, own = self.clipped(grads.mean(0)), self.own
        self.m, self.v = (beta * old + (1 - beta) * new
                          for beta, old, new in zip(BETAS, (self.m, self.v), (grad, grad ** 2)))
        update = self.m / self.of_m / self.below(self.v, self.of_v) + self.decay * self.w
        for name, place in self.places.items():
            norms = np.linalg.norm(self.w[place]), np.linalg.norm(update[place])
            ratio = np.clip(norms[0] / norms[1], own["min_coeff"], own["max_coeff"]) if all(norms) else 1.0
            if ratio != 1:
                self.average[name] = own["coeff_beta"] * self.average[name] + (1 - own["coeff_beta"]) * ratio
            self.w[place] -= LR * ratio * update[place]

    def switch(self) -> None:
        self.flat.forget_negligible(self.v)
        self.fresh = self.v.copy()
        self.frozen_of_v = 1 - BETAS[1] ** FREEZE if self.own["bias_correction"] else 1.0
        full = {name: place for name, place in self.places.items() if self.m[place].any()}
        sizes = {name: np.sqrt((self.m[place] ** 2).mean()) for name, place in full.items()}
        for name, place in full.items():
            self.scale[place] = np.mean(list(sizes.values())) / sizes[name]

    def compressed(self, step: int, grads: Any) -> None:
        if step == FREEZE:
            self.switch()
        self.owed += (BETAS[0] * self.m + (1 - BETAS[0]) * grads) * self.scale
        self.owed *= self.v != 0
        says = np.stack([self.flat.say(one, self.v) for one in self.owed])
        self.owed -= says
        self.served += says.mean(0)
        said = self.flat.say(self.served, self.v)
        self.served -= said
        m = self.clipped(said / self.scale)
        grad = (m - BETAS[0] * self.m) / (1 - BETAS[0])
        self.m, self.fresh = m, BETAS[1] * self.fresh + (1 - BETAS[1]) * grad ** 2
        frozen = self.below(self.v, self.frozen_of_v)
        ratios = frozen / self.below(self.fresh, self.of_v)
        alone = m / self.of_m / frozen
        update = alone + self.decay * self.w
        for name, place in self.places.items():
            live = self.v[place] != 0
            if live.any():
                share = min(1, np.linalg.norm(alone[place]) / np.linalg.norm(update[place]))
                self.factor[name] = self.next_factor(self.factor[name], ratios[place][live].max() * share + 1 - share)
            self.w[place] -= LR * (self.average[name] or 1) * self.factor[name] * update[place]

    def next_factor(self, before: float, wanted: float) -> float:
        own, near = self.own, self.own["factor_threshold"]
        within = min(max(wanted, own["factor_min"]), own["factor_max"])
        found: float = min(max(within, before * (1 - near)), before * (1 + near))
        self.held["lowest"] += found == own["factor_min"]
        self.held["highest"] += found == own["factor_max"]
        self.held["falling"] += found > within
        self.held["rising"] += found < within
        return found


OWN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "others": {"factor_threshold": 0.02, "factor_max": 1.5, "factor_min": 0.8, "coeff_beta": 0.7, "max_coeff": 0.8,
               "bias_correction": False, "eps_inside_sqrt": True},
}


@pytest.mark.parametrize("ranks, stage, own, clip", [(2, 0, "defaults", 0.0), (3, 1, "others", 0.2)])
def test_fifty_steps_are_those_of_the_reference(ranks: int, stage: int, own: str, clip: float) -> None:
    reference = Reference(ranks, clip, {**DEFAULTS, **OWN[own]})
    for step in range(50):
        reference.step(step)
    assert reference.scale.max() > 3 * reference.scale.min(), "the published scale has nothing to do"
    held = reference.held
    assert held["falling"] and (held["rising"] if own == "others" else held["lowest"] or held["highest"]), held
    given = tuple(f"{name}={str(value).lower()}" for name, value in OWN[own].items())
    by_rank = run_ranks(_trained, ranks, 50, {"stage": stage, "clip_grad": clip, "optimizer_params": given})
    wanted = reference.weights()
    for found, norms, scalars in by_rank:
        assert norms == pytest.approx(reference.norms, rel=1e-5)
        for name, weight in found.items():
            off = (weight.double() - wanted[name]).norm()
            assert off <= 1e-6 * wanted[name].norm(), f"{name} is off by {off / wanted[name].norm():.1e}"
            assert scalars["trust"][name] == pytest.approx([reference.average[name], reference.factor[name]], rel=1e-5)
        assert scalars == by_rank[0][2]
    assert _same([by_rank[0]] * ranks, by_rank), "the ranks have other weights"


# ---- parameters of which there is little to say ----------------------------------------------------------------------


BIAS, QUIET = "head.bias", range(FREEZE - 1, FREEZE + 2)
"""A parameter without decay; steps across the end of the warm-up."""


def _biases(rank: int, world: int, stage: int, quiet: range, settings: dict[str, Any]) -> list[Tensor]:
    """The bias after each step; it has no gradient at the quiet ones."""
    engine = engine_of(stage, **settings)
    found = []
    for step in range(2 * FREEZE):
        gradients = by_name(batch(step, rank))
        if step in quiet:
            gradients[BIAS].zero_()
        engine.backward(engine(torch.cat(list(gradients.values()))))
        engine.step()
        found.append(weights(engine)[BIAS])
    assert all(weight.isfinite().all() for weight in weights(engine).values())
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_a_momentum_of_zeros_harms_nobody(stage: int) -> None:
    """With beta1 of 0, where v has seen other gradients."""
    for found in run_ranks(_biases, 2, stage, QUIET, {"adam_beta1": 0.0}):
        stands = [step for step in range(1, 2 * FREEZE) if torch.equal(found[step], found[step - 1])]
        assert stands == list(QUIET), "a momentum of 0 moves nothing, and any other does"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_parameter_without_a_gradient_stays_without_one(stage: int) -> None:
    for found in run_ranks(_biases, 2, stage, range(2 * FREEZE), {"clip_grad": 0.2}):
        assert all(torch.equal(bias, Net().head.bias) for bias in found)


def test_a_parameter_whose_ratio_was_always_1_does_not_stand_still() -> None:
    settings = {"optimizer_params": ("min_coeff=1", "max_coeff=1")}
    (before, _, scalars), *_ = run_ranks(_trained, 2, FREEZE, settings)
    (after, _, _), *_ = run_ranks(_trained, 2, FREEZE + 1, settings)
    assert all(average == 0 for average, _ in scalars["trust"].values())
    for name in before:
        assert not before[name].numel() or not torch.equal(after[name], before[name]), name


# ---- any split of the work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}])
def test_stages_0_and_1_train_alike(precision: dict[str, Any]) -> None:
    """Norms of parts are added up in another order, in fp64: what is rounded to fp32 is mostly the same, and masters
    are far closer than a step of bf16 is wide."""
    own = {**precision, "accumulation": 2, "clip_grad": 0.2}
    (found, norms, scalars), (other, other_norms, others) = (
        run_ranks(_trained, 2, 15, {**own, "stage": stage})[0] for stage in (0, 1))
    assert scalars["frozen_at"] == FREEZE
    assert norms == pytest.approx(other_norms, rel=1e-6, nan_ok=True), "in fp16 one step is skipped"
    for name in found:
        assert scalars["trust"][name] == pytest.approx(others["trust"][name], rel=1e-6)
        assert (found[name] != other[name]).float().mean() < 0.01 or torch.allclose(found[name], other[name], 1e-6, 0)


@pytest.mark.parametrize("stage", [1])
def test_gpt2_trains_on_tensor_parallel_ranks(stage: int) -> None:
    """What ranks have in common is the same; the warm-up's averages are those of whole parameters."""
    settings = {**SETTINGS, "zero_stage": stage}
    by_rank = run_ranks(gpt2_trained, 4, 2, settings, 2 * FREEZE)
    alone = run_ranks(gpt2_trained, 2, 1, settings, 2 * FREEZE)
    for found, replicated, _, scalars in by_rank:
        assert scalars == by_rank[0][3]
        assert all(torch.equal(found[name], by_rank[0][0][name]) for name in replicated)
    for name, (average, _) in alone[0][3]["trust"].items():
        assert by_rank[0][3]["trust"][name][0] == pytest.approx(average, rel=1e-3), name


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, at", pairs([0, 1], [FREEZE - 1, FREEZE, FREEZE + 5], each=1))
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, stage: int, at: int) -> None:
    assert_goes_on_bit_for_bit(engine_of, batch, tmp_path, stage, at)


@pytest.mark.parametrize("ranks, stage", [(1, 0), (3, 1)])
def test_on_other_ranks_it_goes_on_with_the_mean_of_what_is_owed(tmp_path: Path, ranks: int, stage: int) -> None:
    assert_mean_of_debts_stays(engine_of, batch, tmp_path, (stage, 1 - stage), FREEZE + 5, ranks)
