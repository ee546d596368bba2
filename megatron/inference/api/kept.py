"""The decoder that an engine keeps from answer to answer: its cache, and the steps that an accelerator has recorded.

It is made for what is asked, and made anew where that is more than it has room for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from megatron.inference.decoder import Decoder
from megatron.inference.int8 import Int8
from megatron.inference.recorded import FEWEST_POSITIONS, power_of_two
from megatron.model.gpt2 import GPT2

ROWS = 32
"""Texts at a time; more take turns."""


@dataclass(frozen=True)
class _Made:
    decoder: Decoder
    weights: Hashable
    """Where they were: a recorded step reads them there."""

    def has_room(self, weights: Hashable, rows: int, length: int) -> bool:
        return self.weights == weights and self.decoder.rows >= rows and self.decoder.length >= length


@final
class Kept:
    def __init__(self, model: GPT2, limit: int) -> None:
        """No text has more than `limit` positions."""
        self.model, self.limit = model, limit
        self._made: _Made | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy makes a decoder of its own."""
        return Kept, (self.model, self.limit)

    @contextmanager
    def decoder(self, texts: int, positions: int) -> Iterator[Decoder]:
        """For so many texts, of up to so many positions. Whoever asks meanwhile gets another one. It is not kept where
        an answer breaks off: what is in its rows then may be anything."""
        made, self._made = self._made, None
        weights, rows, length = _places(self.model), min(ROWS, power_of_two(texts)), power_of_two(positions)
        length = min(self.limit, max(FEWEST_POSITIONS, length))
        if made is None or not made.has_room(weights, rows, length):
            if made is not None:
                rows, length = max(rows, made.decoder.rows), max(length, made.decoder.length)
            made = None  # its cache goes before there is another
            with torch.inference_mode(False):  # what is made in that mode can be written in no other
                made = _Made(Decoder(self.model, rows, length), weights)
        yield made.decoder
        self._made = made


def _places(model: GPT2) -> Hashable:
    parts = (part for weight in model.parameters()
             for part in ((weight.levels, weight.scale) if isinstance(weight, Int8) else (weight,)))
    return tuple((part.data_ptr(), part.dtype, part.device) for part in parts)
