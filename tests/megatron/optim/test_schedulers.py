"""Learning rates are the published formulas at every step: DeepSpeed's schedulers, and the trainer's LRSchedule. The
loss scale follows the rule of the fp16 literature under any pattern of overflows."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from megatron.config.tree import build_config
from megatron.errors import ConfigError
from megatron.optim.loss_scale import LossScaleRule
from megatron.optim.schedulers import (DeepSpeedScheduler, LRRangeTest, LRSchedule, OneCycle, WarmupCosineLR,
                                       WarmupDecayLR, WarmupLR)
from megatron.zero.api.torch_interfaces import build_lr_schedule

STEPS, WARMUP, TOTAL, FLOOR = 3000, 700, 2500, 0.1


@dataclass
class Groups:
    """All that a scheduler knows of an optimizer."""

    param_groups: list[dict[str, Any]] = field(default_factory=lambda: [{"lr": 0.5}, {"lr": 2.0}])

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


def made(kind: str, groups: Groups, warmup_type: str = "log", **given: Any) -> DeepSpeedScheduler:
    common = {"warmup_num_steps": WARMUP, "warmup_type": warmup_type, **given}
    if kind == "WarmupLR":
        return WarmupLR(groups, warmup_min_lr=[0.1, 0.0], warmup_max_lr=[1.1, 3.0], **common)
    if kind == "WarmupDecayLR":
        return WarmupDecayLR(groups, TOTAL, warmup_min_lr=[0.1, 0.0], warmup_max_lr=[1.1, 3.0], **common)
    return WarmupCosineLR(groups, TOTAL, warmup_min_ratio=0.2, cos_min_ratio=FLOOR, **common)


def close(found: float, expected: float) -> bool:
    """Formulas written in another order."""
    return math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-15)


KINDS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def published(kind: str, warmup_type: str, it: int) -> list[float]:
    """The two groups' rates after `it` + 1 calls of `step`, written out."""
    if it < WARMUP:
        share = math.log(it + 1) / math.log(WARMUP) if warmup_type == "log" else it / WARMUP
        share = 0.2 + 0.8 * share if kind == "WarmupCosineLR" else share
    elif kind == "WarmupLR":
        share = 1.0
    elif kind == "WarmupDecayLR":
        share = max(0.0, (TOTAL - it) / (TOTAL - WARMUP))
    else:
        done = min(1.0, (it - WARMUP + 1) / (TOTAL - WARMUP))
        share = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2
    return [0.5 * share, 2.0 * share] if kind == "WarmupCosineLR" else [0.1 + 1.0 * share, 3.0 * share]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rate_of_every_group_is_the_formulas_also_where_a_state_dict_resumes(kind: str) -> None:
    for warmup_type in ("log", "linear"):
        groups = Groups()
        scheduler = made(kind, groups, warmup_type)
        assert groups.rates == ([0, 0] if kind == "WarmupCosineLR" else [0.1, 0]), "before the first step"
        for it in range(STEPS):
            scheduler.step()
            assert all(map(close, groups.rates, published(kind, warmup_type, it))), it
            assert scheduler.get_last_lr() == scheduler.get_lr() == groups.rates
            if it % 250 in (0, 249):
                resumed, jumped = made(kind, Groups(), warmup_type), made(kind, Groups(), warmup_type)
                resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
                assert resumed.get_last_lr() == scheduler.get_last_lr()
                resumed.step()
                jumped.step(it + 1)
                assert resumed.get_lr() == jumped.get_last_lr()


def test_a_scheduler_that_starts_in_the_middle_leaves_the_rates_until_its_first_step() -> None:
    groups = Groups()
    scheduler = made("WarmupLR", groups, last_batch_iteration=99)
    assert groups.rates == [0.5, 2.0]
    scheduler.step()
    assert scheduler.last_batch_iteration == 100 and groups.rates == pytest.approx(published("WarmupLR", "log", 100))


def test_a_log_warm_up_of_one_step_or_none_is_at_the_peak_at_once() -> None:
    for warmup in (0, 1, 2):
        assert LRSchedule("constant", 1.0, 0.0, warmup, 10, "log")(0) == 1.0
    assert [LRSchedule("constant", 1.0, 0.0, 9, 10, "log")(step) for step in range(10)] == pytest.approx(
        [math.log(min(9, step + 2)) / math.log(9) for step in range(10)])


