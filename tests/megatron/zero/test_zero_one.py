"""0/1 Adam in the engine: Adam while its variance learns at every step, then what NumPy makes of workers, servers and
steps that nobody else hears of; and on from a checkpoint in the midst of those."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.errors import CheckpointError, ConfigError
from megatron.optim.zero_one import ExchangeTimes, LearningTimes
from megatron.zero.api.engine import Engine
from megatron.zero.api.init import GatheredParameters
from megatron.zero.utils import safe_set_full_optimizer_state
from mpu import groups
from tests.covering import cells
from tests.distributed import run_ranks
from tests.late_wire import late_wire
from tests.megatron.zero.given_gradients import NUMBERS, WIDTH, Flat, Net, all_state, by_name, noisy, same, train
from tests.megatron.zero.run import configure, configure_gpt2, engine_around, gpt2_engine, gpt2_loss, weights

LR, DECAY, BETAS, EPS = 2**-9, 2**-3, (0.9, 0.95), 1e-4
LEARNS, FREEZE, EACH, LARGEST = 3, 14, 5, 3
"""v learns at the steps 0 1 2, 4 6 8, 12; ranks exchange after the local steps 0 1 2 3 4, 6 8 9, 12 15 18 21 ..."""
SETTINGS = {"optimizer": "zeroone_adam", "onebit_freeze_step": str(FREEZE), "clip_grad": 0.0, "weight_decay": DECAY,
            "adam_beta2": BETAS[1], "adam_eps": EPS, "lr": LR,
            "optimizer_params": (f"var_update_scaler={LEARNS}", f"local_step_scaler={EACH}",
                                 f"local_step_clipper={LARGEST}")}


def engine_of(stage: int = 0, accumulation: int = 1, **settings: Any) -> Engine:
    config = configure(**{**SETTINGS, "zero_stage": stage, **settings})
    return engine_around(Net(), config, groups.build(1), accumulation)


def batch(step: int, rank: int) -> Tensor:
    """One row of the table has its first gradient at a step at which v does not learn, and one when it is frozen."""
    flat = noisy(step, rank)
    table = by_name(flat)["table.weight"]
    if step in (5, 6, 7) or step > FREEZE:
        table[7 * WIDTH : 8 * WIDTH] = 0.01 * (rank + 1)
    if step > FREEZE:
        table[8 * WIDTH : 9 * WIDTH] = 0.02
    return flat


def trained(rank: int, world: int, steps: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(**settings)
    return weights_after(engine, steps)


def weights_after(engine: Engine, steps: int, first: int = 0) -> tuple[dict[str, Tensor], list[float]]:
    """This rank's weights, and the norms that steps reported."""
    norms = train(engine, first, steps, batch)
    return {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}, norms


def met(local: int) -> bool:
    """By counting."""
    step, distance, found = 0, 1, set()
    while step <= local:
        end = step + EACH if distance < LARGEST else local + LARGEST
        found |= {*range(step + distance - 1, end, distance)} | ({end - 1} if distance < LARGEST else set())
        step, distance = end, min(2 * distance, LARGEST)
    return local in found


# ---- when what happens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [1, 2, 3, 16])
def test_the_variance_learns_so_often_at_each_distance(each: int) -> None:
    times, wanted, step, distance = LearningTimes(each), [], -1, 1
    while step < 2000:
        for _ in range(each):
            step += distance
            wanted.append(step)
        distance *= 2
    assert [step for step in range(2000) if times.has(step)] == [step for step in wanted if step < 2000]
    assert all(times.before(step) == sum(one < step for one in wanted) for step in range(2000))


