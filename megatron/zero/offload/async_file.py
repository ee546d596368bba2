"""Asynchronous, checksummed reads and writes of fixed-size tiles in one swap file.

    file.write(3, buffer).wait()        file.read(3, buffer).wait()

A request is split into blocks, each one system call. A checksum of each block is kept in memory and verified when the
block is read. A read returns the last data written, or raises: after a failed write, for a tile that was never written,
or if bytes changed on disk. Requests for one tile take effect in order; requests for different tiles run in parallel.
The caller must not touch the buffer before the request is done. Page-aligned buffers are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from threading import Event, Lock, RLock
from typing import Literal, final

from torch import Tensor, uint8

from data.storage import crc32
from megatron.errors import StorageError, explain_os_error, format_bytes
from megatron.zero.offload import swap_drive
from megatron.zero.offload.direct_io import DirectIoFile, round_up_to_page
from megatron.zero.offload.swap_drive import SwapDrive

IoKind = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True)
class AioSettings:
    """DeepSpeed's `aio` section. One positioned system call transfers what DeepSpeed's queue would hold."""

    block_size: int = 1 << 20
    queue_depth: int = 8
    """Blocks in one system call; the disk works on all of them at once."""
    intra_op_parallelism: int = 1
    """Concurrent system calls, for reads and for writes each."""
    single_submit: bool = False
    """One block per system call; `queue_depth` is ignored."""
    overlap_events: bool = True
    """One more thread, so that a block is checksummed while the disk works on another."""

    @property
    def bytes_per_call(self) -> int:
        return round_up_to_page(self.block_size * (1 if self.single_submit else self.queue_depth))


@dataclass
class SwapTraffic:
    """Requests so far, and their bytes without padding."""

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
    """A pending or finished read or write of one tile."""

    def __init__(self, kind: IoKind, tile: _SwapTile, buffer: memoryview, num_blocks: int,
                 waits_for: Sequence[SwapRequest]) -> None:
        self._kind, self._tile, self._buffer = kind, tile, buffer
        self._waits_for = waits_for
        """Earlier requests for the tile that must finish first. For a read: the write whose data it returns."""
        self._checksums = [0] * num_blocks
        self._blocks_left = num_blocks
        self._started_blocks: set[int] = set()
        """Start offsets of blocks that a thread has taken."""
        self._error: Exception | None = None
        self._done_event = Event()

    def is_done(self) -> bool:
        """`wait` would return or raise at once."""
        return self._done_event.is_set()

    def wait(self) -> None:
        """Block until the transfer is done. Raises its error, on every call."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> Exception | None:
        """As `wait`, but return the error."""
        self._done_event.wait()
        return self._error


@dataclass
class _SwapTile:
    number: int
    offset: int
    size: int
    last_write: SwapRequest | None = None
    """Pending or finished."""
    pending_reads: list[SwapRequest] = field(default_factory=list)
    """Reads since the last write."""
    failure: Exception | None = None
    """Error of the last finished write: the tile is lost until a later write succeeds."""


@dataclass
class _SwapFileCleanup:
    """The resources that closing releases. Separate from `AsyncSwapFile`, so that the drive can hold it
    without keeping the file object alive."""

    file: DirectIoFile
    pending: set[SwapRequest] = field(default_factory=set)
    stopped: bool = False

    def stop(self, timeout: float) -> bool:
        if self.stopped:
            return True
        self.stopped = True  # queued blocks fail instead of running
        for request in list(self.pending):
            if not request._done_event.wait(timeout):
                return False  # closing now could let the running call hit a reused descriptor
        self.file.close()
        return True


