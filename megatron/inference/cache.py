"""Keys and values of what has been read: a row for each text, a place for each of its positions.

The rows in use are the first ones, so that a step works on slices; the last one takes the place of one that ends.
A place holds a position's keys and values of all heads side by side, as a block's projection makes them.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class Cache:
    def __init__(self, layers: int, rows: int, length: int, heads: int, width: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        """Of this rank's heads. On a CPU a place that is never written takes no memory."""
        self._numbers = torch.zeros((layers, rows, length, 2, heads, width), dtype=dtype, device=device)
        self._rows = torch.arange(rows, device=device)
        self.lengths = [0] * rows

    def fill(self, layer: int, first: int, both: Tensor) -> None:
        """The first places of rows from `first` on <- [row, position, 2, head, width]."""
        self._numbers[layer, first : first + len(both), : both.shape[1]] = both

    def append(self, layer: int, places: Tensor, both: Tensor) -> None:
        """One place of each of the first rows <- [row, 2, head, width]."""
        self._numbers[layer][self._rows[: len(places)], places] = both

    def first(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows, of their first places: each [row, head, position, width]."""
        keys, values = self._numbers[layer, :rows, :length].transpose(1, 3).unbind(2)
        return keys, values

    def move(self, source: int, target: int) -> None:
        length = self.lengths[source]
        self._numbers[:, target, :length] = self._numbers[:, source, :length]
        self.lengths[target] = length

    def clear(self, row: int) -> None:
        """What is not finite would come through the mask of a later text."""
        self._numbers[:, row] = 0
