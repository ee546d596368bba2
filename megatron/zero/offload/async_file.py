"""Asynchronous, checksummed reads and writes of fixed-size tiles in one swap file.

    file.write(3, buffer).wait()        file.read(3, buffer).wait()

A request is split into blocks, each one system call. A checksum of each block is kept in memory and verified when the block is
read. A read returns the last data written, or raises: after a failed write, for a tile that was never written, or if bytes
changed on disk. Requests for one tile take effect in order; requests for different tiles run in parallel.
The caller must not touch the buffer before the request is done. Page-aligned buffers are not copied.
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
from megatron.errors import StorageError, explain_os_error, format_bytes
from megatron.zero.offload import swap_dir
from megatron.zero.offload.direct_io import DirectIoFile, round_up_to_page
from megatron.zero.offload.swap_dir import SWAP_FILE_SUFFIX, SwapDir

IoKind = Literal["read", "write"]


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
    def bytes_per_call(self) -> int:
        return round_up_to_page(self.block_size * (1 if self.single_submit else self.queue_depth))


@dataclass
class SwapTraffic:
    """What was asked to be read and written: requests, and their bytes without padding."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def add_request(self, kind: IoKind, size: int) -> None:
        if kind == "read":
            self.reads, self.read_bytes = self.reads + 1, self.read_bytes + size
        else:
            self.writes, self.written_bytes = self.writes + 1, self.written_bytes + size


