"""A curve of any length fits a page, and no peak of it is lost."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from megatron.report.page import MOST_POINTS, bucket_ends, downsample


@pytest.mark.parametrize("count", [0, 1, 2, MOST_POINTS - 1, MOST_POINTS, MOST_POINTS + 1, 2 * MOST_POINTS - 1, 10**5])
def test_buckets_cover_all_steps_and_are_no_more_than_a_page_can_show(count: int) -> None:
    cuts = bucket_ends(count)
    assert len(cuts) == min(count, MOST_POINTS)
    sizes = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
    assert sum(sizes) == count and (not sizes or max(sizes) - min(sizes) <= 1 and min(sizes) >= 1)


@pytest.mark.parametrize("count", [1, 7, 999, 1001, 54_321])
def test_every_bucket_has_the_mean_and_the_peaks_of_its_steps(count: int) -> None:
    draw = random.Random(count)
    values = array("d", (draw.choice([math.nan, math.inf]) if draw.random() < 0.01 else draw.gauss(0, 1)
                         for _ in range(count)))
    values[count // 2] = 1e6
    cuts = bucket_ends(count)
    curve = downsample(values, cuts)
    for number, end in enumerate(cuts):
        part = [value for value in values[cuts[number - 1] if number else 0:end] if math.isfinite(value)]
        if part:
            assert (curve.low[number], curve.high[number]) == (min(part), max(part))
            assert curve.mean[number] == pytest.approx(math.fsum(part) / len(part), abs=1e-9)
        else:
            assert math.isnan(curve.mean[number]) and math.isnan(curve.low[number])
    assert max(curve.high) == 1e6
