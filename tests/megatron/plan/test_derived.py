"""Rates from what the probe saw: they predict of the small models what these took, and of several sweeps the least
counts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.plan import probe, probe_fit as sizes_of_probe
from megatron.plan.activations import Device
from megatron.plan.machine_rates import NUM_COLLECTIVE_COSTS, QUIET_SPREAD, MachineRates, Where
from megatron.plan.probe import MOST_SWEEPS, Probe, ProbeTimer
from megatron.plan.probe_fit import (MORE_LAYERS, SIZES, CollectiveTimings, OverlapTimings, PassTimings,
                                     ProbeModelShape, ProbeResult, StepTimings, VariantTimings, elementwise_min,
                                     fit_rates, spread)
from megatron.plan.step_time import step_time
from mpu import groups
from mpu.groups import SOLO, Groups
from tests.distributed import run_ranks
from tests.wires import counted

CPU = torch.device("cpu")


def made_up(seed: int, ranks: int, device: Device = "cpu") -> ProbeResult:
    """Operations take microseconds, models some milliseconds, of which each block takes as long."""
    rng, sizes = random.Random(seed), SIZES[device]

    def both() -> PassTimings:
        return PassTimings(rng.uniform(1e-7, 1e-6), rng.uniform(1e-7, 1e-6))

    def grown(taken: StepTimings, **more: float) -> StepTimings:
        return taken._replace(**{name: getattr(taken, name) + seconds for name, seconds in more.items()})

    def pair() -> tuple[StepTimings, StepTimings]:
        few = StepTimings(*(rng.uniform(0.01, 0.02) for _ in range(3)))
        return few, grown(few, forward=MORE_LAYERS * rng.uniform(1e-3, 2e-3),
                          backward=MORE_LAYERS * rng.uniform(1e-3, 2e-3), step=rng.uniform(1e-4, 1e-3))

    blocks = tuple(pair() for _ in sizes.shapes)
    first, larger = blocks[0]
    together = tuple(grown(larger, forward=rng.uniform(2e-3, 5e-3), backward=rng.uniform(2e-3, 5e-3))
                     for _ in range(NUM_COLLECTIVE_COSTS if ranks > 1 else 0))
    return ProbeResult(
        tuple(tuple(both() for _ in sizes.widths) for _ in sizes.rows), tuple(both() for _ in sizes.lengths),
        tuple(both() for _ in sizes.lengths), tuple(both() for _ in sizes.elements),
        tuple(rng.uniform(1e-4, 1e-3) for _ in sizes.logits),
        tuple(CollectiveTimings(*(rng.uniform(1e-7, 1e-6) for _ in range(3))) for _ in sizes.bytes) if ranks > 1 else
        (), (OverlapTimings(0.2, 0.1, 0.25), ) if ranks > 1 else (), 0.0, blocks, StepTimings(1.0, 1.0, 1.0),
        VariantTimings(first, grown(first, forward=2e-3), grown(first, backward=5e-3)), together,
        (grown(blocks[1][1], forward=rng.uniform(0.1, 0.2)), ) if ranks > 1 else (),
        sum((*together, larger)[0]) + 3e-3, ())


def rates(seen: ProbeResult, ranks: int) -> MachineRates:
    return fit_rates(seen, Where("made up", "2.13.0", "cpu", "fp32", ranks, 1))


def predicted(shape: ProbeModelShape, found: MachineRates, ranks: int = 1) -> float:
    return step_time(shape.run("fp32", "cpu", ranks), found).total


@pytest.mark.parametrize("seed", range(5))
def test_the_models_of_the_probe_are_predicted_to_take_what_they_took(seed: int) -> None:
    seen, first = made_up(seed, 1), SIZES["cpu"].shapes[0]
    found = rates(seen, 1)
    in_training = 3e-3
    assert predicted(first, found) == pytest.approx(sum(seen.blocks[0][0]) + in_training)
    assert predicted(first.larger, found) == pytest.approx(seen.training)
    assert predicted(first._replace(stage=3), found) == pytest.approx(sum(seen.variants.split) + in_training)
    assert predicted(first._replace(recomputes=True), found) == pytest.approx(
        sum(seen.variants.recomputed) + in_training)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", range(NUM_COLLECTIVE_COSTS))
def test_so_are_those_of_two_ranks(kind: int, seed: int) -> None:
    seen, larger = made_up(seed, 2), SIZES["cpu"].shapes[0].larger
    assert predicted(larger.together[kind], rates(seen, 2), 2) == pytest.approx(sum(seen.together[kind]) + 3e-3)


@pytest.mark.parametrize("seed", range(5))
def test_so_are_those_of_tensor_parallel_ranks(seed: int) -> None:
    seen, shape = made_up(seed, 2), SIZES["cpu"].cut(2)
    assert shape and predicted(shape, rates(seen, 2), 2) == pytest.approx(sum(seen.cut[0]) + 3e-3)


def test_differences_that_only_a_busy_machine_makes_are_nothing_below_zero() -> None:
    seen = made_up(0, 2)
    few, many = seen.blocks[0]
    odd = seen._replace(training=0.0,
                        blocks=((many, few), *seen.blocks[1:]),
                        together=(StepTimings(0, 0, 0), ) * NUM_COLLECTIVE_COSTS,
                        variants=VariantTimings(many, few, few))
    assert MachineRates.from_dict(rates(odd, 2).as_dict()) == rates(odd, 2)


def test_what_gpus_show_makes_rates_of_them_and_of_their_host() -> None:
    host = SIZES["cpu"]
    seen = made_up(0, 8, "cuda")._replace(link=0.5, host=tuple(0.1 + 0.1 * n for n in range(len(host.shapes) + 1)))
    found = fit_rates(seen, Where("made up", "2.13.0", "cuda", "bf16", 8, 1))
    assert MachineRates.from_dict(found.as_dict()) == found
    assert found.hides == pytest.approx(0.5) and found.link == 2 * SIZES["cuda"].bytes[-2] / 0.5
    assert [seconds for _, seconds in found.host_update.points] == list(seen.host) and found.update != found.host_update


def test_of_several_sweeps_the_least_counts_number_by_number() -> None:
    one, other = made_up(1, 2), made_up(2, 2)
    both = elementwise_min(one, other)
    assert type(both) is ProbeResult and type(both.variants.split) is StepTimings
    assert both.training == min(one.training, other.training)
    assert both.products[2][1] == PassTimings(*map(min, one.products[2][1], other.products[2][1]))
    assert both.blocks[3][1].step == min(one.blocks[3][1].step, other.blocks[3][1].step)
    assert elementwise_min(one) == one


@pytest.mark.parametrize("factors, sweeps", [((1.0, 1.1), 2), ((2.0, 1.0, 1.1), 3), ((2.0, 1.0, 3.0), 3)])
def test_the_probe_sweeps_twice_and_once_more_where_they_differ(
        factors: tuple[float, ...], sweeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(factors)
    monkeypatch.setattr(Probe, "sweep", lambda _: scaled(made_up(0, 1), next(made)))
    found = Probe(ProbeTimer(CPU, SOLO), "fp32", Groups(), Groups()).rates("made up")
    assert next(made, None) is None and len(factors) == sweeps <= MOST_SWEEPS
    once = rates(made_up(0, 1), 1)
    assert replace(found, seconds=0.0, taken="", spread=1.0, where=once.where) == once
    assert found.spread == pytest.approx(sorted(factors)[1]) and (found.spread > QUIET_SPREAD) == (factors[-1] == 3.0)


def test_the_spread_is_that_of_most_numbers() -> None:
    seen = made_up(3, 2)
    assert spread(seen, seen) == 1.0
    assert spread(seen, seen._replace(training=100 * seen.training)) == 1.0
    assert spread(seen, scaled(seen, 1.5), scaled(seen, 4.0)) == pytest.approx(1.5)


def scaled(part: Any, factor: float) -> Any:
    if not isinstance(part, tuple):
        return part * factor
    parts = [scaled(inner, factor) for inner in part]
    return tuple(parts) if type(part) is tuple else type(part)(*parts)


def test_operations_and_exchanges_have_the_rates_that_were_seen() -> None:
    """Nothing of the models makes up for them here."""
    sizes, seen = SIZES["cpu"], made_up(4, 2)
    found = rates(seen, 2)
    for rows, line in zip(sizes.rows, seen.products, strict=True):
        for width, both in zip(sizes.widths, line, strict=True):
            assert found.forward(rows, width) == pytest.approx(2 * rows * width**2 / both.forward)
            assert found.backward(rows, width) == pytest.approx(4 * rows * width**2 / both.backward)
    assert seen.attention != seen.dropping
    for (length, heads), plain, dropping in zip(sizes.lengths, seen.attention, seen.dropping, strict=True):
        assert found.attention_forward(length) == pytest.approx(plain.forward / heads)
        assert found.attention_backward(length) == pytest.approx(plain.backward / heads)
        assert found.dropping_forward(length) == pytest.approx(dropping.forward / heads)
        assert found.dropping_backward(length) == pytest.approx(dropping.backward / heads)
    for elements, both in zip(sizes.elements, seen.dropout, strict=True):
        assert found.dropout_forward(elements) == pytest.approx(both.forward)
        assert found.dropout_backward(elements) == pytest.approx(both.backward)
    for size, exchange in zip(sizes.bytes, seen.exchanges, strict=True):
        assert (found.all_reduce(size), found.reduce_scatter(size), found.all_gather(size)) == pytest.approx(exchange)
    updates = {sizes.largest: seen.largest.step, sizes.shapes[1]: seen.blocks[1][0].step,
               sizes.shapes[1].larger: seen.blocks[1][1].step}
    for shape, seconds in updates.items():
        assert found.update(shape.run("fp32", "cpu").shard_numel) == pytest.approx(seconds)


def sweep(rank: int, world: int) -> tuple[ProbeResult, int]:
    sizes, one = SIZES["cpu"], ProbeModelShape(128, 1, 8)
    SIZES["cpu"] = replace(sizes, rows=(8,), widths=(8,), lengths=((8, 1),), elements=(8,), logits=((8, 8),),
                           bytes=(64, 128), shapes=(one,), largest=one)
    setattr(probe, "SECONDS", 0.0)
    setattr(probe, "MODEL_SECONDS", 0.0)
    setattr(sizes_of_probe, "STEPS_IN_TRAINING", 5)
    data_parallel = groups.build(1)
    found = Probe(ProbeTimer(CPU, data_parallel.world), "fp32", data_parallel, groups.build(2))
    with counted() as sent:
        found.watch.collective_seconds(lambda: None)
        before = len(sent)
        probe.seconds_in_training(one, "fp32", found.watch, data_parallel)
    return found.sweep(), len(sent) - before


def test_a_sweep_of_two_ranks_sees_the_same_on_both_and_trains_together() -> None:
    (one, sent), (other, _) = run_ranks(sweep, 2)
    assert one == other and len(one.together) == NUM_COLLECTIVE_COSTS and len(one.cut) == 1 and len(one.exchanges) == 2
    assert sent >= 5  # gradients of each step, at least
    everything: list[Any] = [one]
    while everything:
        part = everything.pop()
        if isinstance(part, tuple):
            everything += part
        else:
            assert part > 0 or part is one.link
