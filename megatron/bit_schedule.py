"""The bit schedule of MoQ (mixture of quantisation): how many bits the working weights have at each step. No torch.

    counter    applied steps since quantisation began; skipped steps do not count
    period     when the counter reaches it, one bit is dropped, and the period is doubled and multiplied by a factor
    factor     1; with eigenvalues 1 + floor(4 e), e in (0, 1]: a block's curvature relative to the steepest block
    blend      with mixed 16 bits, the fraction of a weight that is not rounded: 1 after a drop, then less

The period is compared with the counter itself: without factors bits are dropped at P, 2P, 4P, ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# From this number of bits on, the levels of a group are evenly spaced; 2 bits are ternary, 1 is binary.
MIN_UNIFORM_BITS = 3
UNREACHABLE_COUNTER = 10**14  # a counter that no run reaches


@dataclass(frozen=True)
class BitState:
    """The bits of one block, and when they drop next."""

    bits: int
    period: int
    last_drop_at: int = 0  # the counter at the last drop


@dataclass(frozen=True)
class BitSchedule:
    start: int
    target: int
    period: int
    # By how much the blend decreases per step; None: weights are rounded at once.
    change_ratio: float | None = None

    def initial_state(self) -> BitState:
        return BitState(self.start, self.period)

    def is_due(self, state: BitState, counter: int) -> bool:
        """Whether a bit is dropped at this counter."""
        return state.bits > self.target and counter >= state.period

    def next_state(self, state: BitState, counter: int, factor: int = 1) -> BitState:
        """The state after a step, which drops at most one bit."""
        if not self.is_due(state, counter):
            return state
        return replace(state, bits=state.bits - 1, period=min(state.period * 2 * factor, UNREACHABLE_COUNTER),
                       last_drop_at=counter)

    def blend(self, state: BitState, counter: int) -> float:
        if self.change_ratio is None:
            return 0.0
        return max(0.0, 1.0 - self.change_ratio * (counter - state.last_drop_at))

    def drop_counters(self, factor: int = 1) -> list[int]:
        """The counter at each drop, for a constant factor."""
        return [self.period * (2 * factor) ** number for number in range(self.start - self.target)]


def period_factor(relative_eigenvalue: float) -> int:
    """The factor of a period (1 to 5) for a block with this eigenvalue relative to the steepest block's."""
    return 1 + math.floor(4 * relative_eigenvalue)


def relative_eigenvalues(eigenvalues: list[float]) -> list[float]:
    """|eigenvalue| of each block over the largest. One that is 0 or not finite was not computed, and counts as the
    largest: too long a period costs only time."""
    sizes = [abs(value) if math.isfinite(value) else 0.0 for value in eigenvalues]
    largest = max(sizes, default=0.0)
    return [size / largest if size > 0 else 1.0 for size in sizes]