@pytest.mark.parametrize("each, largest", [(5, 3), (1, 1), (7, 16), (4, 2), (100, 5)])
def test_ranks_exchange_at_growing_distances_up_to_the_largest(each: int, largest: int) -> None:
    found = [step for step in range(3000) if ExchangeTimes(each, largest).has(step)]
    assert found[:each] == list(range(each)) and len(found) < 3000 or largest == 1
    apart = np.diff([-1, *found])
    assert apart.max() == largest and set(apart[-20:]) == {largest}
    for power in range((largest - 1).bit_length()):
        block = [step for step in found if power * each <= step < (power + 1) * each]
        assert len(block) == -(-each // 2**power), f"a distance of {2**power} lasts {each} steps"


# ---- beside Adam, and beside the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_while_the_variance_learns_at_every_step_it_is_adam_bit_for_bit(stage: int, bias: bool) -> None:
    own = {"stage": stage, "clip_grad": 0.2, "onebit_freeze_step": "never"}
    correct = f"bias_correction={str(bias).lower()}"
    zero_one = {**own, "optimizer_params": (*SETTINGS["optimizer_params"], correct)}
    adam = {**own, "onebit_freeze_step": "5", "optimizer": "adam", "optimizer_params": (correct,)}
    for steps, is_adam in ((LEARNS, True), (LEARNS + 1, False)):
        found, wanted = (run_ranks(trained, 2, steps, each) for each in (zero_one, adam))
        assert same([one for one, _ in found], [one for one, _ in wanted]) == is_adam


@dataclass
class Reference:
    """All ranks at once, by NumPy in fp64; each has weights of its own."""

    ranks: int
    clip: float = 0.0
    bias: bool = True
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        flat = self.flat = Flat(self.ranks)
        self.x, self.decay, self.v, self.served = (np.zeros(flat.numel) for _ in range(4))
        for name, parameter in Net().named_parameters():
            self.x[flat.places[name]] = parameter.detach().flatten().numpy()
            self.decay[flat.places[name]] = DECAY if parameter.dim() >= 2 else 0
        self.m, self.u, self.owed, self.own = (np.zeros((self.ranks, flat.numel)) for _ in range(4))
        self.own[:] = self.x
        self.learned, self.rate = 0, np.zeros(flat.numel)

    def of_rank(self, rank: int) -> dict[str, Tensor]:
        flat = self.flat
        return {name: torch.from_numpy(self.own[rank][place]).view(flat.shapes[name])
                for name, place in flat.places.items()}

    def step(self, step: int) -> None:
        grads = np.zeros((self.ranks, self.flat.numel))
        for rank in range(self.ranks):
            for name, run in by_name(batch(step, rank)).items():
                grads[rank][self.flat.places[name]] = run.numpy()
        (self.together if step < FREEZE else self.alone)(step, grads)

    def clipped(self, grads: Any, norm: float) -> Any:
        self.norms.append(norm)
        return grads * (min(1, self.clip / (norm + 1e-6)) if self.clip else 1)

    def divisor(self) -> Any:
        return np.sqrt(self.v / (1 - BETAS[1] ** self.learned if self.bias else 1)) + EPS

    def lr(self, step: int) -> float:
        return LR / (1 - BETAS[0] ** (step + 1) if self.bias else 1)

    def together(self, step: int, grads: Any) -> None:
        learns = step in (0, 1, 2, 4, 6, 8, 12)
        came = grads.mean(0) if learns else self.exchange(grads)
        came = self.clipped(came, float(np.linalg.norm(came)))
        self.m[:] = BETAS[0] * self.m[0] + (1 - BETAS[0]) * came
        if not learns:
            self.m *= self.v != 0
        if learns:
            self.v, self.learned = BETAS[1] * self.v + (1 - BETAS[1]) * came**2, self.learned + 1
        self.x = self.x * (1 - LR * self.decay) - self.lr(step) * self.m[0] / self.divisor()
        self.own[:] = self.x

    def alone(self, step: int, grads: Any) -> None:
        if step == FREEZE:
            self.flat.forget_negligible(self.v)
            self.owed[:], self.served[:] = 0, 0
        norm = np.sqrt((np.linalg.norm(grads, axis=1) ** 2).mean())
        self.m = (BETAS[0] * self.m + (1 - BETAS[0]) * grads) * (self.v != 0)
        self.u = self.u * (1 - LR * self.decay) + self.lr(step) * self.m
        self.rate = self.rate * (1 - LR * self.decay) + self.lr(step)
        self.own = self.own * (1 - LR * self.decay) - self.lr(step) * self.m / self.divisor()
        self.x = self.x * (1 - LR * self.decay)
        if met(step - FREEZE):
            came = self.exchange(self.u / self.rate)
            came = self.clipped(came, float(np.linalg.norm(came)))
            self.x = self.x - self.rate * came / self.divisor()
            self.m[:], self.own[:] = came, self.x
            self.u[:], self.rate[:] = 0, 0
        else:
            self.norms.append(float(norm))

    def exchange(self, given: Any) -> Any:
        self.flat.forget_negligible(self.v)
        self.owed = (self.owed + given) * (self.v != 0)
        self.served = self.served * (self.v != 0)
        says = np.stack([self.say(one) for one in self.owed])
        self.owed -= says
        self.served += says.mean(0)
        said = self.say(self.served)
        self.served -= said
        return said

    def say(self, x: Any) -> Any:
        said = np.zeros_like(x)
        for part in self.flat.segments:
            live = self.v[part] != 0
            size = np.sqrt((x[part][live] ** 2).sum() / max(1, live.sum()))
            said[part] = np.where(x[part] >= 0, size, -size) * live
        return said


@pytest.mark.parametrize("ranks, bias, clip", cells([2, 3], [True, False], [0.0, 0.2], each=2))
def test_52_steps_are_those_of_the_reference(ranks: int, bias: bool, clip: float) -> None:
    """The last one is not an exchange: every rank has weights of its own."""
    reference, steps = Reference(ranks, clip, bias), 52
    for step in range(steps):
        reference.step(step)
    assert not met(steps - 1 - FREEZE)
    settings = {"clip_grad": clip,
                "optimizer_params": (*SETTINGS["optimizer_params"], f"bias_correction={str(bias).lower()}")}
    by_rank = run_ranks(trained, ranks, steps, settings)
    for rank, (found, norms) in enumerate(by_rank):
        assert norms == pytest.approx(reference.norms, rel=1e-5)
        wanted = reference.of_rank(rank)
        for name, weight in found.items():
            off = (weight.double() - wanted[name]).norm()
            assert off <= 1e-6 * wanted[name].norm(), f"{name} of rank {rank} is off by {off / wanted[name].norm():.1e}"
    assert not same([by_rank[0][0]], [by_rank[1][0]]), "ranks did not step by themselves"


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**8}])
def test_after_an_exchange_all_ranks_have_the_same_weights(precision: dict[str, Any]) -> None:
    steps = 13 + FREEZE
    assert met(steps - 1 - FREEZE) and not met(steps - 2 - FREEZE)
    found = [one for one, _ in run_ranks(trained, 3, steps, {**precision, "clip_grad": 0.2, "accumulation": 2})]
    assert same(found, [found[0]] * 3)
    before = [one for one, _ in run_ranks(trained, 3, steps - 1, {**precision, "clip_grad": 0.2, "accumulation": 2})]
    assert not same(before, [before[0]] * 3)


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_stages_0_and_1_are_the_same_bits_while_ranks_step_together(precision: dict[str, Any]) -> None:
    own = {**precision, "clip_grad": 0.2, "onebit_freeze_step": "never"}
    first, second = (run_ranks(trained, 2, 30, {**own, "stage": stage}) for stage in (0, 1))
    assert same([one for one, _ in first], [one for one, _ in second])


