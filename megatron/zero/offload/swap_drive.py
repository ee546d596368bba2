"""Swap files on an NVMe drive: asynchronous, checksummed reads and writes, and a probe of the drive before the run.

    drive = SwapDrive("/nvme", flag="--offload-optimizer-nvme-path")
    file = AsyncSwapFile(drive, "state", sizes)                  # one tile for each of `sizes`, in bytes
    file.write(3, buffer).wait();  file.read(3, buffer).wait()

A request is split into blocks, each one system call of an I/O thread. The future of a block's write keeps its checksum,
which a read verifies. A read returns the last data written, or raises: after a failed write, for a tile that was never
written, or if bytes changed on disk. Requests for one tile take effect in order; requests for different tiles run in
parallel. The caller must not touch the buffer before the request is done. Page-aligned buffers are not copied. Swap
files have no names: the file system frees their space when they are closed or collected, or the process ends, however
it ends.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Literal
from weakref import WeakSet

from torch import Tensor, uint8

from data.storage import crc32
from megatron.errors import ConfigError, StorageError, explain_os_error, format_bytes
from megatron.zero.offload.direct_io import PAGE_SIZE, DirectIoFile, page_aligned_bytes, round_up_to_page

IoKind = Literal["read", "write"]

# Bytes of one system call, the default of `AioSettings`; less if the probe is smaller.
PROBE_BLOCK_BYTES = 8 << 20
PROBE_SECONDS = 0.4  # seconds of writing, and of reading
# Upper limit of the probe, besides what the run needs and a quarter of the free space: on some file systems freeing
# space takes as long as writing it.
MAX_PROBE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class AioSettings:
    """DeepSpeed's `aio` section. One positioned system call transfers what DeepSpeed's queue would hold."""

    block_size: int = 1 << 20
    queue_depth: int = 8  # blocks in one system call; the disk works on all of them at once
    intra_op_parallelism: int = 1  # concurrent system calls, for reads and for writes each
    single_submit: bool = False  # one block per system call; `queue_depth` is ignored
    # One more thread, so that a block is checksummed while the disk works on another.
    overlap_events: bool = True


class IoThreads:
    """Threads that read, or write, all files of a drive; at most `slots` of them are in a system call."""

    def __init__(self, name: str, aio: AioSettings) -> None:
        self.slots = BoundedSemaphore(aio.intra_op_parallelism)
        self.threads = ThreadPoolExecutor(aio.intra_op_parallelism + aio.overlap_events, f"swap files: {name}")


class SwapDrive:
    """The folder and the I/O threads for the swap files of one engine on one rank."""

    def __init__(self, nvme_path: str | os.PathLike[str], *, flag: str, aio: AioSettings = AioSettings()) -> None:
        """`flag` is the setting that gave `nvme_path`, for messages. Raises StorageError if it is not writable."""
        self.path, self.flag, self.aio = check_nvme_path(nvme_path, flag), flag, aio
        try:
            os.close(create_unnamed_file(self.path))
        except OSError as error:
            raise StorageError(
                f"{flag} {self.path}: cannot write there: {_explain_create_error(error, self.path)}") from error
        # Separate: an awaited read does not queue behind writes.
        self.reads, self.writes = IoThreads("reads", aio), IoThreads("writes", aio)
        self.files: WeakSet[AsyncSwapFile] = WeakSet()
        self._owner_pid = os.getpid()

    def check_same_process(self) -> None:
        """Raise ConfigError in a forked process: it has neither the threads nor the memory."""
        if os.getpid() != self._owner_pid:
            raise ConfigError(f"what an engine keeps in {self.path} belongs to process {self._owner_pid}, "
                              f"and this is a fork of it ({os.getpid()}): use it only in the process that made the "
                              "engine, not in a fork or a worker of a data loader")

    def close(self) -> None:
        """Close the files, which frees their space. Idempotent; a fork closes nothing of its parent."""
        if os.getpid() == self._owner_pid:
            for file in list(self.files):
                file.close()


def check_nvme_path(nvme_path: str | os.PathLike[str], flag: str) -> Path:
    """The resolved path. Raises ConfigError unless it exists: creating it would hide a drive that is not mounted."""
    path = Path(nvme_path)
    if not os.path.exists(path):
        raise ConfigError(f"{flag} {path}: there is no such folder; create it on the drive, or name one that exists")
    if not os.path.isdir(path):
        raise ConfigError(f"{flag} {path}: expected a folder, found a file")
    return path.resolve()


def create_unnamed_file(folder: Path) -> int:
    """The descriptor of a new file that no name leads to. Raises OSError."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = folder / f".swap-{secrets.token_hex(8)}"  # a file system without O_TMPFILE, such as NFS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return descriptor


