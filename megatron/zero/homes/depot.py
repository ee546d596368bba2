"""A depot: room on a drive for whatever comes, piece by piece, before it is known how much that is.

Pieces lie one after the other on shelves that become larger; the room of one that is no longer wanted is not used
again. The files go when nobody refers to a piece any more.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.nvme import Nvme, NvmeSettings
from megatron.zero.homes.shelf import WEIGHT, Run, Shelf
from megatron.zero.homes.swapfolder import SwapFolder

PART = 1 << 20
"""Bytes that are read and written at a time; three times as many are on the host."""

FIRST, LARGEST = 64 * PART, 4096 * PART
"""Bytes of a shelf, unless a single piece is larger."""


@final
class Depot:
    def __init__(self, folder: SwapFolder) -> None:
        self._home = Nvme(folder, "waiting", (), NvmeSettings(part=PART, sets=3, dtype=torch.uint8))
        self._shelf: Shelf | None = None
        self._used, self._size, self._shelves = 0, FIRST, 0

    def store(self, values: Tensor) -> Stored:
        """A flat tensor."""
        nbytes = values.nbytes
        if self._shelf is None or self._used + nbytes > self._shelf.numel:
            self._shelf = self._home.shelf(str(self._shelves), max(self._size, -(-nbytes // PART) * PART))
            self._used, self._size, self._shelves = 0, min(2 * self._size, LARGEST), self._shelves + 1
        stored = Stored(self, Run(self._shelf, WEIGHT, self._used, nbytes), values.dtype)
        self._used += nbytes
        stored.put(values)
        return stored


@final
class Stored:
    """A piece."""

    def __init__(self, depot: Depot, run: Run, dtype: torch.dtype) -> None:
        self._depot, self._run, self._dtype = depot, run, dtype

    def put(self, values: Tensor) -> None:
        self._run.shelf.write(self._run.kind, self._run.start, values.contiguous().view(torch.uint8).cpu())

    def get(self) -> Tensor:
        return self._run.fetch().view(self._dtype)

    def copy(self) -> Stored:
        return self._depot.store(self.get())
