"""Initial weights: one generator, drawn in the order of construction, full matrices that the layers slice.

So the weights depend on the seed and the shape alone: a tensor parallel run starts from the same numbers as one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

InitMethod = Callable[[torch.Tensor], object]


class GPT2Init:
    """N(0, std) for everything, and std / sqrt(2 x layers) for what is added to the residual stream."""

    def __init__(self, std: float, num_layers: int, seed: int) -> None:
        self._std = std
        self._residual_std = std / math.sqrt(2.0 * num_layers)
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.normal_(0.0, self._std, generator=self._generator)

    def residual(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.normal_(0.0, self._residual_std, generator=self._generator)
