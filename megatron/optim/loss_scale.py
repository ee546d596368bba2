"""Loss scaling for fp16 as a pure function: (state, overflow) -> state.

Dynamic: an overflow uses one unit of hysteresis; at the last unit it halves the scale instead. `window` clean steps in
a row double the scale and restore the hysteresis. Static: the scale never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScaleRule:
    """The constants of the rule; with `dynamic` False the scale stays `initial`."""

    initial: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    dynamic: bool = False
    # False without scaling (fp32, bf16): a non-finite gradient is then an error instead of an overflow.
    is_enabled: bool = False

    def initial_state(self) -> LossScaleState:
        return LossScaleState(self.initial, 0, self.hysteresis)

    def next_state(self, state: LossScaleState, overflow: bool) -> LossScaleState:
        if not self.dynamic:
            return state
        if overflow and state.hysteresis_left > 1:
            return replace(state, clean_steps=0, hysteresis_left=state.hysteresis_left - 1)
        if overflow:
            return replace(state, clean_steps=0, scale=max(state.scale / 2, self.minimum))
        if state.clean_steps + 1 < self.window:
            return replace(state, clean_steps=state.clean_steps + 1)
        return LossScaleState(state.scale * 2, 0, self.hysteresis)

    def is_exhausted(self, state: LossScaleState) -> bool:
        """Another overflow could not reduce the scale."""
        return not self.dynamic or (state.scale <= self.minimum and state.hysteresis_left <= 1)


@dataclass(frozen=True)
class LossScaleState:
    scale: float
    clean_steps: int
    hysteresis_left: int