@final
class SwapRequest:
    """A read or write under way."""

    def __init__(self, kind: IoKind, tile: _SwapTile, buffer: memoryview, num_blocks: int,
                 waits_for: Sequence[SwapRequest]) -> None:
        self._kind, self._tile, self._buffer = kind, tile, buffer
        self._waits_for = waits_for
        """Earlier requests for the tile that this one waits for. Before a read: the write it finds."""
        self._checksums = [0] * num_blocks
        self._blocks_left = num_blocks
        self._started_blocks: set[int] = set()
        """Stretches that a thread has taken."""
        self._error: Exception | None = None
        self._done_event = Event()

    def is_done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._done_event.is_set()

    def wait(self) -> None:
        """Until the bytes are where they belong. Raises what went wrong, each time."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> Exception | None:
        """The same; what went wrong is returned."""
        self._done_event.wait()
        return self._error


@dataclass
class _SwapTile:
    number: int
    offset: int
    size: int
    last_write: SwapRequest | None = None
    """The last write, under way or ended."""
    pending_reads: list[SwapRequest] = field(default_factory=list)
    """Under way, since the last write."""
    failure: Exception | None = None
    """Of the last write that has ended: the tile is lost, until a later one."""


@dataclass
class _SwapFileCleanup:
    """What there is to stop: apart from the `AsyncSwapFile`, so that the folder can do it and does not keep that alive."""

    path: Path
    file: DirectIoFile
    pending: set[SwapRequest] = field(default_factory=set)
    stopped: bool = False

    def stop(self, timeout: float) -> bool:
        if self.stopped:
            return True
        self.stopped = True  # what is queued ends at once
        with suppress(OSError):
            os.unlink(self.path)
        for request in list(self.pending):
            if not request._done_event.wait(timeout):
                return False  # closed, the call under way could meet another file under the same number
        self.file.close()
        return True


@final
class AsyncSwapFile:
    def __init__(self, swap_dir: SwapDir, name: str, sizes: Sequence[int], *,
                 settings: AioSettings = AioSettings()) -> None:
        """A new file with room for a tile of each of the `sizes` in bytes."""
        self.path = swap_dir.path / (name + SWAP_FILE_SUFFIX)
        self.traffic = SwapTraffic()
        self._swap_dir, self._block_bytes = swap_dir, settings.bytes_per_call  # the folder goes with its object
        places = [0, *accumulate(map(round_up_to_page, sizes))]
        self._tiles = [_SwapTile(number, place, size) for number, (place, size) in enumerate(zip(places, sizes))]
        self._submit_lock = RLock()  # never needed by the threads; Ctrl-C may come just before it is given back
        self._completion_lock = Lock()
        self._thread_pools = swap_dir.thread_pools(settings.intra_op_parallelism, int(settings.overlap_events))
        self._cleanup = _SwapFileCleanup(self.path, self._open(swap_dir, name, places[-1]))
        swap_dir.add_stop_callback(self._cleanup.stop)

    def read(self, tile: int, into: Tensor) -> SwapRequest:
        """Fill the first bytes of a buffer of uint8 with the tile."""
        return self._submit("read", self._tiles[tile], into)

    def write(self, tile: int, source: Tensor) -> SwapRequest:
        """Store the first bytes of a buffer of uint8 as the tile."""
        return self._submit("write", self._tiles[tile], source)

    def wait_for_requests(self) -> None:
        """Wait for all that is under way; raise if a tile is lost, because its last write failed."""
        under_way = list(self._cleanup.pending)
        for request in under_way:
            request._done_event.wait()
        self.raise_if_lost()

    def close(self) -> None:
        """Remove the file: calls under way end, requests that wait for their turn fail. Raise if a tile was lost."""
        self._swap_dir.check_same_process()
        self._cleanup.stop(swap_dir.CLOSE_TIMEOUT_SECONDS)
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise if a tile is known to be lost."""
        for tile in self._tiles:
            if tile.failure is not None:
                raise tile.failure

    def _open(self, swap_dir: SwapDir, name: str, size: int) -> DirectIoFile:
        try:
            return DirectIoFile(swap_dir.create_file(name), size)
        except OSError as error:
            why, remedy = explain_os_error(error, swap_dir.path)
            raise StorageError(
                f"{self.path}: cannot make a file of {format_bytes(size)}: {why}; {self._remedy_text(remedy)}"
            ) from error

    def _submit(self, kind: IoKind, tile: _SwapTile, buffer: Tensor) -> SwapRequest:
        self._swap_dir.check_same_process()
        assert buffer.dtype == uint8 and buffer.dim() == 1 and buffer.is_contiguous() and len(buffer) >= tile.size
        data = buffer.numpy().data[:tile.size]
        starts = range(0, max(tile.size, 1), self._block_bytes)
        with self._submit_lock:  # until it is queued: who waits for another must stand behind it
            tile.pending_reads = [request for request in tile.pending_reads if not request.is_done()]
            before = [tile.last_write] if tile.last_write else []
            request = SwapRequest(kind, tile, data, len(starts),
                                  before if kind == "read" else before + tile.pending_reads)
            self.traffic.add_request(kind, tile.size)
            try:
                self._enqueue(request, starts)
            except BaseException:  # Ctrl-C: of some stretches it is not known whether they are queued
                self._enqueue(request, starts)
                raise
        return request

    def _enqueue(self, request: SwapRequest, starts: Iterable[int]) -> None:
        """A request is its tile's, and its stretches are queued. May be done again."""
        tile = request._tile
        if request._kind == "write":
            tile.last_write, tile.pending_reads = request, []
        elif request not in tile.pending_reads:
            tile.pending_reads.append(request)
        pool = self._thread_pools.read if request._kind == "read" else self._thread_pools.write
        self._cleanup.pending.add(request)  # without the lock: Ctrl-C may come before it is given back
        for start in starts:
            pool.submit(partial(self._run_block, request, start))

    def _run_block(self, request: SwapRequest, start: int) -> None:
        """One stretch, in a thread, once."""
        with self._completion_lock:
            if start in request._started_blocks:
                return
            request._started_blocks.add(start)
        error: Exception | None = None
        try:
            for earlier in request._waits_for:
                earlier._done_event.wait()
            if self._is_stopped():
                raise StorageError(f"{self.path} was closed before it could {request._kind} tile "
                                   f"{request._tile.number}")
            transfer = self._read_block if request._kind == "read" else self._write_block
            transfer(request, start, request._buffer[start:start + self._block_bytes])
        except OSError as problem:
            error = self._to_storage_error(request, problem)
        except Exception as problem:  # for whoever waits
            error = problem
        self._finish_block(request, error)

    def _write_block(self, request: SwapRequest, start: int, data: memoryview) -> None:
        request._checksums[start // self._block_bytes] = crc32(data)
        with self._thread_pools.write.io_slots:
            self._cleanup.file.write(data, request._tile.offset + start)

    def _read_block(self, request: SwapRequest, start: int, data: memoryview) -> None:
        tile = request._tile
        if not request._waits_for:
            raise StorageError(f"{self.path}: tile {tile.number} was read before it was written")
        written = request._waits_for[0]
        if written._error is not None:
            raise written._error
        with self._thread_pools.read.io_slots:
            self._cleanup.file.read(data, tile.offset + start)
        found, expected = crc32(data), written._checksums[start // self._block_bytes]
        if found != expected:
            raise StorageError(f"{self.path}: tile {tile.number} is not what was written: checksum {found:08x}, "
                               f"expected {expected:08x}; {self._remedy_text('check the drive')}")

    def _finish_block(self, request: SwapRequest, error: Exception | None) -> None:
        """Of one piece; with the last one, of the request."""
        with self._completion_lock:
            request._error = request._error or error
            request._blocks_left -= 1
            if request._blocks_left:
                return
            self._cleanup.pending.discard(request)
            request._waits_for, request._buffer = (), memoryview(b"")
            if request._kind == "write" and not self._is_stopped():
                request._tile.failure = request._error
        request._done_event.set()

    def _is_stopped(self) -> bool:
        return self._cleanup.stopped or self._swap_dir.is_closing

    def _to_storage_error(self, request: SwapRequest, error: OSError) -> StorageError:
        tile, (why, remedy) = request._tile, explain_os_error(error, self.path.parent)
        return StorageError(
            f"{self.path}: cannot {request._kind} tile {tile.number} of {format_bytes(tile.size)}: {why}; "
            f"{self._remedy_text(remedy)}")

    def _remedy_text(self, first: str) -> str:
        return f"{first}, or choose another folder with {self._swap_dir.flag}, and resume from the last checkpoint"
