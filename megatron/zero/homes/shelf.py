"""Shelves: where what lasts of one bucket's shard is kept. A home has a shelf for each bucket.

    for part in shelf.parts:
        with shelf.open(part, writes=True) as kept:     # kind -> tensor, on the device or on the host
            kept["weight"].mul_(0.5)

Kinds are "weight" and the states of the optimizer; all have one length. What is opened is a view where the numbers are
in memory, and of a drive a copy on the host, which is put back. Whoever reads or writes goes through the parts, so that
no more of a shelf than a part has to be here at once; a step does so with `Home.walk`, which has the next part on its
way while this one is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.zero.homes.ferry import Ferry, Lane, Mark
from megatron.zero.homes.parts import Share

Kept = Mapping[str, Tensor]
"""Kind -> the numbers of one part."""

WEIGHT = "weight"

HOST = torch.device("cpu")

Walk = Generator[list[Kept], None, None]
"""Of a step through its parts. Whoever leaves it half way closes it."""


class Shelf(ABC):
    """Of `numel` numbers of each kind."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def parts(self) -> Sequence[slice]:
        """In order, without gaps: what is opened at a time."""

    @abstractmethod
    def open(self, part: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> AbstractContextManager[Kept]:
        """One of the parts, all kinds of it or these. Without `reads` the content is of no interest; what is changed
        lasts if `writes`."""

    @abstractmethod
    def add(self, kinds: Sequence[str]) -> None:
        """Keep these as well; they begin as zeros."""

    def at_hand(self, kind: str) -> Tensor | None:
        """All numbers of a kind, to look at and to change, where they are on the device."""
        return None

    @property
    def is_on_drive(self) -> bool:
        return False

    def in_memory(self, kind: str) -> Tensor | None:
        """The same where they are on the device, or on the host beside it."""
        return self.at_hand(kind)

    def expect(self) -> None:
        """All of it will be read soon."""

    def bring(self, out: Tensor, lane: Lane) -> Mark:
        """out, on the device, <- all weights, which are not there. The last copy under way, if there are several."""
        raise NotImplementedError

    def read(self, kind: str, start: int, out: Tensor) -> None:
        """out <- the numbers from `start` on."""
        for part, there in self._overlaps(start, start + len(out)):
            with self.open(part, [kind]) as kept:
                out[part.start + there.start - start : part.start + there.stop - start] = kept[kind][there]

    def write(self, kind: str, start: int, values: Tensor) -> None:
        """The numbers from `start` on <- values."""
        for part, there in self._overlaps(start, start + len(values)):
            everything = there == slice(0, part.stop - part.start)
            with self.open(part, [kind], reads=not everything, writes=True) as kept:
                kept[kind][there] = values[part.start + there.start - start : part.start + there.stop - start]

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Parts, and where in them."""
        for part in self.parts:
            low, high = max(start, part.start), min(stop, part.stop)
            if low < high:
                yield part, slice(low - part.start, high - part.start)


@dataclass(frozen=True)
class Run:
    """Consecutive numbers of one kind."""

    shelf: Shelf
    kind: str
    start: int
    count: int

    @property
    def at_hand(self) -> Tensor | None:
        """Themselves, where they need not be fetched."""
        everything = self.shelf.at_hand(self.kind)
        return None if everything is None else everything[self.start : self.start + self.count]

    def fetch(self) -> Tensor:
        """Themselves, or a copy."""
        if (everything := self.shelf.in_memory(self.kind)) is not None:
            return everything[self.start : self.start + self.count]
        copy = torch.empty(self.count, dtype=self.shelf.dtype)
        self.shelf.read(self.kind, self.start, copy)
        return copy


class Home(Protocol):
    """Where the masters and states of all buckets of an engine are when they are not in use, or the parts that the
    ranks have of weights at work."""

    is_elsewhere: bool
    """Not on the device: there are masters even where the weights at work are the same numbers, and a step takes one
    part after the other."""

    @property
    def walks_on_host(self) -> bool:
        """The parts of a walk are on the host, and the device is not: that is where a step's arithmetic is."""

    def shelf(self, name: str, numel: int) -> Shelf:
        """A new one; all numbers are zero."""

    def walk(self, steps: Iterable[Sequence[tuple[Shelf, slice]]]) -> Walk:
        """The parts of each step, one after the other, to be changed; they are put back when the next are asked for."""

    def settle(self) -> None:
        """Everything that was put back is there; an error of that comes now."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Homes:
    """Of one engine."""

    optimizer: Home
    params: Home
    """Of weights that come and go."""
    ferry: Ferry | None = None
    """Where the device is not its own host."""
    pins: bool = False
    """What travels is page-locked on the host."""
    delays: bool = False
    """The host updates beside the next forward and backward."""
    here: Home | None = None
    """The device, where only a `share` of the masters and states goes to the home of the optimizer."""
    share: Share = field(default_factory=Share)

    def of_masters(self, numel: int) -> Home:
        """For the next bucket, whose shard has so many numbers."""
        return self.optimizer if self.here is None or self.share.leaves(numel) else self.here

    @property
    def are_elsewhere(self) -> bool:
        """There is something that is not on the device."""
        return self.optimizer.is_elsewhere or self.params.is_elsewhere

    def settle(self) -> None:
        self.optimizer.settle()
        self.params.settle()

    def close(self) -> None:
        self.optimizer.close()
        self.params.close()
