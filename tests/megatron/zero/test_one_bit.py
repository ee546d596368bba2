"""1-bit Adam and 1-bit Lamb in the engine: Adam or Lamb until they freeze, then what NumPy makes of the published
algorithms; any stage, any layout, and on from a checkpoint.

Gradients are the input of the model, so that what is compared is the optimizer alone. (Where gradients depend on
weights, the rounding of one turns a sign some steps later.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError, NumericsError
from megatron.zero.api.engine import Engine
from megatron.zero.utils import safe_get_full_grad, safe_set_full_grad, safe_set_full_optimizer_state
from mpu import groups
from tests.covering import pairs
from tests.distributed import on_ranks, run_ranks
from tests.megatron.zero.run import configure, configure_gpt2, engine_around, gpt2_engine, gpt2_loss, weights

WIDTH, FREEZE, LR, DECAY, EPS = 12, 6, 2**-9, 2**-3, 1e-4  # 1 - LR * DECAY is exact in fp32
BETAS = {"onebit_adam": (0.9, 0.99), "onebit_lamb": (0.9, 0.95)}
PRECISIONS = [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}]


class Net(nn.Module):
    """One parameter has no numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, WIDTH)
        self.body = nn.Linear(WIDTH, 30)
        self.head = nn.Linear(30, 5)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, gradient: Tensor) -> Tensor:
        flat = torch.cat([parameter.flatten() for parameter in self.parameters()])
        return (flat * gradient.to(flat.dtype)).sum()


NUMBERS = {name: parameter.numel() for name, parameter in Net().named_parameters()}  # of each parameter


def by_name(flat: Tensor) -> dict[str, Tensor]:
    return dict(zip(NUMBERS, flat.split(list(NUMBERS.values()))))


def batch(kind: str, step: int, rank: int) -> Tensor:
    """The gradients of one rank: some of the numbers of a parameter large, others small, and two rows of none. For
    Lamb so are parameters, and change, so that factors move both ways."""
    flat = torch.randn(sum(NUMBERS.values()), generator=torch.Generator().manual_seed(1))
    sizes = by_name(flat)
    sizes["table.weight"][7 * WIDTH : 9 * WIDTH] = 0.0
    if kind == "onebit_lamb":
        sizes["body.weight"] *= 0.3 if step < 2 * FREEZE else 0.01
        sizes["head.weight"] *= 2 if step < 2 * FREEZE else 20
    noise = torch.randn(len(flat), generator=torch.Generator().manual_seed(100 * step + rank))
    return flat * (0.3 + noise) / 10


def settings_of(kind: str, **settings: Any) -> dict[str, Any]:
    betas = BETAS["onebit_lamb" if "lamb" in kind else "onebit_adam"]
    return {"optimizer": kind, "onebit_freeze_step": str(FREEZE), "clip_grad": 0.0, "weight_decay": DECAY,
            "adam_beta1": betas[0], "adam_beta2": betas[1], "adam_eps": EPS, "lr": LR, **settings}


def engine_of(stage: int = 0, accumulation: int = 1, optimizer: str = "onebit_adam", **settings: Any) -> Engine:
    config = configure(**{"zero_stage": stage, **settings_of(optimizer, **settings)})
    return engine_around(Net(), config, groups.build(1), accumulation)


def train(engine: Engine, first: int, last: int, kind: str = "onebit_adam") -> list[float]:
    norms = []
    accumulation, rank = engine.gradient_accumulation_steps(), engine.groups.dp.rank
    for step in range(first, last):
        for micro in range(accumulation):
            engine.backward(engine(batch(kind, accumulation * step + micro, rank)))
            report = engine.step() or engine.core.last_report
        norms.append(report.grad_norm if report is not None else 0.0)
    return norms


def all_state(engine: Engine) -> list[Tensor]:
    """Of this rank: masters, states, and what is owed."""
    kept = [bucket.master_state.view(kind) for bucket in engine.core.buckets for kind in bucket.master_state.kinds]
    owed = [owed for line in engine.core.compressed_exchanges
            for owed in (line.one_bit_mean.worker_error, line.one_bit_mean.server_error)]
    return [tensor.clone() for tensor in (*kept, *owed)]


Trained = tuple[dict[str, Tensor], list[float], dict[str, Any]]


