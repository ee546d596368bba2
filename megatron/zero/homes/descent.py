"""The sums of one bucket's gradients on the host, where the host updates the weights: they come down as they are made.

The norms of their rows are taken before they leave (norm.py needs nothing else of them). Under accumulation what is on
the host goes up again, and the sum comes down: the device adds at the speed of its memory, and nobody waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.zero.homes.ferry import Ferry, Mark
from megatron.zero.homes.memory import numbers
from mpu.grads import NORM_ROW, row_norms


class Descent:
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ferry: Ferry, *, pinned: bool) -> None:
        self._ferry, self._pinned = ferry, pinned
        self._sums = numbers(numel, dtype, pinned=pinned)
        self._rows = torch.zeros(numel // NORM_ROW, device=device)
        self._other: Tensor | None = None
        self._came: Mark | None = None
        self._before: tuple[Tensor, Mark] | None = None
        self._version = self._sums._version

    def expect(self) -> None:
        """What comes next is added to what is here, which begins to go up."""
        before = torch.empty(len(self._sums), dtype=self._sums.dtype, device=self._rows.device)
        self._before = before, self._ferry.up.copy(before, self._sums, [self._came] if self._came is not None else [])

    def bring(self, part: Tensor) -> Mark:
        """The sums <- `part` of the device, added to what was `expect`ed. The device may write there after the mark."""
        if self._before is not None:
            (before, arrival), self._before = self._before, None
            arrival.join()
            part = before.add_(part)
        row_norms(part, self._rows)
        self._came = self._ferry.down.copy(self._sums, part)
        self._version = self._sums._version
        return self._came

    def forget(self) -> None:
        """Nothing comes that was expected."""
        if self._before is not None:
            self._before[1].join()
            self._before = None

    def hand_over(self) -> Tensor:
        """The sums, which are the caller's until the next call; those of the next step have another place."""
        sums = self.sums
        if self._other is None:
            self._other = numbers(len(sums), sums.dtype, pinned=self._pinned)
        self._sums, self._other, self._came = self._other, sums, None
        return sums

    @property
    def sums(self) -> Tensor:
        """On the host, once they are there; whoever changes them changes the gradients."""
        if self._came is not None:
            self._came.wait()
        return self._sums

    def row_norms(self, out: Tensor) -> None:
        """As mpu.grads.row_norms of the sums, on the device."""
        if self._sums._version != self._version:  # the user has set some
            self._rows.copy_(row_norms(self.sums))
            self._version = self._sums._version
        out.copy_(self._rows)