def _explain_create_error(error: OSError, folder: Path) -> str:
    """Why nothing could be created in an existing folder, and what to do."""
    if error.errno in (errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP):  # such as /proc
        return "its file system takes no new files; choose a folder on a drive"
    why, remedy = explain_os_error(error, folder)
    return f"{why}; {remedy}, or choose another folder"


@dataclass(eq=False)
class SwapRequest:
    """A pending or finished read or write of one tile."""

    blocks: list[Future[int]] = field(default_factory=list)  # their results are checksums

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
    last_write: SwapRequest | None = None  # pending or finished
    # Since the last write; finished ones are dropped by the next request.
    reads: list[SwapRequest] = field(default_factory=list)


class AsyncSwapFile:
    def __init__(self, drive: SwapDrive, name: str, sizes: Sequence[int]) -> None:
        """Create a file with one tile for each of `sizes` (bytes). Raises StorageError if the disk is full."""
        self.description = f"swap file {name} in {drive.path}"
        self.read_bytes = self.written_bytes = 0  # requested so far, without padding
        self._drive, aio = drive, drive.aio
        self._block_bytes = round_up_to_page(aio.block_size * (1 if aio.single_submit else aio.queue_depth))
        offsets = [0, *accumulate(map(round_up_to_page, sizes))]
        self._tiles = [_SwapTile(number, offset, size) for number, (offset, size) in enumerate(zip(offsets, sizes))]
        self._failed_writes: list[tuple[_SwapTile, SwapRequest]] = []
        self._submit_lock = Lock()
        self._is_closed = False
        try:
            self.file = DirectIoFile(create_unnamed_file(drive.path), offsets[-1])
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

    def is_written(self, tile: int) -> bool:
        """A write of the tile was requested."""
        return self._tiles[tile].last_write is not None

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


def probe_drive(drive: SwapDrive, contents: str, stored: int, read: int, written: int) -> str:
    """Measure the drive in about a second; a line with its rates and the cost of a step. `contents` is the state that
    takes `stored` bytes there; a step reads and writes `read` and `written` bytes. Raises StorageError if the drive is
    too small or broken."""
    if not stored:
        return f" nvme {drive.path}: nothing of this run will be there"
    free = shutil.disk_usage(drive.path).free
    if free < stored:
        raise StorageError(f"{drive.flag} {drive.path}: {format_bytes(free)} free, but this run needs "
                           f"{format_bytes(stored)} there; free space or choose another folder")
    try:
        read_rate, write_rate = measure_rates(drive.path, min(MAX_PROBE_BYTES, free // 4, stored))
    except OSError as error:
        raise StorageError(f"{drive.flag} {drive.path}: cannot write there and read back: "
                           f"{_explain_create_error(error, drive.path)}") from error
    seconds = read / read_rate + written / write_rate  # reads and writes share the drive
    return (f" nvme {drive.path} for {contents}: {format_bytes(free)} free, needs {format_bytes(stored)}; reads "
            f"{format_bytes(read_rate)}/s, writes {format_bytes(write_rate)}/s: about {seconds:.3g} s of a step")


def measure_rates(path: Path, size: int) -> tuple[float, float]:
    """Read and write rate in bytes per second, with a probe of about `size` bytes in whole pages."""
    length = max(PAGE_SIZE, min(PROBE_BLOCK_BYTES, size) // PAGE_SIZE * PAGE_SIZE)
    block = page_aligned_bytes(length, pinned=False).numpy().data
    block[:] = os.urandom(length)  # a drive may compress
    disk = DirectIoFile(create_unnamed_file(path), 0)
    try:
        begin, end = time.perf_counter(), 0
        while end == 0 or (end + length <= size and time.perf_counter() - begin < PROBE_SECONDS):
            disk.write(block, end)
            end += length
        os.fsync(disk.descriptor)
        write_rate = end / (time.perf_counter() - begin)
        os.posix_fadvise(disk.descriptor, 0, end, os.POSIX_FADV_DONTNEED)  # if O_DIRECT was not available
        begin, at = time.perf_counter(), 0
        while at == 0 or (at < end and time.perf_counter() - begin < PROBE_SECONDS):
            disk.read(block, at)
            at += length
        return at / (time.perf_counter() - begin), write_rate
    finally:
        disk.close()
