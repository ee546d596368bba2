"""The learning rate is the formula of its name at every step."""

from __future__ import annotations

import math

import pytest

from megatron.config.tree import build_config
from megatron.optim.schedulers import EXPONENTIAL_FLOOR_RATIO, LR_STYLES, STYLES_WITHOUT_WARMUP, LRSchedule
from megatron.zero.api.optimizer import build_lr_schedule


def schedule(style: str, *, lr: float = 1e-3, min_lr: float = 1e-4, warmup: float = 0.1, decay_iters: int = 100):
    return LRSchedule(style, lr, min_lr, int(warmup * decay_iters), decay_iters, wsd_steps=decay_iters // 5)


@pytest.mark.parametrize("style", [style for style in LR_STYLES if style not in STYLES_WITHOUT_WARMUP])
def test_warm_up_is_linear_and_ends_at_the_peak(style: str) -> None:
    s = schedule(style)
    assert [s(step) for step in range(10)] == pytest.approx([1e-4 * (step + 1) for step in range(10)])
    assert s(10) == pytest.approx(1e-3, rel=0.05)  # inverse square root is already one step on


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential"])
def test_decay_falls_from_the_peak_to_the_floor_and_stays(style: str) -> None:
    s = schedule(style)
    values = [s(step) for step in range(10, 131)]
    assert values[0] == 1e-3 and values[90] == pytest.approx(1e-4, rel=1e-12) and values[-1] == values[90]
    assert all(a >= b for a, b in zip(values, values[1:], strict=False))


def test_halfway_values() -> None:
    assert schedule("linear")(55) == pytest.approx(5.5e-4)
    assert schedule("cosine")(55) == pytest.approx(5.5e-4)
    assert schedule("exponential")(55) == pytest.approx(math.sqrt(1e-3 * 1e-4))
    assert schedule("constant")(55) == 1e-3
    assert schedule("inverse-square-root", min_lr=0)(39) == pytest.approx(1e-3 * math.sqrt(10 / 40))


def test_exponential_is_exponential_without_a_floor_too() -> None:
    s = schedule("exponential", min_lr=0, warmup=0)
    ratios = {round(s(step + 1) / s(step), 12) for step in range(99)}
    assert len(ratios) == 1 and s(100) == pytest.approx(1e-3 * EXPONENTIAL_FLOOR_RATIO)


def test_linear_reaches_zero_where_zero_is_the_floor() -> None:
    assert schedule("linear", min_lr=0)(100) == 0


WSD = {"linear": lambda t: 1 - t, "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
       "exponential": lambda t: 2 / 2**t - 1, "minus_sqrt": lambda t: 1 - t**0.5}


@pytest.mark.parametrize("shape", WSD)
@pytest.mark.parametrize(("warm", "whole", "decay"), [(10, 100, 20), (0, 7, 7), (3, 10, 1), (5, 25, 20)])
def test_every_rate_of_wsd_is_the_closed_form(shape: str, warm: int, whole: int, decay: int) -> None:
    s = build_lr_schedule(build_config({
        "lr_decay_style": "WSD", "lr_wsd_decay_style": shape, "lr_wsd_decay_iters": decay, "lr_warmup_iters": warm,
        "train_iters": whole, "lr": 1e-3, "min_lr": 1e-4}))
    for step in range(whole + 5):
        if step < warm:
            expected = 1e-3 * (step + 1) / warm
        elif step <= whole - decay:
            expected = 1e-3
        else:
            expected = 1e-4 + 9e-4 * WSD[shape](min(1.0, (step - whole + decay) / decay))
        assert s(step) == pytest.approx(expected, rel=1e-12), step
    assert s(whole) == s(whole + 4) == 1e-4