def test_a_row_that_had_no_gradient_before_the_variance_froze_only_decays() -> None:
    (first, _), *_ = run_ranks(trained, 2, 30, {})
    unused = Net().table.weight.detach()[8]
    for _ in range(30):
        unused = unused * (1 - LR * DECAY)
    assert (first["table.weight"][8] - unused).abs().max() < 1e-6


def _late(rank: int, world: int) -> dict[str, Tensor]:
    with late_wire(seed=0):
        return weights_after(engine_of(), 2 * FREEZE)[0]


def test_nobody_reads_what_is_still_on_its_way() -> None:
    assert same(run_ranks(_late, 3), [one for one, _ in run_ranks(trained, 3, 2 * FREEZE, {})])


def _gpt2(rank: int, world: int, tp: int) -> tuple[dict[str, Tensor], int]:
    grid = groups.build(tp)
    engine = gpt2_engine(configure_gpt2(**{**SETTINGS, "model_parallel_size": tp, "clip_grad": 0.5, "batch_size": 2,
                                           "global_batch_size": 4}), grid)
    for step in range(FREEZE + 8):
        rows = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(step))
        engine.backward(gpt2_loss(engine, rows.chunk(2)[grid.dp.rank]))
        engine.step()
    return weights(engine), grid.tp.rank


