"""The loss scale follows the rule of the fp16 literature, step for step, under any pattern of overflows."""

from __future__ import annotations

import random

from megatron.optim.loss_scale import LossScaleRule


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
