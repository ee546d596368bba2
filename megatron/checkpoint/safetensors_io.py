"""Write and read safetensors files tensor by tensor, with a crc32 computed while writing.

The safetensors library needs all tensors in memory and returns no checksum.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Self

import numpy as np
import torch

from data.storage import crc32
from megatron.checkpoint.file_formats import build_header, explain_read_errors, read_header
from megatron.checkpoint.manifest import FileEntry
from megatron.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Largest file, unless one tensor is larger: damaged files stay small, and interrupted copies can continue.
MAX_FILE_BYTES = 4 << 30
READ_BYTES = 16 << 20  # bytes per read, and size of the buffer for tensors of another dtype or device
WRITE_BLOCK_BYTES = 8 << 20  # bytes per write: enough for full disk speed, and a multiple of every sector size
O_DIRECT = getattr(os, "O_DIRECT", 0)  # full blocks bypass the page cache, which training reads its data from


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written: its size is known now, its data is loaded when it is written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def split_files(items: Sequence[FileTensor], limit: int | None = None) -> Iterator[list[FileTensor]]:
    """The tensors of each file, in order; wide dtypes first, so that each is aligned to its width."""
    batch, used = list[FileTensor](), 0
    for item in sorted(items, key=lambda item: -item.dtype.itemsize):
        if batch and used + item.nbytes > (limit or MAX_FILE_BYTES):
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += item.nbytes
    if batch:
        yield batch


def write_file(path: Path, items: Sequence[FileTensor], metadata: Mapping[str, str] = {}) -> FileEntry:
    """Write and fsync a new safetensors file."""
    with open(path, "xb", buffering=0) as file:
        return write_tensors(file, items, metadata)


def write_tensors(file: IO[bytes], items: Sequence[FileTensor], metadata: Mapping[str, str] = {}) -> FileEntry:
    with ChecksummedWriter(file) as sink:
        sink.write(build_header({item.key: (DTYPE_NAMES[item.dtype], item.shape) for item in items}, metadata))
        for item in items:
            sink.write(_tensor_bytes(item))
        return sink.finish()


def write_blob(path: Path, data: bytes) -> FileEntry:
    """Write and fsync a new file with other content."""
    with open(path, "xb", buffering=0) as file, ChecksummedWriter(file) as sink:
        sink.write(data)
        return sink.finish()


# A function of its own, so that no local keeps the tensor while the next one is loaded.
def _tensor_bytes(item: FileTensor) -> memoryview:
    tensor = item.load()
    assert tensor.dtype == item.dtype and tensor.numel() == prod(item.shape), f"{item.key}: not what was announced"
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


class ChecksummedWriter:
    """Writes an empty file and computes its manifest entry."""

    # Double-buffered: a second thread writes one block while the other is filled and checksummed; both release the GIL
    # for training.
    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.crc = file, 0, 0
        # Memory maps are aligned to pages, as O_DIRECT needs it.
        self._filling, self._flushing = (np.frombuffer(mmap.mmap(-1, WRITE_BLOCK_BYTES), np.uint8) for _ in range(2))
        self._used = 0
        self._helper = ThreadPoolExecutor(1)  # starts its thread at the first full block
        self._pending_write: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._helper.shutdown()

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        rest = np.frombuffer(data, np.uint8)
        while rest.size:
            part = self._filling[self._used:self._used + rest.size]
            np.copyto(part, rest[:part.size])
            self.crc = crc32(part.data, self.crc)  # while it is in the CPU cache
            self._used += part.size
            rest = rest[part.size:]
            if self._used == WRITE_BLOCK_BYTES:
                self._start_block_write()

    def _start_block_write(self) -> None:
        """Start writing the full block and swap the buffers."""
        if self._pending_write is None:
            _set_direct_io(self.file, True)
        else:
            self._pending_write.result()  # before its buffer is filled again
        try:
            self._pending_write = self._helper.submit(_write_all, self.file, self._filling.data)
        except RuntimeError:  # no thread can be started, for example at interpreter shutdown
            self._helper.shutdown(cancel_futures=True)  # a later thread would write this block again
            _write_all(self.file, self._filling.data)
        self._filling, self._flushing, self._used = self._flushing, self._filling, 0

    def finish(self) -> FileEntry:
        """Write the rest and fsync; returns the manifest entry."""
        if self._pending_write is not None:
            self._pending_write.result()
        _set_direct_io(self.file, False)  # the rest is no full sector
        _write_all(self.file, self._filling[:self._used].data)
        os.fsync(self.file.fileno())
        return FileEntry(self.size, f"{self.crc:08x}")


def _write_all(file: IO[bytes], data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(file.fileno(), data):]
        except OSError as error:  # EINVAL: O_DIRECT is set, but this range is unaligned (after a short write)
            if error.errno != errno.EINVAL or not _set_direct_io(file, False):
                raise


def _set_direct_io(file: IO[bytes], on: bool) -> bool:
    """Set or clear O_DIRECT; returns whether it changed."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | O_DIRECT if on else flags & ~O_DIRECT
    try:
        return wanted != flags and fcntl.fcntl(file, fcntl.F_SETFL, wanted) == 0
    except OSError:
        return False


class SafetensorsReader:
    """An open safetensors file. Reads only the bytes of the requested elements, directly into their destination."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        with explain_read_errors(where):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            with open(self._file, "rb", closefd=False) as file:
                self.tensors = read_header(file, where)[0]
            self._modified_ns = os.fstat(self._file).st_mtime_ns

    def tensor(self, key: str) -> torch.Tensor:
        place = self.tensors[key]
        found = torch.empty(place.shape, dtype=DTYPES[place.dtype], device="cpu")
        self.read(key, 0, found.view(-1))
        return found

    def read(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill the 1-D `out`, of any dtype and device, with elements from `start` on of the flattened tensor."""
        place, count = self.tensors[key], len(out)
        dtype = DTYPES[place.dtype]
        if start + count > prod(place.shape):
            raise CheckpointError(f"{self.where}: {key!r} has {prod(place.shape)} elements, {start + count} expected")
        is_as_stored = out.dtype == dtype and out.device == torch.device("cpu") and out.stride(0) == 1
        at_a_time = READ_BYTES // dtype.itemsize
        # Another dtype or device: through a buffer, so that no full copy is in memory.
        between = None if is_as_stored else torch.empty(min(count, at_a_time), dtype=dtype, device="cpu")
        for done in range(0, count, at_a_time):
            part = out[done:done + at_a_time]
            block = part if between is None else between[:len(part)]
            left, offset = block.detach().view(torch.uint8).numpy().data, place.start + (start + done) * dtype.itemsize
            with explain_read_errors(self.where):
                # By position, not mapped: an I/O error on a mapped page would kill the process.
                while left and (read := os.preadv(self._file, [left], offset)):
                    left, offset = left[read:], offset + read
                is_changed = os.fstat(self._file).st_mtime_ns != self._modified_ns
            if left or is_changed:
                raise CheckpointError(f"{self.where}: was written to or cut off while it was read")
            if between is not None:
                part.copy_(block)
