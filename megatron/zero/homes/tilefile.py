"""Tiles of bytes at fixed places of one file, read and written beside the computation, and never returned wrong.

    file.write(3, buffer).wait()        file.read(3, buffer).wait()

A request is cut into *stretches*, each one system call. The checksum of a stretch is kept in memory when it is written
and compared when it is read; a read returns what was last written, or raises: after a write that failed, of a tile
never written, of bytes that have changed. Requests for one tile take effect in the order they were made, so a read of a
tile on its way to the disk waits for it. Reads and writes of different tiles do not wait for each other.

Whoever asks keeps the buffer as it is until the request has ended. Memory of `memory.aligned` goes to the disk as it
is; other memory costs a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock, RLock
from typing import Literal, final

from torch import Tensor, uint8

from data.storage import crc32
from megatron.errors import StorageError
from megatron.zero.homes import swapfolder
from megatron.zero.homes.blockfile import BlockFile, padded
from megatron.zero.homes.swapfolder import SUFFIX, SwapFolder
from megatron.zero.homes.words import in_bytes, trouble

Kind = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True)
class AioSettings:
    """DeepSpeed's block `aio`, where one positioned call hands over what its queue would hold."""

    block_size: int = 1 << 20
    queue_depth: int = 8
    """Blocks a system call hands to the disk, which works on all of them at once."""
    intra_op_parallelism: int = 1
    """System calls under way at a time: of reads, and of writes."""
    single_submit: bool = False
    """One block a call, whatever the queue's depth."""
    overlap_events: bool = True
    """A further thread, so that the disk works on one stretch while another is checksummed."""

    @property
    def stretch(self) -> int:
        return padded(self.block_size * (1 if self.single_submit else self.queue_depth))