def test_a_warm_up_longer_than_the_whole_ends_at_the_end() -> None:
    one = Groups([{"lr": 1.0}]), Groups([{"lr": 1.0}])
    for scheduler, end in ((WarmupDecayLR(one[0], 5, 0.0, 1.0, 10), 0.0),
                           (WarmupCosineLR(one[1], 5, warmup_num_steps=10, cos_min_ratio=0.25), 0.25)):
        for it, rate in ((8, math.log(9) / math.log(10)), (9, 1.0), (10, end), (50, end)):
            scheduler.step(it)
            assert scheduler.get_last_lr() == [pytest.approx(rate)]


CYCLE = [dict(cycle_first_step_size=4), dict(cycle_first_step_size=3, cycle_second_step_size=5, decay_lr_rate=0.5),
         dict(cycle_first_step_size=1, decay_step_size=2, decay_lr_rate=0.5, decay_mom_rate=0.01),
         dict(cycle_first_step_size=5, cycle_momentum=False)]


def cycle_of(it: int, cycle_first_step_size: int, cycle_second_step_size: int = 0, decay_step_size: int = 0,
             decay_lr_rate: float = 0.0, decay_mom_rate: float = 0.0, cycle_momentum: bool = True,
             ) -> tuple[list[float], float | None]:
    """The published cycle after `it` + 1 calls of `step`: rates between (0.1, 0.2) and 1.0, momentum 0.8 to 0.9."""
    first, second = cycle_first_step_size, cycle_second_step_size or cycle_first_step_size
    at = it + 1
    if at >= first + second:
        every = (at - first - second) / decay_step_size if decay_step_size else 0.0
        return ([low / (1 + decay_lr_rate * every) for low in (0.1, 0.2)],
                0.9 * (1 + decay_mom_rate * every) if cycle_momentum else None)
    height = at / first if at <= first else (first + second - at) / second
    return [low + (1.0 - low) * height for low in (0.1, 0.2)], 0.9 - 0.1 * height if cycle_momentum else None


def test_one_cycle() -> None:
    for given in CYCLE:
        groups = Groups([{"lr": 0.5, "betas": (0.5, 0.9)}, {"lr": 2.0, "betas": (0.5, 0.9)}])
        scheduler = OneCycle(groups, [0.1, 0.2], 1.0, **given)
        first = 0.8 if "cycle_momentum" not in given else 0.5
        assert groups.rates == [0.1, 0.2] and groups.param_groups[0]["betas"][0] == first
        for it in range(15):
            scheduler.step()
            rates, momentum = cycle_of(it, **given)
            assert all(map(close, groups.rates, rates)), it
            assert scheduler.get_mom() == (None if momentum is None else [(pytest.approx(momentum), 0.99)] * 2)
            assert momentum is None or groups.param_groups[1]["betas"] == (pytest.approx(momentum), 0.99)
            resumed = OneCycle(Groups(), [0.1, 0.2], 1.0, **given)
            resumed.load_state_dict(scheduler.state_dict())
            assert resumed.get_last_lr() == groups.rates and resumed.get_mom() is None, "without betas none are kept"


def test_range_test() -> None:
    for stairs in (False, True):
        groups = Groups()
        scheduler = LRRangeTest(groups, [0.1, 0.2], 3, 0.5, stairs)
        assert groups.rates == [0.1, 0.2]
        for it in range(10):
            scheduler.step()
            grown = 1 + 0.5 * ((it + 1) // 3 if stairs else (it + 1) / 3)
            assert all(map(close, groups.rates, [0.1 * grown, 0.2 * grown])), it


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (WarmupLR, {"warmup_num_steps": 0}, "warmup_num_steps is 0: expected an integer of at least 1"),
    (WarmupLR, {"warmup_num_steps": 1.5}, "warmup_num_steps is 1.5"),
    (WarmupLR, {"warmup_type": "cosine"}, "warmup_type is 'cosine': expected \"log\" or \"linear\""),
    (WarmupLR, {"warmup_max_lr": [1.0]}, "1 learning rates are given: expected one, or one for each of the 2 param"),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0}, "first_step_size is 0: exp"),
    (OneCycle, {"cycle_min_lr": [0.1], "cycle_max_lr": 1.0}, "1 learning rates are given: expected one, or"),
    (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_second_stair_count": 2}, "do not rise in stairs"),
    (LRRangeTest, {"lr_range_test_step_size": 1.5}, "step_size is 1.5")]


