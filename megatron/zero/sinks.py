"""Sinks: how an operation that makes the gradient of one parameter writes it in place (the other side of mpu/sinks.py).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mpu.sinks import Claim


class Places(Protocol):
    """What has a place for each gradient (gradients.py)."""

    def claim(self, index: int) -> SlotClaim | None: ...

    def keep_claim(self, index: int) -> None: ...

    def total(self, index: int) -> Tensor: ...


class SlotSink:
    """The place of one parameter's gradient in its bucket."""

    def __init__(self, grads: Places, index: int) -> None:
        self._grads, self._index = grads, index

    def claim(self) -> Claim | None:
        return self._grads.claim(self._index)

    def total(self) -> Tensor:
        return self._grads.total(self._index)


class SlotClaim:
    """A slot that a forward has written to. If anything else needs the slot before the backward of that forward, what
    was written moves to a tensor of its own."""

    def __init__(self, grads: Places, index: int, place: Tensor) -> None:
        self._grads, self._index, self.place = grads, index, place
        self._has_moved = False

    def move_away(self) -> None:
        self.place, self._has_moved = self.place.clone(), True

    def keep(self, factor: Tensor | None = None) -> None:
        if factor is not None:
            self.place.mul_(factor)
        if self._has_moved:
            self._grads.total(self._index).add_(self.place)
        else:
            self._grads.keep_claim(self._index)
