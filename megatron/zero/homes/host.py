"""The home on the host, beside the device: flat page-locked memory, updated where it is a part at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from megatron.zero.homes.ferry import Lane, Mark
from megatron.zero.homes.memory import numbers
from megatron.zero.homes.parts import cut
from megatron.zero.homes.shelf import WEIGHT, Kept, Shelf, Walk


@final
class HostShelf(Shelf):
    """Opened, it gives views. Whoever looks waits for what is on its way from here or to here."""

    def __init__(self, numel: int, dtype: torch.dtype, parts: Sequence[slice], *, pinned: bool) -> None:
        super().__init__(numel, dtype)
        self._parts, self._pinned = parts, pinned
        self._tensors = {WEIGHT: numbers(numel, dtype, pinned=pinned)}
        self._under_way: dict[tuple[Lane, int, int], Mark] = {}
        """The last copy by each lane of each stretch that was copied."""
        self._user: Future[None] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def parts(self) -> Sequence[slice]:
        return self._parts

    def add(self, kinds: Sequence[str]) -> None:
        self._tensors |= {kind: numbers(self.numel, self.dtype, pinned=self._pinned) for kind in kinds}

    @contextmanager
    def open(self, part: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[Kept]:
        yield {kind: self.in_memory(kind)[part] for kind in self.kinds if kinds is None or kind in kinds}

    def in_memory(self, kind: str) -> Tensor:
        self.settle()
        return self._tensors[kind]

    def taken(self, part: slice) -> Kept:
        """For somebody whom others `wait_for`."""
        self.settle()
        return {kind: everything[part] for kind, everything in self._tensors.items()}

    def wait_for(self, user: Future[None]) -> None:
        self._user = user

    def settle(self) -> None:
        if self._user is not None:
            wait([self._user])
            self._user = None
        for mark in self._under_way.values():
            mark.wait()
        self._under_way.clear()

    def bring(self, out: Tensor, lane: Lane) -> Mark:
        return self.copy_out({WEIGHT: out}, slice(0, self.numel), lane)

    def copy_out(self, out: Kept, part: slice, lane: Lane, after: Sequence[Mark] = ()) -> Mark:
        """Of the kinds of `out`; after what came there, too."""
        after = [*after, *self._others(part, lane)]
        for kind, place in out.items():
            mark = lane.copy(place, self._tensors[kind][part], after)
        return self._note(part, lane, mark)

    def copy_in(self, values: Kept, part: slice, lane: Lane) -> Mark:
        """After what left from there."""
        after = self._others(part, lane)
        for kind, source in values.items():
            mark = lane.copy(self._tensors[kind][part], source, after)
        return self._note(part, lane, mark)

    def _note(self, part: slice, lane: Lane, mark: Mark) -> Mark:
        self._under_way[lane, part.start, part.stop] = mark
        return mark

    def _others(self, part: slice, lane: Lane) -> list[Mark]:
        return [mark for (other, start, stop), mark in self._under_way.items()
                if other is not lane and start < part.stop and part.start < stop]


class Host:
    is_elsewhere = walks_on_host = True

    def __init__(self, dtype: torch.dtype, part: int, *, pinned: bool) -> None:
        """`part` is how many numbers a step takes at a time; 0: all of a shelf."""
        self._dtype, self._part, self._pinned = dtype, part, pinned
        self._shelves: list[HostShelf] = []

    def shelf(self, name: str, numel: int) -> HostShelf:
        shelf = HostShelf(numel, self._dtype, cut(numel, self._part or max(1, numel)), pinned=self._pinned)
        self._shelves.append(shelf)
        return shelf

    def walk(self, steps: Iterable[Sequence[tuple[Shelf, slice]]]) -> Walk:
        for ((shelf, part),) in steps:
            with shelf.open(part) as kept:
                yield [kept]

    def settle(self) -> None:
        for shelf in self._shelves:
            shelf.settle()

    def close(self) -> None:
        self.settle()
