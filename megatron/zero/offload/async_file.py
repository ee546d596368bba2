"""Asynchronous, checksummed reads and writes of fixed-size tiles in one swap file.

    file.write(3, buffer).wait()        file.read(3, buffer).wait()

A request is split into blocks, each one system call of an I/O thread. The future of a block's write keeps its checksum,
which a read verifies. A read returns the last data written, or raises: after a failed write, for a tile that was never
written, or if bytes changed on disk. Requests for one tile take effect in order; requests for different tiles run in
parallel. The caller must not touch the buffer before the request is done. Page-aligned buffers are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import Literal, final

from torch import Tensor, uint8

from data.storage import crc32
from megatron.errors import StorageError, explain_os_error, format_bytes
from megatron.zero.offload.direct_io import DirectIoFile, round_up_to_page
from megatron.zero.offload.swap_drive import SwapDrive

IoKind = Literal["read", "write"]


@dataclass(eq=False)
class SwapRequest:
    """A pending or finished read or write of one tile."""

    blocks: list[Future[int]] = field(default_factory=list)
    """Their results are checksums."""

    def is_done(self) -> bool:
        """`wait` would return or raise at once."""
        return all(block.done() for block in self.blocks)

    def error(self) -> BaseException | None:
        """Block until the transfer is done; return its first error."""
        errors = [block.exception() for block in self.blocks]
        return next((error for error in errors if error is not None), None)

    def wait(self) -> None:
        """Block until the transfer is done. Raises its error, on every call."""
        if (error := self.error()) is not None:
            raise error


@dataclass
class _SwapTile:
    number: int
    offset: int
    size: int
    last_write: SwapRequest | None = None
    """Pending or finished."""
    reads: list[SwapRequest] = field(default_factory=list)
    """Since the last write; finished ones are dropped by the next request."""


@final
class AsyncSwapFile:
    def __init__(self, drive: SwapDrive, name: str, sizes: Sequence[int]) -> None:
        """Create a file with one tile for each of `sizes` (bytes). Raises StorageError if the disk is full."""
        self.description = f"swap file {name} in {drive.path}"
        self.read_bytes = self.written_bytes = 0
        """Requested so far, without padding."""
        self._drive, self._block_bytes = drive, drive.aio.bytes_per_call
        offsets = [0, *accumulate(map(round_up_to_page, sizes))]
        self._tiles = [_SwapTile(number, offset, size) for number, (offset, size) in enumerate(zip(offsets, sizes))]
        self._failed_writes: list[tuple[_SwapTile, SwapRequest]] = []
        self._submit_lock = Lock()
        self._is_closed = False
        try:
            self.file = DirectIoFile(drive.create_file(), offsets[-1])
        except OSError as error:
            why, remedy = explain_os_error(error, drive.path)
            raise StorageError(f"{self.description}: cannot make a file of {format_bytes(offsets[-1])}: {why}; "
                               f"{self._remedy_text(remedy)}") from error
        drive.files.add(self)

    def read(self, tile: int, into: Tensor) -> SwapRequest:
        """Start to read the tile into the first bytes of a uint8 buffer."""
        self.read_bytes += self._tiles[tile].size
        return self._submit("read", self._tiles[tile], into)

    def write(self, tile: int, source: Tensor) -> SwapRequest:
        """Start to write the first bytes of a uint8 buffer to the tile."""
        self.written_bytes += self._tiles[tile].size
        return self._submit("write", self._tiles[tile], source)

    def wait_for_requests(self) -> None:
        """Wait for all pending requests; raise if a tile is lost because its last write failed."""
        for tile in self._tiles:
            _wait_for_all((*tile.reads, tile.last_write))
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise the error of a tile whose last write failed, without waiting for other writes."""
        for tile, request in self._failed_writes:
            if request is tile.last_write:
                request.wait()

    def close(self) -> None:
        """Close the file and free its space: running calls finish, queued requests fail."""
        self._is_closed = True
        for tile in self._tiles:
            _wait_for_all((*tile.reads, tile.last_write))
        self.file.close()

    def _submit(self, kind: IoKind, tile: _SwapTile, buffer: Tensor) -> SwapRequest:
        self._drive.check_same_process()
        assert buffer.dtype == uint8 and buffer.dim() == 1 and buffer.is_contiguous() and len(buffer) >= tile.size
        if self._is_closed:
            raise self._closed_error(kind, tile)
        data = buffer.numpy().data[:tile.size]
        request, pool = SwapRequest(), self._drive.reads if kind == "read" else self._drive.writes
        transfer = self._read_block if kind == "read" else self._write_block
        with self._submit_lock:  # a request must be queued behind the ones that it waits for
            tile.reads = [read for read in tile.reads if not read.is_done()]
            written, before = tile.last_write, [*tile.reads]
            if kind == "read":
                tile.reads.append(request)
            else:
                tile.last_write, tile.reads = request, []
            for start in range(0, max(tile.size, 1), self._block_bytes):
                request.blocks.append(pool.threads.submit(
                    transfer, tile, request, written, before, start, data[start:start + self._block_bytes]))
        return request

    def _write_block(self, tile: _SwapTile, request: SwapRequest, written: SwapRequest | None,
                     reads: Sequence[SwapRequest], start: int, data: memoryview) -> int:
        try:
            _wait_for_all((*reads, written))
            if self._is_closed:
                raise self._closed_error("write", tile)
            checksum = crc32(data)
            with self._drive.writes.slots:
                self.file.write(data, tile.offset + start)
            return checksum
        except Exception as error:
            if not self._is_closed:
                self._failed_writes.append((tile, request))
            raise self._to_storage_error("write", tile, error)

    def _read_block(self, tile: _SwapTile, request: SwapRequest, written: SwapRequest | None,
                    reads: Sequence[SwapRequest], start: int, data: memoryview) -> int:
        block = start // self._block_bytes
        if written is None or block >= len(written.blocks):  # the latter if an interrupt cut its `_submit` short
            raise StorageError(f"{self.description}: tile {tile.number} was read before it was written")
        written.wait()
        if self._is_closed:
            raise self._closed_error("read", tile)
        try:
            with self._drive.reads.slots:
                self.file.read(data, tile.offset + start)
        except OSError as error:
            raise self._to_storage_error("read", tile, error)
        found, expected = crc32(data), written.blocks[block].result()
        if found != expected:
            raise StorageError(f"{self.description}: tile {tile.number} is not what was written: checksum {found:08x}, "
                               f"expected {expected:08x}; {self._remedy_text('check the drive')}")
        return found

    def _closed_error(self, kind: IoKind, tile: _SwapTile) -> StorageError:
        return StorageError(f"{self.description} was closed before it could {kind} tile {tile.number}")

    def _to_storage_error(self, kind: IoKind, tile: _SwapTile, error: Exception) -> Exception:
        if not isinstance(error, OSError):
            return error
        why, remedy = explain_os_error(error, self._drive.path)
        return StorageError(f"{self.description}: cannot {kind} tile {tile.number} of {format_bytes(tile.size)}: "
                            f"{why}; {self._remedy_text(remedy)}")

    def _remedy_text(self, first: str) -> str:
        return f"{first}, or choose another folder with {self._drive.flag}, and resume from the last checkpoint"


def _wait_for_all(requests: Iterable[SwapRequest | None]) -> None:
    for request in requests:
        if request is not None:
            request.error()
