"""Rates: straight lines on logarithmic paper between measured points, beyond them as documented, and whole in JSON."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from megatron.plan.machine_rates import RateCurve, MachineRates, Surface
from tests.megatron.plan.machines import machine


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_is_the_broken_line_through_its_points(seed: int) -> None:
    rng = random.Random(seed)
    sizes = sorted(rng.sample(range(1, 10**6), 5))
    points = tuple((float(size), rng.uniform(1e-6, 1.0)) for size in sizes)
    curve = RateCurve(points)
    for size in np.geomspace(sizes[0], sizes[-1], 50):
        expected = np.interp(math.log(size), *np.log(np.array(points)).T)
        assert curve(float(size)) == pytest.approx(math.exp(expected))
    assert [curve(size) for size, _ in points] == pytest.approx([seconds for _, seconds in points])


def test_nothing_takes_no_time_a_little_takes_the_least_and_more_takes_more_in_proportion() -> None:
    curve = RateCurve(((10.0, 1.0), (100.0, 5.0)))
    assert (curve(0), curve(1), curve(200), RateCurve(())(7)) == (0.0, 1.0, 10.0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_surface_is_interpolated_along_one_axis_and_then_along_the_other(seed: int) -> None:
    rng = random.Random(seed)
    rows, widths = (8.0, 64.0, 256.0), (16.0, 32.0)
    rates = tuple(tuple(rng.uniform(1, 100) for _ in widths) for _ in rows)
    surface = Surface(rows, widths, rates)
    for _ in range(20):
        row, width = rng.uniform(1, 1000), rng.uniform(1, 100)
        down = [np.interp(math.log(row), np.log(rows), np.log([line[column] for line in rates])) for column in (0, 1)]
        assert surface(row, width) == pytest.approx(math.exp(np.interp(math.log(width), np.log(widths), down)))


def changed(record: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    *path, last = place.split(".")
    inner: Any = record
    for name in path:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = value
    return record


@pytest.mark.parametrize("place, value", [
    ("a_pass", math.nan), ("a_pass", -1), ("link", math.inf), ("hides", 1.5), ("meetings", [0.0]),
    ("meetings", [0.0, 0.0, -1.0, 0.0, 0.0]), ("update.points", []), ("update.points.0", [1.0]),
    ("update.points.0.0", 1e30), ("update.points.0.1", 0.0), ("update.points.0.1", math.nan), ("all_reduce.points", []),
    ("forward.rows", [1e6, 1.0]), ("forward.rows", []), ("forward.rates", [[1.0, 1.0]]),
    ("forward.rates.1", [1.0]), ("forward.rates.1.0", 0.0), ("forward.rates.1.0", math.inf), ("where.ranks", 0),
    ("where.ranks", "2"), ("where", {}), ("loss", None)])
def test_what_no_probe_finds_is_no_rates(place: str, value: Any) -> None:
    record = json.loads(json.dumps(machine(2).as_dict()))
    assert MachineRates.from_dict(record) == machine(2)
    with pytest.raises((ValueError, TypeError, KeyError)):
        MachineRates.from_dict(json.loads(json.dumps(changed(record, place, value))))


def test_one_rank_exchanges_nothing() -> None:
    nothing = RateCurve(())
    rates = machine(1, all_reduce=nothing, reduce_scatter=nothing, all_gather=nothing)
    assert MachineRates.from_dict(json.loads(json.dumps(rates.as_dict()))) == rates


def test_rates_come_back_from_json_as_they_were() -> None:
    rates = machine(2, loss=RateCurve(((1.0, 0.1), (3.0, 1 / 3))), hides=0.25)
    assert MachineRates.from_dict(json.loads(json.dumps(rates.as_dict()))) == rates