def _trained(rank: int, world: int, kind: str, steps: int, settings: dict[str, Any]) -> Trained:
    """Weights, norms, and what the rule knows; exchanged in tiles of two rows, the last of a chunk may be smaller."""
    with patch("mpu.compressed_all_reduce.CPU_TILE", 256):
        engine = engine_of(**{"optimizer": kind, **settings})
        norms = train(engine, 0, steps, kind)
    return weights(engine), norms, engine.core.rule.scalars()


def trained(kind: str, ranks: int, steps: int, **settings: Any) -> list[Trained]:
    return run_ranks(_trained, ranks, kind, steps, settings)


def same(found: list[Trained], wanted: list[Trained]) -> bool:
    return all(torch.equal(one[0][name], other[0][name]) for one, other in zip(found, wanted, strict=True)
               for name in NUMBERS)


# ---- beside the reference --------------------------------------------------------------------------------------------


class Flat:
    """Where parameters are in a buffer that ranks exchange: each begins at a multiple of 128, those that decay first,
    and every rank serves an equal chunk of such multiples."""

    def __init__(self, ranks: int) -> None:
        parameters = sorted(Net().named_parameters(), key=lambda named: named[1].dim() < 2)
        self.shapes, self.places, end = {name: parameter.shape for name, parameter in parameters}, {}, 0
        for name, parameter in parameters:
            self.places[name] = slice(end, end + parameter.numel())
            end += -(-parameter.numel() // 128) * 128
        chunk = -(--(-end // ranks) // 128) * 128
        self.numel = chunk * ranks
        cuts = [(max(place.start, low), min(place.stop, low + chunk)) for low in range(0, self.numel, chunk)
                for place in self.places.values()]
        self.segments = [slice(start, stop) for start, stop in cuts if start < stop]
        """Of one parameter in one chunk, which have one size together."""

    def say(self, x: Any, v: Any) -> Any:
        """One bit for each number that has a variance, times the typical size of its segment."""
        said = np.zeros_like(x)
        for part in self.segments:
            live = v[part] != 0
            size = np.sqrt((x[part][live] ** 2).sum() / max(1, live.sum()))
            said[part] = np.where(x[part] >= 0, size, -size) * live
        return said


class Reference:
    """1-bit Adam on all ranks at once, by NumPy in fp64."""

    kind = "onebit_adam"

    def __init__(self, ranks: int, clip: float, own: dict[str, Any]) -> None:
        self.ranks, self.clip, self.own, self.flat = ranks, clip, own, Flat(ranks)
        self.places, self.norms, self.betas = self.flat.places, list[float](), BETAS[self.kind]
        self.w, self.decay, self.m, self.v, self.fresh, self.served = (np.zeros(self.flat.numel) for _ in range(6))
        self.owed = np.zeros((ranks, self.flat.numel))
        for name, parameter in Net().named_parameters():
            self.w[self.places[name]] = parameter.detach().flatten().numpy()
            self.decay[self.places[name]] = DECAY if parameter.dim() >= 2 else 0

    def weights(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(self.w[place]).view(self.flat.shapes[name])
                for name, place in self.places.items()}

    def run(self, steps: int) -> None:
        for step in range(steps):
            grads = np.zeros((self.ranks, len(self.w)))
            for rank in range(self.ranks):
                for name, run in by_name(batch(self.kind, step, rank)).items():
                    grads[rank][self.places[name]] = run.numpy()
            self.of_m, self.of_v = (1 - beta ** (step + 1) if self.own["bias_correction"] else 1.0
                                    for beta in self.betas)
            if step == FREEZE:
                self.freeze()
            if step < FREEZE:
                grad = self.clipped(grads.mean(0))
                self.m, self.v = (beta * old + (1 - beta) * new
                                  for beta, old, new in zip(self.betas, (self.m, self.v), (grad, grad ** 2)))
                self.update_in_warm_up()
            else:
                self.update_compressed(self.betas[0] * self.m + (1 - self.betas[0]) * grads)

    def clipped(self, came: Any) -> Any:
        self.norms.append(float(np.linalg.norm(came)))
        return came * (min(1, self.clip / (self.norms[-1] + 1e-6)) if self.clip else 1)

    def freeze(self) -> None:
        self.frozen_of_v = 1 - self.betas[1] ** FREEZE if self.own["bias_correction"] else 1.0
        for place in self.places.values():  # what is below a millionth of the mean of its parameter counts as none
            if place.start < place.stop:
                self.v[place][self.v[place] <= 1e-6 * self.v[place].mean()] = 0

    def exchanged(self, momenta: Any) -> Any:
        """What all know after workers and servers have said what they can, and owe the rest."""
        self.owed += momenta
        self.owed *= self.v != 0
        if self.ranks == 1:  # one rank says everything
            said, self.owed = self.owed[0], np.zeros_like(self.owed)
            return said
        says = np.stack([self.flat.say(one, self.v) for one in self.owed])
        self.owed -= says
        self.served += says.mean(0)
        said = self.flat.say(self.served, self.v)
        self.served -= said
        return said

    def below(self, v: Any, correction: float) -> Any:
        return np.sqrt(v / correction + EPS) if self.own["eps_inside_sqrt"] else np.sqrt(v / correction) + EPS

    def update_in_warm_up(self) -> None:
        self.w = self.w * (1 - LR * self.decay) - LR * self.m / self.of_m / self.below(self.v, self.of_v)

    def update_compressed(self, momenta: Any) -> None:
        self.m = self.clipped(self.exchanged(momenta))
        self.w = self.w * (1 - LR * self.decay) - LR * self.m / self.of_m / self.below(self.v, self.frozen_of_v)


class LambReference(Reference):
    """1-bit Lamb. Momenta are scaled as published."""

    kind = "onebit_lamb"

    def __init__(self, ranks: int, clip: float, own: dict[str, Any]) -> None:
        super().__init__(ranks, clip, own)
        self.scale = np.ones(self.flat.numel)
        self.average, self.factor = dict.fromkeys(self.places, 0.0), dict.fromkeys(self.places, 1.0)
        self.held = dict.fromkeys(("lowest", "highest", "falling", "rising"), 0)  # how often a factor was held

    def update_in_warm_up(self) -> None:
        own = self.own
        update = self.m / self.of_m / self.below(self.v, self.of_v) + self.decay * self.w
        for name, place in self.places.items():
            norms = np.linalg.norm(self.w[place]), np.linalg.norm(update[place])
            ratio = np.clip(norms[0] / norms[1], own["min_coeff"], own["max_coeff"]) if all(norms) else 1.0
            if ratio != 1:
                self.average[name] = own["coeff_beta"] * self.average[name] + (1 - own["coeff_beta"]) * ratio
            self.w[place] -= LR * ratio * update[place]

    def freeze(self) -> None:
        super().freeze()
        self.fresh = self.v.copy()
        full = {name: place for name, place in self.places.items() if self.m[place].any()}
        sizes = {name: np.sqrt((self.m[place] ** 2).mean()) for name, place in full.items()}
        for name, place in full.items():
            self.scale[place] = np.mean(list(sizes.values())) / sizes[name]

    def update_compressed(self, momenta: Any) -> None:
        m = self.clipped(self.exchanged(momenta * self.scale) / self.scale)
        grad = (m - self.betas[0] * self.m) / (1 - self.betas[0])
        self.m, self.fresh = m, self.betas[1] * self.fresh + (1 - self.betas[1]) * grad ** 2
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


DEFAULTS = {"max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5,
            "factor_threshold": 0.1, "bias_correction": True, "eps_inside_sqrt": False}
OTHERS = {"factor_threshold": 0.02, "factor_max": 1.5, "factor_min": 0.8, "coeff_beta": 0.7, "max_coeff": 0.8,
          "bias_correction": False, "eps_inside_sqrt": True}


@pytest.mark.parametrize("kind, ranks, stage, own, clip", [
    (Reference, 1, 0, {}, 0.2), (Reference, 2, 0, {}, 0.0), (Reference, 3, 1, {"bias_correction": False}, 0.2),
    (LambReference, 2, 0, {}, 0.0), (LambReference, 3, 1, OTHERS, 0.2)])
def test_fifty_steps_are_those_of_the_reference(kind: type[Reference], ranks: int, stage: int, own: dict[str, Any],
                                                clip: float) -> None:
    reference = kind(ranks, clip, {**DEFAULTS, **own})
    reference.run(50)
    given = tuple(f"{name}={str(value).lower()}" for name, value in own.items())
    by_rank = trained(kind.kind, ranks, 50, stage=stage, clip_grad=clip, optimizer_params=given)
    wanted = reference.weights()
    for found, norms, scalars in by_rank:
        assert norms == pytest.approx(reference.norms, rel=1e-5)
        for name, weight in found.items():
            off = (weight.double() - wanted[name]).norm()
            assert off <= 1e-6 * wanted[name].norm(), f"{name} is off by {off / wanted[name].norm():.1e}"
            if isinstance(reference, LambReference):
                trust = reference.average[name], reference.factor[name]
                assert scalars["trust"][name] == pytest.approx(trust, rel=1e-5)
    assert same([by_rank[0]] * ranks, by_rank), "the ranks have other weights"
    if isinstance(reference, LambReference):
        held = reference.held
        assert reference.scale.max() > 3 * reference.scale.min(), "the published scale has nothing to do"
        assert held["falling"] and (held["rising"] if own else held["lowest"] or held["highest"]), held


# ---- any split of the work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, accumulation, precision", [
    *pairs(["onebit_adam"], [1, 2], PRECISIONS, each=2), *pairs(["onebit_lamb"], [2], PRECISIONS, each=1)])
def test_stages_0_and_1_are_alike(kind: str, accumulation: int, precision: dict[str, Any]) -> None:
    """On two ranks, where the sums of Adam's warm-up are the same bits (collectives.py). Lamb adds norms of parts in
    another order, in fp64: what is rounded to fp32 is mostly the same, and masters are far closer than a step of bf16
    is wide."""
    first, second = (trained(kind, 2, 15, stage=stage, accumulation=accumulation, clip_grad=0.2, **precision)
                     for stage in (0, 1))
    if kind == "onebit_adam":
        assert same(first, second)
        return
    (found, norms, scalars), (other, other_norms, others) = first[0], second[0]
    assert scalars["frozen_at"] == FREEZE
    assert norms == pytest.approx(other_norms, rel=1e-6, nan_ok=True), "in fp16 one step is skipped"
    for name in found:
        assert scalars["trust"][name] == pytest.approx(others["trust"][name], rel=1e-6)
        assert (found[name] != other[name]).float().mean() < 0.01 or torch.allclose(found[name], other[name], 1e-6, 0)


def gpt2_trained(rank: int, world: int, tp: int, kind: str, stage: int) -> tuple[Any, ...]:
    """Weights, those of them that every tensor parallel rank has, this rank's place among them, and the rule's
    scalars."""
    grid = groups.build(tp)
    engine = gpt2_engine(configure_gpt2(**settings_of(
        kind, zero_stage=stage, bf16=kind == "onebit_adam", model_parallel_size=tp, clip_grad=0.5, batch_size=2,
        global_batch_size=4)), grid)
    for step in range(2 * FREEZE):
        rows = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(step))
        engine.backward(gpt2_loss(engine, rows.chunk(2)[grid.dp.rank]))
        engine.step()
    assert engine.compressed_exchanges
    slots = [slot for line in engine.compressed_exchanges for slot in line.layout.slots]
    replicated = [slot.name for slot in slots if slot.partition is None]
    return weights(engine), replicated, grid.tp.rank, engine.rule.scalars()


