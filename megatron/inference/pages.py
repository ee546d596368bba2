"""Room for many matrices side by side, in pages as large as the system gives.

Decoding on a CPU reads all weights for every token. Where a page is 4 kB, that stops at each: the processor fetches
ahead within a page only. Pages of 2 MB make it up to a third faster; they are for areas larger than that, and most
matrices alone are not.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import final

import torch
from torch import Tensor

LINE = 64
"""Bytes at whose multiples a matrix begins: a line of the cache."""

MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)
"""Linux's."""


@final
class Room:
    """For one-byte numbers. What is not used yet takes no memory on a CPU."""

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        size = max(1, sum(map(_length, shapes)))
        self._flat = _mapped(size) if device.type == "cpu" else torch.empty(size, dtype=torch.int8, device=device)
        self._used = 0

    def take(self, shape: Sequence[int]) -> Tensor:
        """[...] int8, of one of the shapes."""
        taken = self._flat[self._used : self._used + prod(shape)].view(*shape)
        self._used += _length(shape)
        return taken


def _length(shape: Sequence[int]) -> int:
    return -(-prod(shape) // LINE) * LINE


def _mapped(size: int) -> Tensor:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if MADV_HUGEPAGE is not None:
        with suppress(OSError):  # a kernel without them
            area.madvise(MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.int8)
