"""Initial weights of GPT-2: each value follows from the seed, the parameter's name and the element's position.

So a tensor parallel run starts from the same values as one process, and a rank draws only its own slice. With
`deferred` parameters stay empty, and the engine draws its shards (zero/deferred_init.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from mpu.weight_init import (ConstantInitializer, CounterRNGInit, NormalInitializer, allocate_weight, rng_key,
                             set_initializer, strided_segments_of)


class GPT2Init:
    """N(0, std) for all weights, with std / sqrt(2 * layers) for projections into the residual stream. Names are
    relative to the path of `submodule`."""

    def __init__(self, std: float, num_layers: int, seed: int, deferred: bool = False, prefix: str = "") -> None:
        self._std, self._layers, self._seed, self._deferred, self._prefix = std, num_layers, seed, deferred, prefix

    def submodule(self, module: str) -> GPT2Init:
        return GPT2Init(self._std, self._layers, self._seed, self._deferred, f"{self._prefix}{module}.")

    def weight(self, name: str) -> CounterRNGInit:
        return CounterRNGInit(rng_key(self._seed, self._prefix + name), self._std, self._deferred)

    def residual_weight(self, name: str) -> CounterRNGInit:
        return replace(self.weight(name), std=self._std / math.sqrt(2.0 * self._layers))

    def layer_norm(self, size: int, eps: float) -> nn.LayerNorm:
        """A LayerNorm with weight 1 and bias 0."""
        layer_norm = nn.LayerNorm(size, eps=eps)
        for parameter, value in ((layer_norm.weight, 1.0), (layer_norm.bias, 0.0)):
            set_initializer(parameter, ConstantInitializer(value), deferred=True)  # torch has already filled it
        return layer_norm

    def embedding(self, name: str, rows: int, width: int) -> nn.Embedding:
        """An embedding that is replicated over tensor parallel."""
        draw, values = self.weight(name), allocate_weight((rows, width), self._deferred)
        source = NormalInitializer(draw.key, draw.std, strided_segments_of((rows, width), None, 0, 1))
        # before the module is built, because zero.Init then shards its parameters
        set_initializer(values, source, draw.deferred)
        embedding = nn.Embedding(rows, width, _weight=values)
        set_initializer(embedding.weight, source, deferred=True)
        return embedding