def test_gpt2_trains_on_tensor_parallel_ranks() -> None:
    by_rank = run_ranks(_gpt2, 4, 2)
    for found, tp in by_rank:
        first = next(one for one, rank in by_rank if rank == tp)
        assert not met(7) and all(weight.isfinite().all() for weight in found.values())
        assert found.keys() == first.keys()


def _overflows(rank: int, world: int) -> None:
    engine = engine_of(fp16=True, initial_loss_scale=2.0**8)
    train(engine, 0, FREEZE + 8, batch)
    before = all_state(engine)
    for _ in range(2):
        engine.backward(engine(batch(99, rank)) * (float("inf") if rank else 1.0))
        report = engine.step()
        assert report is not None and not report.applied
        assert all(torch.equal(one, other) for one, other in zip(before, all_state(engine), strict=True))
    train(engine, FREEZE + 8, FREEZE + 9, batch)
    assert not torch.equal(all_state(engine)[1], before[1])


def test_a_gradient_that_overflows_on_one_rank_leaves_everything_as_it_was() -> None:
    run_ranks(_overflows, 2)


def _momentum(rank: int, world: int, rates: list[float]) -> tuple[list[float], dict[str, Tensor]]:
    """The norm of the momentum after each step of the second half, and the weights."""
    engine, found = engine_of(onebit_freeze_step="5"), []
    for step, rate in enumerate(rates):
        for group in engine.core.param_groups:
            group["lr"] = rate
        train(engine, step, step + 1, noisy)
        found.append(sum(float(bucket.kept.at_hand("exp_avg").norm()) ** 2 for bucket in engine.core.buckets) ** 0.5)
    return found, weights(engine)


@pytest.mark.parametrize("low", [1e-8, 1e-5, 0.0])
def test_the_momentum_does_not_grow_as_the_rate_falls(low: float) -> None:
    """Nor do weights run away when the rate rises again."""
    steady = [1e-3] * 80
    (usual, last), *_ = run_ranks(_momentum, 2, steady)
    (found, after), *_ = run_ranks(_momentum, 2, [*steady[:20], *[low] * 30, *steady[50:]])
    assert max(found[10:]) < 2 * max(usual[10:])
    for name, start in Net().named_parameters():
        assert (after[name] - start).norm() <= 2 * (last[name] - start).norm(), name


def _in_parts(rank: int, world: int, way: str) -> tuple[dict[str, Tensor], list[float]]:
    """Of a step's gradients, all in one backward that ends a step; or some in another before it; or none in another
    after it."""
    engine, norms = engine_of(), []
    for step in range(FREEZE + 8):
        flat = batch(step, rank)
        odd = torch.arange(len(flat)) % 2
        for part in [flat * odd, flat * (1 - odd)] if way == "two" else [flat]:
            engine.backward(engine(part))
        if way == "none":
            engine.backward(torch.zeros((), requires_grad=True) * 1.0)
        report = engine.step()
        assert report is not None
        norms.append(report.grad_norm)
    return {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}, norms