def test_what_cannot_be_honoured_is_a_config_error() -> None:
    for cls, given, told in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(told)):
            cls(Groups(), **given)


# ---- LRSchedule --------------------------------------------------------------------------------------------------

WSD = {"linear": lambda t: 1 - t, "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
       "exponential": lambda t: 2 / 2**t - 1, "minus_sqrt": lambda t: 1 - t**0.5}
PEAK, WSD_STEPS = 1e-3, 4


def closed_form(style: str, step: int, floor: float, warm: int, end: int) -> float:
    """Of every style that warms up; "WSD-..." names the shape of its decay."""
    if step < warm:
        return PEAK * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, end - warm))
    if style.startswith("WSD"):
        share = WSD[style.removeprefix("WSD-")](min(1.0, max(0, step - end + WSD_STEPS) / WSD_STEPS))
        return floor + (PEAK - floor) * share
    return {"constant": PEAK, "linear": PEAK - (PEAK - floor) * done,
            "cosine": floor + (PEAK - floor) * (1 + math.cos(math.pi * done)) / 2,
            "exponential": PEAK * ((floor or PEAK / 100) / PEAK) ** done,  # which never reaches 0
            "inverse-square-root": max(floor, PEAK * math.sqrt(max(1, warm) / max(max(1, warm), step + 1)))}[style]


STYLES = ["constant", "linear", "cosine", "exponential", "inverse-square-root", *(f"WSD-{shape}" for shape in WSD)]


def test_every_rate_of_the_trainers_styles_is_the_closed_form() -> None:
    for style, (warm, end), floor in product(STYLES, [(10, 100), (0, 7), (3, 10), (6, 10)], [0.0, 1e-4]):
        name, _, shape = style.partition("-") if style.startswith("WSD") else (style, "", "")
        schedule = build_lr_schedule(build_config({
            "lr_decay_style": name, "lr": PEAK, "min_lr": floor, "lr_warmup_iters": warm, "lr_decay_iters": end,
            "train_iters": end, **({"lr_wsd_decay_style": shape, "lr_wsd_decay_iters": WSD_STEPS} if shape else {})}))
        for step in range(end + 30):
            assert schedule(step) == pytest.approx(closed_form(style, step, floor, warm, end), rel=1e-12, abs=1e-18), (
                style, warm, end, floor, step)


# ---- the loss scale --------------------------------------------------------------------------------------------------


def reference(pattern: list[bool], scale: float, window: int, hysteresis: int, minimum: float) -> list[float]:
    """The rule written a second time, as mutable state."""
    clean, left, scales = 0, hysteresis, []
    for overflow in pattern:
        if overflow:
            clean = 0
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, minimum)
        else:
            clean += 1
            if clean == window:
                scale, clean, left = scale * 2, 0, hysteresis
        scales.append(scale)
    return scales


def test_random_overflow_patterns_give_the_reference_sequence() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        window, hysteresis, rate = draw.choice([1, 3, 10]), draw.choice([1, 2, 4]), draw.choice([0.02, 0.2, 0.6])
        pattern = [draw.random() < rate for _ in range(1000)]
        rule = LossScaleRule(2.0**16, window, hysteresis, 4.0, dynamic=True, is_enabled=True)
        state, scales = rule.initial_state(), []
        for overflow in pattern:
            state = rule.next_state(state, overflow)
            scales.append(state.scale)
        assert scales == reference(pattern, 2.0**16, window, hysteresis, 4.0), seed


def test_a_static_scale_never_moves() -> None:
    rule = LossScaleRule(128.0)
    assert rule.next_state(rule.next_state(rule.initial_state(), True), False) == rule.initial_state()


def test_exhausted_means_that_no_smaller_scale_is_left() -> None:
    rule = LossScaleRule(4.0, hysteresis=1, minimum=2.0, dynamic=True)
    assert not rule.is_exhausted(rule.initial_state())
    assert rule.is_exhausted(rule.next_state(rule.initial_state(), overflow=True))