def test_gpt2_trains_on_tensor_parallel_ranks() -> None:
    """What ranks have in common is the same. Of Adam stages 0 and 1 are the same bits; of Lamb the warm-up's averages
    are those of whole parameters."""
    first, second = (run_ranks(gpt2_trained, 4, 2, "onebit_adam", stage) for stage in (0, 1))
    lamb, alone = (run_ranks(gpt2_trained, 2 * tp, tp, "onebit_lamb", 1) for tp in (2, 1))
    for by_rank in (first, lamb):
        for found, replicated, tp, scalars in by_rank:
            assert scalars == by_rank[0][3]
            assert all(torch.equal(found[name], by_rank[tp][0][name]) for name in found)
            assert all(torch.equal(found[name], by_rank[0][0][name]) for name in replicated)
    assert all(torch.equal(one[0][name], other[0][name]) for one, other in zip(first, second) for name in one[0])
    for name, (average, _) in alone[0][3]["trust"].items():
        assert lamb[0][3]["trust"][name][0] == pytest.approx(average, rel=1e-3), name


@on_ranks(2)
def test_a_gradient_that_overflows_on_one_rank_leaves_everything_as_it_was(rank: int, world: int) -> None:
    for stage in (0, 1):
        engine = engine_of(stage, fp16=True, initial_loss_scale=2.0**8)
        train(engine, 0, 2 * FREEZE)
        assert engine.core.compressed_exchanges
        before = all_state(engine)
        engine.backward(engine(batch("onebit_adam", 99, rank)) * (float("inf") if rank else 1.0))
        report = engine.step()
        assert report is not None and not report.applied
        after = all_state(engine)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        train(engine, FREEZE + 3, FREEZE + 5)
        assert not torch.equal(all_state(engine)[0], after[0])
    engine = engine_of(max_skipped_in_a_row=0)
    train(engine, 0, FREEZE + 2)
    engine.backward(engine(batch("onebit_adam", FREEZE + 2, rank)) * (float("nan") if rank else 1.0))
    with pytest.raises(NumericsError, match="in the gradient of rank 1"):
        engine.step()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def goes_on(rank: int, world: int, kind: str, folder: str, stage: int, at: int, is_new: bool) -> tuple[Any, Any]:
    """Four steps after those that a new run saves, or after a load of them."""
    engine = engine_of(stage, optimizer=kind)
    if is_new:
        train(engine, 0, at, kind)
        engine.save_checkpoint(folder, tag="kept")
    else:
        engine.load_checkpoint(folder, tag="kept")
        engine.save_checkpoint(folder, tag="again")  # knows what it has not looked at yet
        engine = engine_of(stage, optimizer=kind)
        engine.load_checkpoint(folder, tag="again")
    train(engine, at, at + 4, kind)
    return all_state(engine), engine.core.rule.scalars()


