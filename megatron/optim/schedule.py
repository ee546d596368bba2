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

LARGEST_MOMENTUM = 0.9999999
"""Momentum that grows after the cycle ends here: Adam is not defined at 1."""

FLOOR_OF_EXPONENTIAL = 0.01
"""Where exponential decay ends when --min-lr is 0, as a share of the peak: a true exponential never reaches 0."""


@dataclass(frozen=True)
class Schedule:
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

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps and self.style not in WITHOUT_WARMUP:
            return self.peak * warmup_share(self.warmup_type, step + 1, self.warmup_steps)
        return SHAPES[self.style](self, step)

    def progress(self, step: int) -> float:
        """0 at the end of the warm-up, 1 from `decay_steps` on."""
        span = max(1, self.decay_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / span)

    def betas(self, step: int) -> tuple[float, float] | None:
        """The moments' decay of this step where the schedule says it. As in DeepSpeed, the first step has the lowest
        momentum, the others go against the rate, and the second moment's decay is 0.99."""
        if self.momentum_low is None:
            return None
        low, high = self.momentum_low, self.momentum_high
        if step == 0:
            return low, CYCLE_BETA2
        after = step - self.decay_steps
        first = high * (1 + self.momentum_tail * after) if after > 0 else high - (high - low) * _height(self, step)
        return min(first, LARGEST_MOMENTUM), CYCLE_BETA2


def warmup_share(kind: str, step: int, steps: int) -> float:
    """The share of the peak after `step` of `steps` steps of warming up; the logarithmic one is there one step early,
    as in DeepSpeed."""
    if kind == "linear":
        return step / steps
    return min(1.0, math.log(step + 1) / math.log(max(2, steps)))


def _constant(s: Schedule, step: int) -> float:
    return s.peak


def _linear(s: Schedule, step: int) -> float:
    return s.peak + (s.floor - s.peak) * s.progress(step)


def _cosine(s: Schedule, step: int) -> float:
    return s.floor + (s.peak - s.floor) * 0.5 * (1.0 + math.cos(math.pi * s.progress(step)))


def _exponential(s: Schedule, step: int) -> float:
    floor = s.floor or s.peak * FLOOR_OF_EXPONENTIAL
    return s.peak * (floor / s.peak) ** s.progress(step) if s.peak else 0.0


def _inverse_square_root(s: Schedule, step: int) -> float:
    start = max(1, s.warmup_steps)
    return max(s.floor, s.peak * math.sqrt(start / max(start, step + 1)))


def _height(s: Schedule, step: int) -> float:
    """The cycle's triangle: 0 at both ends, 1 at `warmup_steps`."""
    if step <= s.warmup_steps:
        return step / max(1, s.warmup_steps)
    return max(0.0, (s.decay_steps - step) / max(1, s.decay_steps - s.warmup_steps))


def _one_cycle(s: Schedule, step: int) -> float:
    after = max(0, step - s.decay_steps)
    return (s.floor + (s.peak - s.floor) * _height(s, step)) / (1 + s.tail * after)


def _range_test(s: Schedule, step: int) -> float:
    return s.floor * (1 + s.tail * (step / s.decay_steps))


def _range_test_stairs(s: Schedule, step: int) -> float:
    return s.floor * (1 + s.tail * (step // s.decay_steps))


SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant, "linear": _linear, "cosine": _cosine, "exponential": _exponential,
    "inverse-square-root": _inverse_square_root, "one-cycle": _one_cycle, "range-test": _range_test,
    "range-test-stairs": _range_test_stairs,
}
WITHOUT_WARMUP = ("one-cycle", "range-test", "range-test-stairs")
"""Styles that say the rate of every step."""


def build_schedule(*, style: str, lr: float, min_lr: float, warmup: float, decay_iters: int,
                   warmup_type: str = "linear", tail: float = 0.0, momentum: tuple[float, float, float] | None = None,
                   ) -> Schedule:
    """`warmup` is a share of `decay_iters`; `momentum` is lowest, highest, and growth per step after the cycle."""
    low, high, growth = (None, 0.0, 0.0) if momentum is None else momentum
    return Schedule(style, lr, min_lr, int(warmup * decay_iters), decay_iters, warmup_type, tail, low, high, growth)