@final
class AsyncSwapFile:
    def __init__(self, drive: SwapDrive, name: str, sizes: Sequence[int], *,
                 settings: AioSettings = AioSettings()) -> None:
        """Create a file with one tile for each of `sizes` (bytes). Raises StorageError if the disk is full."""
        self.description = f"swap file {name} in {drive.path}"
        self.traffic = SwapTraffic()
        self._drive, self._block_bytes = drive, settings.bytes_per_call
        places = [0, *accumulate(map(round_up_to_page, sizes))]
        self._tiles = [_SwapTile(number, place, size) for number, (place, size) in enumerate(zip(places, sizes))]
        self._submit_lock = RLock()  # the I/O threads never take it: an interrupt may leave it locked
        self._completion_lock = Lock()
        self._thread_pools = drive.thread_pools(settings.intra_op_parallelism, int(settings.overlap_events))
        self._cleanup = _SwapFileCleanup(self._open(drive, places[-1]))
        drive.add_stop_callback(self._cleanup.stop)

    def read(self, tile: int, into: Tensor) -> SwapRequest:
        """Start to read the tile into the first bytes of a uint8 buffer."""
        return self._submit("read", self._tiles[tile], into)

    def write(self, tile: int, source: Tensor) -> SwapRequest:
        """Start to write the first bytes of a uint8 buffer to the tile."""
        return self._submit("write", self._tiles[tile], source)

    def wait_for_requests(self) -> None:
        """Wait for all pending requests; raise if a tile is lost because its last write failed."""
        under_way = list(self._cleanup.pending)
        for request in under_way:
            request._done_event.wait()
        self.raise_if_lost()

    def close(self) -> None:
        """Close the file and free its space: running calls finish, queued requests fail. Raise if a tile is lost."""
        self._drive.check_same_process()
        self._cleanup.stop(swap_drive.CLOSE_TIMEOUT_SECONDS)
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise the error of the first lost tile, without waiting."""
        for tile in self._tiles:
            if tile.failure is not None:
                raise tile.failure

    def _open(self, drive: SwapDrive, size: int) -> DirectIoFile:
        try:
            return DirectIoFile(drive.create_file(), size)
        except OSError as error:
            why, remedy = explain_os_error(error, drive.path)
            raise StorageError(f"{self.description}: cannot make a file of {format_bytes(size)}: {why}; "
                               f"{self._remedy_text(remedy)}") from error

    def _submit(self, kind: IoKind, tile: _SwapTile, buffer: Tensor) -> SwapRequest:
        self._drive.check_same_process()
        assert buffer.dtype == uint8 and buffer.dim() == 1 and buffer.is_contiguous() and len(buffer) >= tile.size
        data = buffer.numpy().data[:tile.size]
        starts = range(0, max(tile.size, 1), self._block_bytes)
        with self._submit_lock:  # a request must be queued behind the ones that it waits for
            tile.pending_reads = [request for request in tile.pending_reads if not request.is_done()]
            before = [tile.last_write] if tile.last_write else []
            request = SwapRequest(kind, tile, data, len(starts),
                                  before if kind == "read" else before + tile.pending_reads)
            self.traffic.add_request(kind, tile.size)
            try:
                self._enqueue(request, starts)
            except BaseException:  # interrupted: some blocks may not be queued; queue all again
                self._enqueue(request, starts)
                raise
        return request

    def _enqueue(self, request: SwapRequest, starts: Iterable[int]) -> None:
        """Record the request in its tile and queue its blocks. Idempotent: `_run_block` skips a block that has
        started."""
        tile = request._tile
        if request._kind == "write":
            tile.last_write, tile.pending_reads = request, []
        elif request not in tile.pending_reads:
            tile.pending_reads.append(request)
        pool = self._thread_pools.read if request._kind == "read" else self._thread_pools.write
        self._cleanup.pending.add(request)  # not under the completion lock: an interrupt may leave that locked
        for start in starts:
            pool.submit(partial(self._run_block, request, start))

    def _run_block(self, request: SwapRequest, start: int) -> None:
        """Transfer one block in an I/O thread, at most once."""
        with self._completion_lock:
            if start in request._started_blocks:
                return
            request._started_blocks.add(start)
        error: Exception | None = None
        try:
            for earlier in request._waits_for:
                earlier._done_event.wait()
            if self._is_stopped():
                raise StorageError(f"{self.description} was closed before it could {request._kind} tile "
                                   f"{request._tile.number}")
            transfer = self._read_block if request._kind == "read" else self._write_block
            transfer(request, start, request._buffer[start:start + self._block_bytes])
        except OSError as problem:
            error = self._to_storage_error(request, problem)
        except Exception as problem:  # raised by `wait` in the training thread
            error = problem
        self._finish_block(request, error)

    def _write_block(self, request: SwapRequest, start: int, data: memoryview) -> None:
        request._checksums[start // self._block_bytes] = crc32(data)
        with self._thread_pools.write.io_slots:
            self._cleanup.file.write(data, request._tile.offset + start)

    def _read_block(self, request: SwapRequest, start: int, data: memoryview) -> None:
        tile = request._tile
        if not request._waits_for:
            raise StorageError(f"{self.description}: tile {tile.number} was read before it was written")
        written = request._waits_for[0]
        if written._error is not None:
            raise written._error
        with self._thread_pools.read.io_slots:
            self._cleanup.file.read(data, tile.offset + start)
        found, expected = crc32(data), written._checksums[start // self._block_bytes]
        if found != expected:
            raise StorageError(f"{self.description}: tile {tile.number} is not what was written: checksum {found:08x}, "
                               f"expected {expected:08x}; {self._remedy_text('check the drive')}")

    def _finish_block(self, request: SwapRequest, error: Exception | None) -> None:
        """Record the result of a block; the last block completes the request."""
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
        return self._cleanup.stopped or self._drive.is_closing

    def _to_storage_error(self, request: SwapRequest, error: OSError) -> StorageError:
        tile, (why, remedy) = request._tile, explain_os_error(error, self._drive.path)
        return StorageError(f"{self.description}: cannot {request._kind} tile {tile.number} of "
                            f"{format_bytes(tile.size)}: {why}; {self._remedy_text(remedy)}")

    def _remedy_text(self, first: str) -> str:
        return f"{first}, or choose another folder with {self._drive.flag}, and resume from the last checkpoint"