@pytest.mark.parametrize("kind, stage, at", [
    ("onebit_adam", 0, FREEZE - 1), ("onebit_adam", 1, FREEZE + 5), ("onebit_adam", 1, FREEZE),
    ("onebit_lamb", 1, FREEZE - 1), ("onebit_lamb", 0, FREEZE), ("onebit_lamb", 0, FREEZE + 5)])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, kind: str, stage: int, at: int) -> None:
    kept, again = (run_ranks(goes_on, 3, kind, str(tmp_path), stage, at, is_new) for is_new in (True, False))
    for (one, knows), (other, knew) in zip(kept, again, strict=True):
        assert len(one) > 4 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert knows == knew


def owed(rank: int, world: int, kind: str, folder: str, stage: int, saves: bool) -> tuple[dict[str, Tensor], Any]:
    """By parameter, what all ranks and servers owe: this rank's part of the mean; and what the rule knows."""
    engine, at = engine_of(stage, optimizer=kind), FREEZE + 5
    if saves:
        train(engine, 0, at, kind)
        engine.save_checkpoint(folder, tag="kept")
    else:
        engine.load_checkpoint(folder, tag="kept")
    found: dict[str, Tensor] = {}
    for line in engine.core.compressed_exchanges:
        for slot in line.layout.slots:
            found[slot.name] = line.one_bit_mean.worker_error[slot.offset : slot.end] / world
        for segment in line.layout.segments(rank):
            own = line.one_bit_mean.server_error[segment.shard_offset : segment.shard_offset + segment.count]
            found[segment.slot.name][segment.slot_offset : segment.slot_offset + segment.count] += own
    knows = engine.core.rule.scalars()
    train(engine, at, at + 2, kind)
    assert all(weight.isfinite().all() for weight in weights(engine).values())
    return found, knows


