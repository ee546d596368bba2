"""The sums of one bucket's gradients on the host, where the host updates the weights: they come down as they are made.

The norms of their rows are taken before they leave (norm.py needs nothing else of them). Under accumulation what is on
the host goes up again, and the sum comes down: the device adds at the speed of its memory, and nobody waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.zero.homes.ferry import CopyEvent, CopyStreams
from megatron.zero.homes.memory import page_aligned_zeros
from mpu.grads import NORM_ROW, row_norms


class GradOffloader:
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, copy_streams: CopyStreams, *,
                 pinned: bool) -> None:
        self._copy_streams, self._pinned = copy_streams, pinned
        self._sums = page_aligned_zeros(numel, dtype, pinned=pinned)
        self._row_norms = torch.zeros(numel // NORM_ROW, device=device)
        self._spare_sums: Tensor | None = None
        self._last_copy: CopyEvent | None = None
        self._prefetched: tuple[Tensor, CopyEvent] | None = None
        self._version = self._sums._version

    def prefetch_sums(self) -> None:
        """What comes next is added to what is here, which begins to go up."""
        before = torch.empty(len(self._sums), dtype=self._sums.dtype, device=self._row_norms.device)
        self._prefetched = before, self._copy_streams.to_device.copy(before, self._sums, [self._last_copy]
                                                                     if self._last_copy is not None else [])

    def offload(self, grads: Tensor) -> CopyEvent:
        """The sums <- `part` of the device, added to what was `expect`ed. The device may write there after the mark."""
        if self._prefetched is not None:
            (before, arrival), self._prefetched = self._prefetched, None
            arrival.wait_on_device()
            grads = before.add_(grads)
        row_norms(grads, self._row_norms)
        self._last_copy = self._copy_streams.to_host.copy(self._sums, grads)
        self._version = self._sums._version
        return self._last_copy

    def cancel_prefetch(self) -> None:
        """Nothing comes that was expected."""
        if self._prefetched is not None:
            self._prefetched[1].wait_on_device()
            self._prefetched = None

    def detach_sums(self) -> Tensor:
        """The sums, which are the caller's until the next call; those of the next step have another place."""
        sums = self.sums
        if self._spare_sums is None:
            self._spare_sums = page_aligned_zeros(len(sums), sums.dtype, pinned=self._pinned)
        self._sums, self._spare_sums, self._last_copy = self._spare_sums, sums, None
        return sums

    @property
    def sums(self) -> Tensor:
        """On the host, once they are there; whoever changes them changes the gradients."""
        if self._last_copy is not None:
            self._last_copy.wait_on_host()
        return self._sums

    def row_norms(self, out: Tensor) -> None:
        """As mpu.grads.row_norms of the sums, on the device."""
        if self._sums._version != self._version:  # the user has set some
            self._row_norms.copy_(row_norms(self.sums))
            self._version = self._sums._version
        out.copy_(self._row_norms)
