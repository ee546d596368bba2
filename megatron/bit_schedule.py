"""The bit schedule of MoQ (mixture of quantisation): how many bits the working weights have at each step. No torch.

    counter    applied steps since quantisation began; skipped steps do not count
    period     when the counter reaches it, one bit is dropped, and the period is doubled and multiplied by a factor
    factor     1; with eigenvalues 1 + floor(4 e), e in (0, 1]: a block's curvature relative to the steepest block
    blend      with mixed 16 bits, the fraction of a weight that is not rounded: 1 after a drop, then less

The period is compared with the counter itself: without factors bits are dropped at P, 2P, 4P, ...
Not here: the quantisers (megatron/optim) and rounding the weights (megatron/zero).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MIN_UNIFORM_BITS = 3
"""From so many bits on the numbers of a grid are evenly spaced; 2 bits are ternary, 1 is binary."""
UNREACHABLE_COUNTER = 10**14
"""A counter that no run reaches."""


@dataclass(frozen=True)
class BitState:
    """How far the bits of one block have fallen."""

    bits: int
    period: int
    last_drop_at: int = 0
    """The counter when the last one fell."""


@dataclass(frozen=True)
class BitSchedule:
    start: int
    target: int
    period: int
    change_ratio: float | None = None
    """How fast the blend falls, a step; None: weights are rounded at once."""

    def initial_state(self) -> BitState:
        return BitState(self.start, self.period)

    def is_due(self, state: BitState, counter: int) -> bool:
        """A bit falls when the counter is this."""
        return state.bits > self.target and counter >= state.period

    def next_state(self, state: BitState, counter: int, factor: int = 1) -> BitState:
        """One bit at most falls in a step."""
        if not self.is_due(state, counter):
            return state
        return replace(state, bits=state.bits - 1, period=min(state.period * 2 * factor, UNREACHABLE_COUNTER),
                       last_drop_at=counter)

    def blend(self, state: BitState, counter: int) -> float:
        if self.change_ratio is None:
            return 0.0
        return max(0.0, 1.0 - self.change_ratio * (counter - state.last_drop_at))

    def drop_counters(self, factor: int = 1) -> list[int]:
        """The counter at each fall, if the factor is always this."""
        return [self.period * (2 * factor) ** number for number in range(self.start - self.target)]

    def bits_at(self, counter: int, factor: int = 1) -> int:
        return self.start - sum(counter >= fall for fall in self.drop_counters(factor))


def period_factor(relative_eigenvalue: float) -> int:
    """What a period is multiplied by in a block whose largest eigenvalue is this share of that of the steepest block:
    1 to 5."""
    return 1 + math.floor(4 * relative_eigenvalue)


def relative_eigenvalues(eigenvalues: list[float]) -> list[float]:
    """|eigenvalue| of each block over the largest. What is 0 or not finite counts as the largest: it was not found, and
    caution costs only time."""
    found = [abs(value) if math.isfinite(value) else 0.0 for value in eigenvalues]
    largest = max(found, default=0.0)
    return [value / largest if value > 0 else 1.0 for value in found]
