"""Write and read safetensors files tensor by tensor, with a crc32 computed while writing.

The safetensors library needs all tensors in memory and returns no checksum.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from data.storage import crc32
from megatron.checkpoint.file_formats import METADATA_KEY, explain_read_errors, read_header
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


def split_files(items: Sequence[FileTensor]) -> Iterator[list[FileTensor]]:
    """The tensors of each file, in order; wide dtypes first, so that each is aligned to its width."""
    batch, used = list[FileTensor](), 0
    for item in sorted(items, key=lambda item: -item.dtype.itemsize):
        if batch and used + item.nbytes > MAX_FILE_BYTES:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += item.nbytes
    if batch:
        yield batch


def file_parts(items: Sequence[FileTensor], metadata: Mapping[str, str] = {}) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file: its header, then each tensor, which is loaded when it is reached."""
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for item in items:
        start, end = end, end + item.nbytes
        entries[item.key] = {"dtype": DTYPE_NAMES[item.dtype], "shape": list(item.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    yield len(text).to_bytes(8, "little") + text
    for item in items:
        yield _tensor_bytes(item)


# A function of its own, so that no local keeps the tensor while the next one is loaded.
def _tensor_bytes(item: FileTensor) -> memoryview:
    tensor = item.load()
    assert tensor.dtype == item.dtype and tensor.numel() == prod(item.shape), f"{item.key}: not what was announced"
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileEntry:
    """Write and fsync a new file; returns its manifest entry."""
    with open(path, "xb", buffering=0) as file:
        return write_parts(file, parts)


def write_parts(file: IO[bytes], parts: Iterable[bytes | memoryview]) -> FileEntry:
    """Write and fsync an empty file; returns its manifest entry, with the crc32 of what was written."""
    # Double-buffered: a second thread writes one block while the other is filled and checksummed; both release the GIL
    # for training. Memory maps are aligned to pages, as O_DIRECT needs it.
    filling, flushing = (np.frombuffer(mmap.mmap(-1, WRITE_BLOCK_BYTES), np.uint8) for _ in range(2))
    size = crc = used = 0
    flush: Future[None] | None = None
    with ThreadPoolExecutor(1) as helper:  # starts its thread at the first full block
        for data in parts:
            size += len(data)
            rest = np.frombuffer(data, np.uint8)
            while rest.size:
                part = filling[used:used + rest.size]
                np.copyto(part, rest[:part.size])
                crc = crc32(part.data, crc)  # while it is in the CPU cache
                used += part.size
                rest = rest[part.size:]
                if used == WRITE_BLOCK_BYTES:
                    if flush is None:
                        _set_direct_io(file, True)
                    else:
                        flush.result()  # before its buffer is filled again
                    try:
                        flush = helper.submit(_write_all, file, filling.data)
                    except RuntimeError:  # no thread can be started, for example at interpreter shutdown
                        helper.shutdown(cancel_futures=True)  # a later thread would write this block again
                        _write_all(file, filling.data)
                    filling, flushing, used = flushing, filling, 0
            del data, rest  # they keep a tensor, and the next part loads another one
        if flush is not None:
            flush.result()
        _set_direct_io(file, False)  # the rest is no full sector
        _write_all(file, filling[:used].data)
        os.fsync(file.fileno())
    return FileEntry(size, f"{crc:08x}")


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
