"""Learning rate as a pure function of the step: no state, so resuming needs only the step number.

`step` counts completed optimizer steps; step 0 already trains (with 1/warmup of the peak), so no step is wasted.
schedulers.py has DeepSpeed's classes over the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * warmup_share(self.warmup_type, step + 1, self.warmup_steps)
        return SHAPES[self.style](self, step)

    def progress(self, step: int) -> float:
        """0 at the end of the warm-up, 1 from `decay_steps` on."""
        span = max(1, self.decay_steps - self.warmup_steps)
        return min(1.0, (step - self.warmup_steps) / span)


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


SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant, "linear": _linear, "cosine": _cosine, "exponential": _exponential,
    "inverse-square-root": _inverse_square_root,
}


def build_schedule(*, style: str, lr: float, min_lr: float, warmup: float, decay_iters: int,
                   warmup_type: str = "linear") -> Schedule:
    """`warmup` is a share of `decay_iters`."""
    return Schedule(style, lr, min_lr, int(warmup * decay_iters), decay_iters, warmup_type)