@dataclass
class Traffic:
    """What was asked to be read and written: requests, and their bytes without padding."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def count(self, kind: Kind, size: int) -> None:
        if kind == "read":
            self.reads, self.read_bytes = self.reads + 1, self.read_bytes + size
        else:
            self.writes, self.written_bytes = self.writes + 1, self.written_bytes + size


@final
class Pending:
    """A read or write under way."""

    def __init__(self, kind: Kind, tile: _Tile, buffer: memoryview, pieces: int, after: Sequence[Pending]) -> None:
        self._kind, self._tile, self._buffer = kind, tile, buffer
        self._after = after
        """Earlier requests for the tile that this one waits for. Before a read: the write it finds."""
        self._sums = [0] * pieces
        self._left = pieces
        self._begun: set[int] = set()
        """Stretches that a thread has taken."""
        self._error: Exception | None = None
        self._ended = Event()

    def done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Until the bytes are where they belong. Raises what went wrong, each time."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> Exception | None:
        """The same; what went wrong is returned."""
        self._ended.wait()
        return self._error


@dataclass
class _Tile:
    number: int
    place: int
    size: int
    written: Pending | None = None
    """The last write, under way or ended."""
    reads: list[Pending] = field(default_factory=list)
    """Under way, since the last write."""
    failure: Exception | None = None
    """Of the last write that has ended: the tile is lost, until a later one."""


@dataclass
class _Works:
    """What there is to stop: apart from the `TileFile`, so that the folder can do it and does not keep that alive."""

    path: Path
    disk: BlockFile
    under_way: set[Pending] = field(default_factory=set)
    stopped: bool = False

    def stop(self, patience: float) -> bool:
        if self.stopped:
            return True
        self.stopped = True  # what is queued ends at once
        with suppress(OSError):
            os.unlink(self.path)
        for request in list(self.under_way):
            if not request._ended.wait(patience):
                return False  # closed, the call under way could meet another file under the same number
        self.disk.close()
        return True


@final
class TileFile:
    def __init__(self, folder: SwapFolder, name: str, sizes: Sequence[int], *,
                 settings: AioSettings = AioSettings()) -> None:
        """A new file with room for a tile of each of the `sizes` in bytes."""
        self.path = folder.path / (name + SUFFIX)
        self.traffic = Traffic()
        self._folder, self._stretch = folder, settings.stretch  # the folder goes with its object
        places = [0, *accumulate(map(padded, sizes))]
        self._tiles = [_Tile(number, place, size) for number, (place, size) in enumerate(zip(places, sizes))]
        self._asking = RLock()  # never needed by the threads; Ctrl-C may come just before it is given back
        self._ending = Lock()
        self._lanes = folder.lanes(settings.intra_op_parallelism, int(settings.overlap_events))
        self._works = _Works(self.path, self._open(folder, name, places[-1]))
        folder.before_it_goes(self._works.stop)

    def read(self, tile: int, into: Tensor) -> Pending:
        """Fill the first bytes of a buffer of uint8 with the tile."""
        return self._ask("read", self._tiles[tile], into)

    def write(self, tile: int, source: Tensor) -> Pending:
        """Store the first bytes of a buffer of uint8 as the tile."""
        return self._ask("write", self._tiles[tile], source)

    def settle(self) -> None:
        """Wait for all that is under way; raise if a tile is lost, because its last write failed."""
        under_way = list(self._works.under_way)
        for request in under_way:
            request._ended.wait()
        self.check()

    def close(self) -> None:
        """Remove the file: calls under way end, requests that wait for their turn fail. Raise if a tile was lost."""
        self._folder.check_ours()
        self._works.stop(swapfolder.PATIENCE)
        self.check()

    def check(self) -> None:
        """Raise if a tile is known to be lost."""
        for tile in self._tiles:
            if tile.failure is not None:
                raise tile.failure

    def _open(self, folder: SwapFolder, name: str, size: int) -> BlockFile:
        try:
            return BlockFile(folder.create(name), size)
        except OSError as error:
            why, remedy = trouble(error, folder.path)
            raise StorageError(f"{self.path}: cannot make a file of {in_bytes(size)}: {why}; {self._remedy(remedy)}"
                               ) from error

    def _ask(self, kind: Kind, tile: _Tile, buffer: Tensor) -> Pending:
        self._folder.check_ours()
        assert buffer.dtype == uint8 and buffer.dim() == 1 and buffer.is_contiguous() and len(buffer) >= tile.size
        data = buffer.numpy().data[:tile.size]
        starts = range(0, max(tile.size, 1), self._stretch)
        with self._asking:  # until it is queued: who waits for another must stand behind it
            tile.reads = [request for request in tile.reads if not request.done()]
            before = [tile.written] if tile.written else []
            request = Pending(kind, tile, data, len(starts), before if kind == "read" else before + tile.reads)
            self.traffic.count(kind, tile.size)
            try:
                self._enter(request, starts)
            except BaseException:  # Ctrl-C: of some stretches it is not known whether they are queued
                self._enter(request, starts)
                raise
        return request

    def _enter(self, request: Pending, starts: Iterable[int]) -> None:
        """A request is its tile's, and its stretches are queued. May be done again."""
        tile = request._tile
        if request._kind == "write":
            tile.written, tile.reads = request, []
        elif request not in tile.reads:
            tile.reads.append(request)
        lane = self._lanes.read if request._kind == "read" else self._lanes.write
        self._works.under_way.add(request)  # without the lock: Ctrl-C may come before it is given back
        for start in starts:
            lane.put(partial(self._carry, request, start))

    def _carry(self, request: Pending, start: int) -> None:
        """One stretch, in a thread, once."""
        with self._ending:
            if start in request._begun:
                return
            request._begun.add(start)
        error: Exception | None = None
        try:
            for earlier in request._after:
                earlier._ended.wait()
            if self._stopped():
                raise StorageError(f"{self.path} was closed before it could {request._kind} tile "
                                   f"{request._tile.number}")
            move = self._fetch if request._kind == "read" else self._store
            move(request, start, request._buffer[start:start + self._stretch])
        except OSError as problem:
            error = self._worded(request, problem)
        except Exception as problem:  # for whoever waits
            error = problem
        self._end(request, error)

    def _store(self, request: Pending, start: int, data: memoryview) -> None:
        request._sums[start // self._stretch] = crc32(data)
        with self._lanes.write.slots:
            self._works.disk.write(data, request._tile.place + start)

    def _fetch(self, request: Pending, start: int, data: memoryview) -> None:
        tile = request._tile
        if not request._after:
            raise StorageError(f"{self.path}: tile {tile.number} was read before it was written")
        written = request._after[0]
        if written._error is not None:
            raise written._error
        with self._lanes.read.slots:
            self._works.disk.read(data, tile.place + start)
        found, expected = crc32(data), written._sums[start // self._stretch]
        if found != expected:
            raise StorageError(f"{self.path}: tile {tile.number} is not what was written: checksum {found:08x}, "
                               f"expected {expected:08x}; {self._remedy('check the drive')}")

    def _end(self, request: Pending, error: Exception | None) -> None:
        """Of one piece; with the last one, of the request."""
        with self._ending:
            request._error = request._error or error
            request._left -= 1
            if request._left:
                return
            self._works.under_way.discard(request)
            request._after, request._buffer = (), memoryview(b"")
            if request._kind == "write" and not self._stopped():
                request._tile.failure = request._error
        request._ended.set()

    def _stopped(self) -> bool:
        return self._works.stopped or self._folder.leaving

    def _worded(self, request: Pending, error: OSError) -> StorageError:
        tile, (why, remedy) = request._tile, trouble(error, self.path.parent)
        return StorageError(f"{self.path}: cannot {request._kind} tile {tile.number} of {in_bytes(tile.size)}: {why}; "
                            f"{self._remedy(remedy)}")

    def _remedy(self, first: str) -> str:
        return f"{first}, or choose another folder with {self._folder.flag}, and resume from the last checkpoint"
