"""The home on an NVMe drive: a file of tiles for each bucket, and a few buffers on the host in front of them.

A *part* of a shelf is as many numbers of each kind as fit a buffer; on the drive it is a tile a kind. A *set* is a
buffer a kind. Whoever uses a part takes a set for it and gives it back; one that is given back may be on its way to or
from the drive still, and keeps its part until it is needed for another: what was looked at last need not be read again,
and `expect` is no more than to take, begin to read, and give back. What was never written is zero.

A step reads into one set, uses another, and writes from a third.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.zero.homes.ferry import Lane, Mark
from megatron.zero.homes.here import HereShelf
from megatron.zero.homes.host import HostShelf
from megatron.zero.homes.memory import aligned
from megatron.zero.homes.parts import cut, largest
from megatron.zero.homes.shelf import WEIGHT, Kept, Shelf, Walk
from megatron.zero.homes.swapfolder import SwapFolder
from megatron.zero.homes.tilefile import AioSettings, Pending, TileFile, Traffic
from megatron.zero.homes.used import DriveUse


@dataclass(frozen=True, kw_only=True)
class NvmeSettings:
    part: int
    """Numbers, at most."""
    within: int | None = None
    """Parts of a step, which are written at a time."""
    sets: int
    """On the host, at most; one more than a step needs at a time is the least."""
    dtype: torch.dtype = torch.float32
    whole: bool = False
    """A part is a whole shelf: for rules that look at whole parameters."""
    in_memory: int = 0
    """Numbers that stay on the host: the shelves that are made first."""
    pinned: bool = False
    apart: bool = False
    """The device is not the host."""
    reads_ahead: bool = True
    writes_behind: bool = True
    aio: AioSettings = AioSettings()


@dataclass
class _Waited:
    """Of all sets of a home."""

    seconds: float = 0.0


@dataclass(eq=False)
class _Set:
    """A buffer for each kind; those of one part at a time."""

    buffers: Mapping[str, Tensor]
    waited: _Waited
    of: tuple[int, int] | None = None
    """Identity of the shelf and first number of the part."""
    there: set[str] = field(default_factory=set)
    """Kinds of it that are here, as they are, or will be, on the drive: they need not be read."""
    under_way: list[Pending] = field(default_factory=list)
    leaves: Mark | None = None
    """It is on its way to the device."""

    def wait(self) -> None:
        """Until nothing is under way. After an error the set holds nothing."""
        if (error := self.drain()) is not None:
            raise error

    def drain(self) -> Exception | None:
        """The same for whoever has no use for what was under way: a tile that could not be written is lost until it is
        written again, and says so itself."""
        first: Exception | None = None
        self.let_go()
        begin = time.perf_counter()
        while self.under_way:
            error = self.under_way[-1].error()
            self.under_way.pop()
            if error is not None:
                self.there.clear()
                first = first or error
        self.waited.seconds += time.perf_counter() - begin
        return first

    def let_go(self) -> None:
        """Nothing comes from it any more."""
        if self.leaves is not None:
            self.leaves.wait()
            self.leaves = None

    def forget(self) -> None:
        self.of = None
        self.there.clear()


@final
class NvmeShelf(Shelf):
    def __init__(self, home: Nvme, file: TileFile, numel: int, parts: Sequence[slice]) -> None:
        super().__init__(numel, home.settings.dtype)
        self.file, self._home, self._parts = file, home, parts
        self._place = {part.start: number for number, part in enumerate(parts)}
        self._kinds: tuple[str, ...] = (WEIGHT,)
        self._written: set[int] = set()

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._kinds

    @property
    def parts(self) -> Sequence[slice]:
        return self._parts

    @property
    def is_on_drive(self) -> bool:
        return True

    def add(self, kinds: Sequence[str]) -> None:
        self._kinds += tuple(kinds)

    @contextmanager
    def open(self, part: slice, kinds: Sequence[str] | None = None, *, reads: bool = True,
             writes: bool = False) -> Iterator[Kept]:
        kinds = self._kinds if kinds is None else kinds
        with self._home.a_set(self.key(part)) as buffers:
            if not reads:
                buffers.there.update(kinds)
            kept = self.fetch(part, kinds, buffers)
            buffers.wait()
            yield kept
            if writes:
                self.store(part, kinds, buffers)

    def expect(self) -> None:
        for part in self._parts[: self._home.settings.sets - 1]:
            if not self._home.has(self.key(part)):
                with self._home.a_set(self.key(part)) as buffers:
                    self.fetch(part, self._kinds, buffers)

    def bring(self, out: Tensor, lane: Lane) -> Mark:
        for part in self._parts:
            with self._home.a_set(self.key(part)) as buffers:
                kept = self.fetch(part, [WEIGHT], buffers)
                buffers.wait()
                mark = buffers.leaves = lane.copy(out[part], kept[WEIGHT])
        return mark

    def key(self, part: slice) -> tuple[int, int]:
        return id(self), part.start

    def fetch(self, part: slice, kinds: Sequence[str], into: _Set) -> Kept:
        """Begin to read a part; it is there when the set has waited."""
        for kind in kinds:
            if kind in into.there:
                continue
            if (tile := self._tile(part, kind)) in self._written:
                into.under_way.append(self.file.read(tile, into.buffers[kind]))
            else:
                into.buffers[kind].zero_()
            into.there.add(kind)
        return {kind: into.buffers[kind].view(self.dtype)[: part.stop - part.start] for kind in kinds}

    def store(self, part: slice, kinds: Iterable[str], source: _Set) -> None:
        """Begin to write it."""
        for kind in kinds:
            tile = self._tile(part, kind)
            source.under_way.append(self.file.write(tile, source.buffers[kind]))
            self._written.add(tile)

    def _tile(self, part: slice, kind: str) -> int:
        return self._place[part.start] * len(self._home.kinds) + self._home.kinds.index(kind)


@final
class Nvme:
    """Of one engine on one rank."""

    is_elsewhere = True

    def __init__(self, folder: SwapFolder, name: str, states: Sequence[str], settings: NvmeSettings) -> None:
        self.kinds, self.settings = (WEIGHT, *states), settings
        self._folder, self._name = folder, name
        self._files: list[TileFile] = []
        self._on_host: list[HostShelf] = []
        self._free: deque[_Set] = deque()
        """Those given back first are first."""
        self._in_use: set[tuple[int, int]] = set()
        """Parts, each with a set. One that is left by an error is nobody's any more, and another takes its place: where
        Ctrl-C came, a read into it may be on its way that nobody knows of."""
        self._is_closed = False
        self._waited = _Waited()
        self._size = 0
        self._in_memory = 0

    def shelf(self, name: str, numel: int) -> Shelf:
        if self._in_memory + numel <= self.settings.in_memory:
            self._in_memory += numel
            if self.settings.apart:
                self._on_host.append(HostShelf(numel, self.settings.dtype, [slice(0, numel)],
                                               pinned=self.settings.pinned))
                return self._on_host[-1]
            return HereShelf(torch.zeros(numel, dtype=self.settings.dtype))
        parts = cut(numel, numel if self.settings.whole else self.settings.part, self.settings.within)
        tiles = [(part.stop - part.start) * self.settings.dtype.itemsize for part in parts for _ in self.kinds]
        file = TileFile(self._folder, f"{self._name}-{len(self._files)}-{name}", tiles, settings=self.settings.aio)
        self._files.append(file)
        self._make_room_for(largest(parts))
        return NvmeShelf(self, file, numel, parts)

    @property
    def walks_on_host(self) -> bool:
        return self.settings.apart

    @property
    def holds_anything(self) -> bool:
        """Some shelf is on the drive."""
        return bool(self._files)

    @property
    def traffic(self) -> Traffic:
        """Since the beginning."""
        total = Traffic()
        for file in self._files:
            for name, value in vars(file.traffic).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def use(self) -> DriveUse:
        return DriveUse(self._waited.seconds, sum(file.traffic.read_bytes for file in self._files),
                        sum(file.traffic.written_bytes for file in self._files))

    def walk(self, steps: Iterable[Sequence[tuple[Shelf, slice]]]) -> Walk:
        order = [(shelf, part) for ((shelf, part),) in steps if isinstance(shelf, NvmeShelf)]
        taken: deque[_Set] = deque()
        try:
            for number, (shelf, part) in enumerate(order):
                shelf.file.check()  # what has been lost needs no more work
                for following, its in order[number + len(taken) : number + 1 + self.settings.reads_ahead]:
                    taken.append(self._take(following.key(its)))
                    following.fetch(its, following.kinds, taken[-1])
                taken[0].wait()
                yield [shelf.fetch(part, shelf.kinds, taken[0])]
                shelf.store(part, shelf.kinds, taken[0])
                if not self.settings.writes_behind:
                    taken[0].wait()
                self._give(taken.popleft())
        except BaseException:
            self._in_use.difference_update(shelf.key(part) for shelf, part in order)
            raise

    @contextmanager
    def a_set(self, key: tuple[int, int]) -> Iterator[_Set]:
        buffers = None
        try:
            buffers = self._take(key)
            yield buffers
            self._give(buffers)
        except BaseException:
            if buffers is not None:
                buffers.let_go()
            self._in_use.discard(key)  # what was changed in it is not written
            raise

    def has(self, key: tuple[int, int]) -> bool:
        """The part is here, or on its way."""
        return any(buffers.of == key for buffers in self._free)

    def _take(self, key: tuple[int, int]) -> _Set:
        """The set that has the part, or another one for it."""
        self._folder.check_ours()
        if self._is_closed:
            raise ConfigError("this engine's state was on a drive, and went with engine.destroy(): save before it")
        assert key not in self._in_use, "two sets of one part would know nothing of each other's changes"
        found = next((buffers for buffers in self._free if buffers.of == key), None)
        if found is not None:
            self._free.remove(found)
        elif len(self._free) + len(self._in_use) < self.settings.sets:
            found = self._new_set()
        else:
            found = self._free.popleft()
        found.drain()
        if found.of != key:
            found.forget()
            found.of = key
        self._in_use.add(key)
        return found

    def _give(self, buffers: _Set) -> None:
        """Back; it holds what is, or will be, on the drive."""
        assert buffers.of is not None
        self._in_use.discard(buffers.of)
        self._free.append(buffers)

    def _new_set(self) -> _Set:
        size = self._size * self.settings.dtype.itemsize
        return _Set({kind: aligned(size, pinned=self.settings.pinned) for kind in self.kinds},
                    self._waited)

    def _make_room_for(self, size: int) -> None:
        """Sets are of the largest part; the root's bucket comes first, and mostly is the largest."""
        if size > self._size:
            self.settle()
            self._size = size
            self._free.clear()

    def settle(self) -> None:
        for buffers in self._free:
            buffers.drain()
        for shelf in self._on_host:
            shelf.settle()
        for file in self._files:
            file.settle()

    def close(self) -> None:
        self._is_closed = True
        for buffers in self._free:
            buffers.let_go()
        self._free.clear()
        self._folder.close()
