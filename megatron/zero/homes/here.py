"""The home of what stays on the device: nothing is fetched, nothing is put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.shelf import WEIGHT, Kept, Shelf, Walk


@final
class HereShelf(Shelf):
    """Tensors on the device; opened, they are themselves."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight), weight.dtype)
        self.tensors = {WEIGHT: weight}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def parts(self) -> Sequence[slice]:
        return [slice(0, self.numel)]

    @contextmanager
    def open(self, part: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[Kept]:
        yield self.tensors

    def add(self, kinds: Sequence[str]) -> None:
        self.tensors |= {kind: torch.zeros_like(self.tensors[WEIGHT]) for kind in kinds}

    def at_hand(self, kind: str) -> Tensor | None:
        return self.tensors[kind]


class Here:
    is_elsewhere = walks_on_host = False

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype

    def shelf(self, name: str, numel: int) -> Shelf:
        return HereShelf(torch.zeros(numel, dtype=self._dtype, device=self._device))

    def walk(self, steps: Iterable[Sequence[tuple[Shelf, slice]]]) -> Walk:
        for step in steps:
            yield [shelf.tensors for shelf, _ in step if isinstance(shelf, HereShelf)]

    def settle(self) -> None:
        """It is."""

    def close(self) -> None:
        """Nothing is left anywhere."""
