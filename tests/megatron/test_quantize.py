"""Quantisation in training, the schedule: at which steps bits fall, and how fast a blend does."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from megatron.bit_schedule import UNREACHABLE_COUNTER, BitSchedule, period_factor, relative_eigenvalues
from megatron.config.model_config import QuantizeConfig
from megatron.errors import ConfigError


def walked(schedule: BitSchedule, steps: int, factor: int) -> list[int]:
    """The bits after each step, the first entry before any."""
    now = schedule.initial_state()
    found = [now.bits]
    for counter in range(1, steps + 1):
        now = schedule.next_state(now, counter, factor)
        found.append(now.bits)
    return found


def test_bits_of_each_step_are_the_closed_form_for_50_random_settings() -> None:
    """n bits have fallen from counter P (2 f)^(n - 1) on."""
    draw = random.Random(7)
    for _ in range(50):
        period, start, factor = draw.randint(1, 40), draw.randint(1, 16), draw.randint(1, 5)
        target = draw.randint(1, start)
        steps = 3000
        expected = []
        for counter in range(steps + 1):
            fallen = 0 if counter < period else int(math.floor(math.log(counter / period, 2 * factor) + 1e-9)) + 1
            expected.append(max(target, start - fallen))
        schedule = BitSchedule(start, target, period)
        assert walked(schedule, steps, factor) == expected, (period, start, target, factor)
        drops = schedule.drop_counters(factor)
        assert [start - sum(counter >= drop for drop in drops) for counter in range(steps + 1)] == expected


def test_the_blend_falls_by_the_ratio_and_begins_anew_at_each_fall() -> None:
    schedule = BitSchedule(8, 6, 4, change_ratio=0.25)
    now, found = schedule.initial_state(), [schedule.blend(schedule.initial_state(), 0)]
    for counter in range(1, 13):
        now = schedule.next_state(now, counter)
        found.append(schedule.blend(now, counter))
    assert found == [1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 0]
    assert BitSchedule(8, 6, 4).blend(now, 3) == 0


def test_a_steep_block_keeps_its_bits_longer() -> None:
    """Factors are 1 to 5; what was not found counts as the steepest."""
    assert [period_factor(share) for share in (1e-9, 0.24, 0.25, 0.5, 0.99, 1.0)] == [1, 1, 2, 3, 4, 5]
    assert relative_eigenvalues([2.0, -4.0, 1.0, math.nan, 0.0, math.inf]) == [0.5, 1.0, 0.25, 1.0, 1.0, 1.0]
    assert relative_eigenvalues([math.nan, 0.0]) == [1.0, 1.0] and relative_eigenvalues([]) == []


def test_periods_stay_numbers_that_a_checkpoint_can_hold() -> None:
    schedule = BitSchedule(16, 1, 10**9)
    now = schedule.initial_state()
    for _ in range(15):
        now = schedule.next_state(now, UNREACHABLE_COUNTER, 5)
    assert now.period == UNREACHABLE_COUNTER and now.bits == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(quantize_target_bits=9, quantize_start_bits=8), "--quantize-target-bits 9 is above --quantize-start-bits 8"),
    (dict(quantize_start_bits=17), "--quantize-start-bits is 17: expected a number >= 1 and <= 16"),
    (dict(quantize_target_bits=0), "--quantize-target-bits is 0: expected a number >= 1 and <= 16"),
    (dict(quantize_period=0), "--quantize-period is 0"),
    (dict(quantize_offset=-1), "--quantize-offset is -1"),
    (dict(quantize_groups=0), "--quantize-groups is 0"),
    (dict(quantize_change_ratio=0.0), "--quantize-change-ratio is 0.0: expected a number > 0 and <= 1"),
    (dict(quantize_target_bits=2, quantize_type="asymmetric"), "--quantize-type asymmetric needs"),
    (dict(quantize_target_bits=1, quantize_rounding="stochastic"), "--quantize-rounding stochastic needs"),
]


def test_a_wrong_setting_is_one_line() -> None:
    for values, says in REFUSED:
        with pytest.raises(ConfigError) as caught:
            QuantizeConfig(quantize_training=True, **values)
        assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_start_says_when_bits_will_fall() -> None:
    config = QuantizeConfig(quantize_training=True, quantize_period=400, quantize_offset=0)
    assert config.notes()[0].endswith(
        "rounded to 16 bits, and to 15, 14, 13, 12, 11, 10, 9, 8 bits at applied steps "
        "400, 800, 1600, 3200, 6400, 12800, 25600, 51200")
    assert config.notes(1000)[1] == (" note: --train-iters 1000 ends the run at 14 bits: a period P takes 2^7 P "
                                     "applied steps from 16 to 8 bits")
    later = QuantizeConfig(quantize_training=True, quantize_start_bits=8, quantize_offset=5)
    assert later.notes(9) == [" note: weights are rounded to 8 bits from applied step 5 on"]
    assert QuantizeConfig().notes() == []