@pytest.mark.parametrize("way", ["two", "none"])
def test_backwards_before_a_step_add_up(way: str) -> None:
    one, other = (run_ranks(_in_parts, 2, each) for each in ("one", way))
    for (found, norms), (again, also) in zip(one, other, strict=True):
        assert norms == also and same([found], [again])


# ---- weights that are a rank's own -----------------------------------------------------------------------------------


def _edits(rank: int, world: int, steps: int) -> str:
    engine = engine_of()
    train(engine, 0, steps, batch)
    try:
        with GatheredParameters([engine.module.head.bias], modifier_rank=0):
            engine.module.head.bias.data.fill_(1.0)
    except ConfigError as error:
        return str(error)
    assert (engine.module.head.bias == 1).all()
    return "done"


@pytest.mark.parametrize("steps, told", [(FREEZE, "done"), (FREEZE + 5, "done"), (FREEZE + 6, "cannot be edited now")])
def test_weights_that_differ_are_not_edited(steps: int, told: str) -> None:
    assert all(told in found for found in run_ranks(_edits, 2, steps))


def _refuses(rank: int, world: int) -> str:
    engine = engine_of()
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    train(engine, 0, FREEZE + 6, batch)
    with pytest.raises(ConfigError) as told:
        engine.load_module_state_dict(state)
    train(engine, FREEZE + 6, FREEZE + 8, batch)  # as if nothing had been
    return str(told.value)


def test_a_load_of_weights_that_is_refused_changes_nothing() -> None:
    assert all("cannot be edited now" in told for told in run_ranks(_refuses, 2))


def _sets_states(rank: int, world: int) -> float:
    engine = engine_of()
    train(engine, 0, FREEZE + 6, batch)
    bias = engine.module.head.bias
    before = bias.detach().clone()
    safe_set_full_optimizer_state(bias, torch.full((5,), 1e-3), "momentum_accumulator")
    engine.core.check_before_save()
    return float((bias - before).abs().max())


def test_states_that_weights_are_made_of_move_them() -> None:
    assert all(run_ranks(_sets_states, 2))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _saves(rank: int, world: int, folder: str, at: int, precision: dict[str, Any]) -> Any:
    engine = engine_of(**precision)
    before, _ = weights_after(engine, at)
    engine.save_checkpoint(folder, tag="kept")
    after, _ = weights_after(engine, at + 6, at)
    return before, after, all_state(engine), engine.core.rule.scalars()


def _resumes(rank: int, world: int, folder: str, at: int, precision: dict[str, Any]) -> Any:
    engine = engine_of(**precision)
    train(engine, 0, FREEZE + 6, batch)  # something to forget
    engine.load_checkpoint(folder, tag="kept")
    before, _ = weights_after(engine, at, at)
    after, _ = weights_after(engine, at + 6, at)
    return before, after, all_state(engine), engine.core.rule.scalars()


@pytest.mark.few(4)
@pytest.mark.parametrize("at, precision", cells(
    [LEARNS, LEARNS + 1, 6, 7, FREEZE, FREEZE + 5, FREEZE + 6, FREEZE + 11, FREEZE + 12], [{}, {"bf16": True}]))
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, at: int, precision: dict[str, Any]) -> None:
    kept, again = (run_ranks(work, 3, str(tmp_path), at, precision) for work in (_saves, _resumes))
    for (before, after, state, knows), (found, then, other, knew) in zip(kept, again, strict=True):
        assert same([before, after], [found, then])
        assert len(state) == len(other) and all(torch.equal(a, b) for a, b in zip(state, other, strict=True))
        assert knows == knew


