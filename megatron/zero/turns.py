"""Turns: flat buffers that come and go, used by one bucket after the other.

A *buffer* is flat memory and its views, one for each slot of a layout. Buckets of equal layout share a few: memory that
is taken once has fixed addresses, leaves no holes in the heap, and its views are cut once. How many there are is how
many were needed at the same time.

A buffer whose numbers are still on their way to the host is given out before they are there: the device waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.homes.ferry import CopyEvent
from megatron.zero.layout import FlatLayout


@dataclass(frozen=True, eq=False)
class FlatBuffer:
    flat: Tensor
    views: list[Tensor]
    """One for each slot, of its shape."""

    @staticmethod
    def allocate(layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """New; what is between the slots is zero, and stays so."""
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
        for start, stop in layout.padding_ranges():
            flat[start:stop].zero_()
        return FlatBuffer(flat, [flat[slot.offset : slot.end].view(slot.shape) for slot in layout.slots])


class BufferPool:
    """The buffers of one engine that nobody uses now."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[tuple[FlatBuffer, CopyEvent | None]]] = {}

    def acquire(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        free = self._free.get((dtype, layout.buffer_key))
        if not free:
            return FlatBuffer.allocate(layout, dtype, device)
        buffer, pending_copy = free.pop(0 if free[0][1] is not None else
                                        -1)  # the longest on its way, or else the warmest
        if pending_copy is not None:
            pending_copy.wait_on_device()
        return buffer

    def release(self, layout: FlatLayout, buffer: FlatBuffer, pending_copy: CopyEvent | None = None) -> None:
        """Nobody reads or writes the buffer any more, in what has been asked of the device so far, but for the copy
        that `leaves`."""
        self._free.setdefault((buffer.flat.dtype, layout.buffer_key), []).append((buffer, pending_copy))

    def clear(self) -> None:
        """Their memory is given back."""
        self._free.clear()

    @property
    def free_nbytes(self) -> int:
        """Of the buffers that wait for their turn."""
        return sum(buffer.flat.nbytes for free in self._free.values() for buffer, _ in free)
