"""A home on the host whose parts come to the device for a step, and go back: the arithmetic stays on the device.

Three parts are on the device at a time: one comes, one is used, one goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.ferry import Ferry, Mark
from megatron.zero.homes.host import Host, HostShelf
from megatron.zero.homes.parts import STEP_SETS
from megatron.zero.homes.shelf import Kept, Shelf, Walk


@final
class Streamed:
    is_elsewhere, walks_on_host = True, False

    def __init__(self, home: Host, ferry: Ferry, device: torch.device) -> None:
        self._home, self._ferry, self._device = home, ferry, device

    def shelf(self, name: str, numel: int) -> Shelf:
        return self._home.shelf(name, numel)

    def walk(self, steps: Iterable[Sequence[tuple[Shelf, slice]]]) -> Walk:
        order = [(shelf, part) for ((shelf, part),) in steps if isinstance(shelf, HostShelf)]
        sets = _Sets(self._device, max((part.stop - part.start for _, part in order), default=0))
        coming: deque[tuple[_Set, Kept, Mark]] = deque()
        for number, (shelf, part) in enumerate(order):
            for following, its in order[number + len(coming) : number + 2]:
                coming.append(self._bring(following, its, sets.take()))
            buffers, kept, arrival = coming.popleft()
            arrival.join()
            yield [kept]
            buffers.gone = [shelf.copy_in(kept, part, self._ferry.down)]
        sets.join()

    def _bring(self, shelf: HostShelf, part: slice, into: _Set) -> tuple[_Set, Kept, Mark]:
        kept = into.views(shelf, part)
        return into, kept, shelf.copy_out(kept, part, self._ferry.up, into.gone)

    def settle(self) -> None:
        self._home.settle()

    def close(self) -> None:
        self._home.close()


class _Set:
    """A buffer on the device for each kind."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, size
        self._buffers: dict[str, Tensor] = {}
        self.gone: Sequence[Mark] = ()
        """What was in it has gone back then."""

    def views(self, shelf: Shelf, part: slice) -> Kept:
        for kind in shelf.kinds:
            if kind not in self._buffers:
                self._buffers[kind] = torch.empty(self._size, dtype=shelf.dtype, device=self._device)
        return {kind: self._buffers[kind][: part.stop - part.start] for kind in shelf.kinds}


class _Sets:
    """In turns."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._sets = deque(_Set(device, size) for _ in range(STEP_SETS))

    def join(self) -> None:
        """They may be freed."""
        for buffers in self._sets:
            for mark in buffers.gone:
                mark.join()

    def take(self) -> _Set:
        self._sets.rotate(-1)
        return self._sets[0]