@pytest.mark.parametrize("kind, ranks, stages", [("onebit_adam", 1, (1, 1)), ("onebit_lamb", 3, (1, 0))])
def test_on_other_ranks_the_mean_of_what_is_owed_stays(tmp_path: Path, kind: str, ranks: int,
                                                       stages: tuple[int, int]) -> None:
    kept = run_ranks(owed, 2, kind, str(tmp_path), stages[0], True)
    again = run_ranks(owed, ranks, kind, str(tmp_path), stages[1], False)
    assert all(knows == kept[0][1] for _, knows in (*kept, *again))
    for name in filter(NUMBERS.get, NUMBERS):
        wanted, found = (sum(debts[name].double() for debts, _ in by_rank) for by_rank in (kept, again))
        assert wanted.abs().max() > 0 and (found - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name


@on_ranks(2)
def test_without_the_optimizers_state_the_warm_up_begins_anew(rank: int, world: int, tmp_path: Path) -> None:
    goes_on(rank, world, "onebit_adam", str(tmp_path), 0, FREEZE + 2, True)
    engine = engine_of(0)
    engine.load_checkpoint(tmp_path, tag="kept", load_optimizer_states=False)
    assert not engine.core.compressed_exchanges
    train(engine, 0, FREEZE)
    assert not engine.core.compressed_exchanges
    train(engine, FREEZE, FREEZE + 1)
    assert engine.core.compressed_exchanges


# ---- when it freezes -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_end_of_the_warm_up_is_found(rank: int, world: int) -> None:
    """Of a run whose gradients hardly change, and whose rate rises for 35 steps. beta2 of 0.9: looked at every 10
    steps; the first time that no rate of the last 10 steps rose is step 50."""
    for stage in (0, 1):
        engine = engine_of(stage, onebit_freeze_step="auto", adam_beta2=0.9)
        for step in range(60):
            for group in engine.core.param_groups:
                group["lr"] = 1e-6 * min(1.0, (step + 1) / 35)
            engine.backward(engine(batch("onebit_adam", 0, rank)))
            engine.step()
        assert engine.core.rule.scalars()["frozen_at"] == 50


@on_ranks(2)
def test_a_step_that_was_skipped_is_not_taken_for_a_variance_that_has_settled(rank: int, world: int) -> None:
    """A step is begun twice where the variance is looked at, and has moved."""
    engine = engine_of(onebit_freeze_step="auto", adam_beta2=0.9, fp16=True, initial_loss_scale=2.0**2)
    train(engine, 0, 10)
    engine.backward(engine(batch("onebit_adam", 10, rank)) * (float("inf") if rank else 1.0))
    report = engine.step()
    assert report is not None and not report.applied
    train(engine, 10, 11)
    assert engine.core.counters.optimizer_steps == 11 and engine.core.rule.scalars()["frozen_at"] is None


# ---- Lamb: parameters of which there is little to say ----------------------------------------------------------------


BIAS, QUIET = "head.bias", range(FREEZE - 1, FREEZE + 2)
"""A parameter without decay; steps across the end of the warm-up."""


def biases(rank: int, stage: int, quiet: range, **settings: Any) -> list[Tensor]:
    """The bias after each step; it has no gradient at the quiet ones."""
    engine = engine_of(stage, optimizer="onebit_lamb", **settings)
    found = []
    for step in range(2 * FREEZE):
        gradients = by_name(batch("onebit_lamb", step, rank))
        if step in quiet:
            gradients[BIAS].zero_()
        engine.backward(engine(torch.cat(list(gradients.values()))))
        engine.step()
        found.append(weights(engine)[BIAS])
    assert all(weight.isfinite().all() for weight in weights(engine).values())
    return found


@on_ranks(2)
def test_a_momentum_of_zeros_moves_nothing_and_any_other_does(rank: int, world: int) -> None:
    """With beta1 of 0, where v has seen other gradients; and a parameter that never has a gradient."""
    for stage in (0, 1):
        found = biases(rank, stage, QUIET, adam_beta1=0.0)
        assert [step for step in range(1, 2 * FREEZE) if torch.equal(found[step], found[step - 1])] == list(QUIET)
        for bias in biases(rank, stage, range(2 * FREEZE), clip_grad=0.2):
            assert torch.equal(bias, Net().head.bias)


def test_a_parameter_whose_ratio_was_always_1_does_not_stand_still() -> None:
    (before, _, scalars), (after, _, _) = (
        trained("onebit_lamb", 2, steps, optimizer_params=("min_coeff=1", "max_coeff=1"))[0]
        for steps in (FREEZE, FREEZE + 1))
    assert all(average == 0 for average, _ in scalars["trust"].values())
    assert not any(torch.equal(after[name], weight) for name, weight in before.items() if weight.numel())


# ---- what is set by hand ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_ranks_know_from_compressed_messages_cannot_be_set_by_hand(rank: int, world: int) -> None:
    for stage in (0, 1):
        engine = engine_of(stage)
        train(engine, 0, FREEZE + 3)
        bias = engine.module.body.bias
        engine.backward(engine(batch("onebit_adam", FREEZE + 3, rank)))
        assert safe_get_full_grad(bias) is None
        with pytest.raises(ConfigError, match=r"the exp_avg of parameter 'body.bias' of shape \(30,\) cannot be set"):
            safe_set_full_optimizer_state(bias, torch.full((30,), 0.25), "exp_avg")
        with pytest.raises(ConfigError, match="each has its own"):
            safe_set_full_grad(bias, torch.zeros(30))
        engine.step()
