"""The loss scale of fp16: gradients carry it from the outermost module's outputs to their sums.

It is the engine's rule (optim/loss_scale.py) over backwards that are summed. A backward that overflowed leaves no
gradient on any rank, so that the optimizer's step changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import NumericsError
from megatron.optim.loss_scale import LossScaleRule, LossScaleState

INITIAL, WINDOW, LEAST = 2.0**15, 2000, 1.0
"""A loss in fp16 can carry no more at the beginning; torch's GradScaler doubles after as many steps."""
MOST_IN_A_ROW = 20


class Scaling:
    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._rule = LossScaleRule(INITIAL, WINDOW, 1, LEAST, dynamic=True, scales=True) if is_on else LossScaleRule()
        self._state = self._rule.start()
        self.skipped = 0
        """Backwards that overflowed."""
        self._in_a_row = 0

    @property
    def scale(self) -> float:
        return self._state.scale if self.is_on else 1.0

    def numbers(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss_scale": self.scale, "clean_steps": self._state.clean_steps,
                "hysteresis_left": self._state.hysteresis_left}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """What `numbers` gave; the scale of another precision says nothing here."""
        if self.is_on and saved["loss_scale"] > 1:
            self._state = LossScaleState(saved["loss_scale"], saved["clean_steps"], saved["hysteresis_left"])

    def after(self, overflow: bool) -> bool:
        """A backward has been summed; whether it overflowed."""
        if not self.is_on:
            return False
        exhausted = overflow and self._rule.exhausted(self._state)
        self._state = self._rule.after(self._state, overflow=overflow)
        self.skipped += overflow
        self._in_a_row = self._in_a_row + 1 if exhausted else 0
        if self._in_a_row > MOST_IN_A_ROW:
            raise NumericsError(f"{self._in_a_row} backwards in a row overflowed at the least loss scale ({LEAST:g}): "
                                "use bf16, or a lower learning rate")
        return overflow
