"""Keys and values of what has been read: a row for each text, a place for each of its positions.

The rows in use are the first ones, so that a step works on slices; the last one takes the place of one that ends.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class Cache:
    def __init__(self, layers: int, rows: int, heads: int, length: int, width: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        """Of this rank's heads. On a CPU a place that is never written takes no memory."""
        shape = (layers, rows, heads, length, width)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths = [0] * rows

    def fill(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """The first places of a row <- [head, position, width]."""
        self.keys[layer, row, :, :keys.shape[1]] = keys
        self.values[layer, row, :, :keys.shape[1]] = values

    def append(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """One place of each of the first rows <- [row, head, width]."""
        rows = torch.arange(len(places), device=places.device)
        self.keys[layer][rows, :, places] = keys
        self.values[layer][rows, :, places] = values

    def first(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows, of their first places."""
        return self.keys[layer, :rows, :, :length], self.values[layer, :rows, :, :length]

    def move(self, source: int, target: int) -> None:
        length = self.lengths[source]
        for numbers in (self.keys, self.values):
            numbers[:, target, :, :length] = numbers[:, source, :, :length]
        self.lengths[target] = length