def _on_average(rank: int, world: int, folder: str, at: int, saves: bool) -> dict[str, dict[str, Tensor]]:
    """Kind -> parameter -> this rank's part of the mean."""
    engine = engine_of()
    if saves:
        train(engine, 0, at, batch)
        engine.save_checkpoint(folder, tag="kept")
    else:
        engine.load_checkpoint(folder, tag="kept")
    found: dict[str, dict[str, Tensor]] = {"weight": {name: weight.detach() / world for name, weight in
                                                      engine.module.named_parameters()}}
    for line in engine.core.exchanged:
        for kind in ("owed", "exp_avg", "momentum_accumulator"):
            numbers = line.mean.owed if kind == "owed" else line.bucket.kept.at_hand(kind)
            assert numbers is not None
            found[kind] = {slot.name: numbers[slot.offset : slot.end] / world for slot in line.layout.slots}
    train(engine, at, at + 5, batch)
    assert all(weight.isfinite().all() for weight in weights(engine).values())
    return found


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("at", [FREEZE + 6, FREEZE + 12])
def test_on_other_ranks_the_means_stay(tmp_path: Path, at: int, ranks: int) -> None:
    kept = run_ranks(_on_average, 2, str(tmp_path), at, True)
    again = run_ranks(_on_average, ranks, str(tmp_path), at, False)
    for kind in kept[0]:
        for name in (name for name in NUMBERS if NUMBERS[name]):
            wanted, found = (sum(one[kind][name].double() for one in by_rank) for by_rank in (kept, again))
            assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max(), (kind, name)


def _with_another_timetable(rank: int, world: int, folder: str, at: int) -> Any:
    engine = engine_of(optimizer_params=(f"var_update_scaler={LEARNS}", "local_step_scaler=1", "local_step_clipper=1"))
    engine.load_checkpoint(folder, tag="kept")
    before, _ = weights_after(engine, at, at)
    after, _ = weights_after(engine, at + 1, at)
    return before, after


@pytest.mark.parametrize("at", [FREEZE + 10, FREEZE + 11])
def test_a_run_that_is_to_exchange_at_other_times_goes_on_from_what_it_has(tmp_path: Path, at: int) -> None:
    """In the midst of its own steps, and after an exchange."""
    kept = run_ranks(_saves, 2, str(tmp_path), at, {})
    again = run_ranks(_with_another_timetable, 2, str(tmp_path), at)
    for (before, *_), (found, _) in zip(kept, again, strict=True):
        assert same([before], [found])
    assert same([again[0][1]], [again[1][1]]), "every step ends with an exchange now"


def _never_again(rank: int, world: int, folder: str, stage: int) -> tuple[str, bool]:
    engine = engine_of(stage, onebit_freeze_step="never")
    before = all_state(engine)
    try:
        engine.load_checkpoint(folder, tag="kept")
    except CheckpointError as error:
        return str(error), all(torch.equal(one, other) for one, other in zip(before, all_state(engine), strict=True))
    return "", False


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_whose_ranks_step_by_themselves_does_not_go_on_without(tmp_path: Path, stage: int) -> None:
    run_ranks(_saves, 2, str(tmp_path), FREEZE + 6, {})
    assert all("--onebit-freeze-step never rules out" in told and as_it_was
               for told, as_it_was in run_ranks(_never_again, 2, str(tmp_path), stage))


def _weights_alone(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], bool]:
    engine = engine_of()
    train(engine, 0, FREEZE + 6, batch)
    engine.load_checkpoint(folder, tag="kept", load_optimizer_states=False)
    return {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}, \
        engine.core.rule.has_drifted


def test_without_the_optimizers_state_all_ranks_begin_with_the_weights_of_the_last_exchange(tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path), FREEZE + 6, {})
    last = [one for one, _ in run_ranks(trained, 2, FREEZE + 5, {})]
    found = run_ranks(_weights_alone, 2, str(tmp_path))
    assert same([one for one, _ in found], last) and not any(drifted for _, drifted in found)
