"""Learning rate as a pure function of the step: no state, so resuming needs only the step number.

`step` counts completed optimizer steps; step 0 already trains (with 1/warmup of the peak), so no step is wasted.
schedulers.py has DeepSpeed's classes over the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

CYCLE_BETA2 = 0.99
"""The second moment's decay while momentum is cycled: DeepSpeed's, which has no key for it."""

MAX_MOMENTUM = 0.9999999
"""Momentum that grows after the cycle ends here: Adam is not defined at 1."""

EXPONENTIAL_FLOOR_RATIO = 0.01
"""Where exponential decay ends when --min-lr is 0, as a share of the peak: a true exponential never reaches 0."""


@dataclass(frozen=True)
class LRSchedule:
    """Warm up over `warmup_steps`, then decay from `peak` to `floor` until `decay_steps`, then stay."""

    style: str
    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int
    warmup_type: str = "linear"
    tail: float = 0.0
    """one-cycle: decay per step after the cycle; range-test: growth per `decay_steps` steps."""
    momentum_low: float | None = None
    """one-cycle: the first moment's decay where the rate is highest; None leaves momentum alone."""
    momentum_high: float = 0.0
    momentum_tail: float = 0.0
    wsd_style: str = "exponential"
    wsd_steps: int = 0
    """WSD: the shape of the decay, and how many steps before `decay_steps` it begins."""

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps and self.style not in STYLES_WITHOUT_WARMUP:
            return self.peak * warmup_fraction(self.warmup_type, step + 1, self.warmup_steps)
        return LR_STYLES[self.style](self, step)

    def progress(self, step: int) -> float:
        """0 at the end of the warm-up, 1 from `decay_steps` on."""
        decay_length = max(1, self.decay_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / decay_length)

    def betas(self, step: int) -> tuple[float, float] | None:
        """The moments' decay of this step where the schedule says it. As in DeepSpeed, the first step has the lowest
        momentum, the others go against the rate, and the second moment's decay is 0.99."""
        if self.momentum_low is None:
            return None
        low, high = self.momentum_low, self.momentum_high
        if step == 0:
            return low, CYCLE_BETA2
        after = step - self.decay_steps
        first = high * (1 +
                        self.momentum_tail * after) if after > 0 else high - (high - low) * _cycle_height(self, step)
        return min(first, MAX_MOMENTUM), CYCLE_BETA2


def warmup_fraction(kind: str, step: int, steps: int) -> float:
    """The share of the peak after `step` of `steps` steps of warming up; the logarithmic one is there one step early,
    as in DeepSpeed."""
    if kind == "linear":
        return step / steps
    return min(1.0, math.log(step + 1) / math.log(max(2, steps)))


def _constant_lr(s: LRSchedule, step: int) -> float:
    return s.peak


def _linear_lr(s: LRSchedule, step: int) -> float:
    return s.peak + (s.floor - s.peak) * s.progress(step)


def _cosine_lr(s: LRSchedule, step: int) -> float:
    return s.floor + (s.peak - s.floor) * 0.5 * (1.0 + math.cos(math.pi * s.progress(step)))


def _exponential_lr(s: LRSchedule, step: int) -> float:
    floor = s.floor or s.peak * EXPONENTIAL_FLOOR_RATIO
    return s.peak * (floor / s.peak) ** s.progress(step) if s.peak else 0.0


def _inverse_square_root_lr(s: LRSchedule, step: int) -> float:
    start = max(1, s.warmup_steps)
    return max(s.floor, s.peak * math.sqrt(start / max(start, step + 1)))


def _wsd_lr(s: LRSchedule, step: int) -> float:
    """The peak, then one of Megatron-LM's four decays over the last `wsd_steps` before `decay_steps`."""
    progress = min(1.0, max(0, step - (s.decay_steps - s.wsd_steps)) / max(1, s.wsd_steps))
    return s.floor + (s.peak - s.floor) * WSD_DECAYS[s.wsd_style](progress)


def _cycle_height(s: LRSchedule, step: int) -> float:
    """The cycle's triangle: 0 at both ends, 1 at `warmup_steps`."""
    if step <= s.warmup_steps:
        return step / max(1, s.warmup_steps)
    return max(0.0, (s.decay_steps - step) / max(1, s.decay_steps - s.warmup_steps))


def _one_cycle_lr(s: LRSchedule, step: int) -> float:
    after = max(0, step - s.decay_steps)
    return (s.floor + (s.peak - s.floor) * _cycle_height(s, step)) / (1 + s.tail * after)


def _range_test_lr(s: LRSchedule, step: int) -> float:
    return s.floor * (1 + s.tail * (step / s.decay_steps))


def _range_test_staircase_lr(s: LRSchedule, step: int) -> float:
    return s.floor * (1 + s.tail * (step // s.decay_steps))


LR_STYLES: dict[str, Callable[[LRSchedule, int], float]] = {
    "constant": _constant_lr,
    "linear": _linear_lr,
    "cosine": _cosine_lr,
    "exponential": _exponential_lr,
    "inverse-square-root": _inverse_square_root_lr,
    "WSD": _wsd_lr,
    "one-cycle": _one_cycle_lr,
    "range-test": _range_test_lr,
    "range-test-stairs": _range_test_staircase_lr,
}
WSD_DECAYS: dict[str, Callable[[float], float]] = {
    "exponential": lambda t: 2 * 0.5**t - 1, "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)), "minus_sqrt": lambda t: 1 - math.sqrt(t),
}
"""Style of the WSD decay -> the share of the peak, from 1 at t = 0 to 0 at t = 1."""
STYLES_WITHOUT_WARMUP = ("one-cycle", "range-test", "range-test-stairs")
"""Styles that say the rate of every step."""
