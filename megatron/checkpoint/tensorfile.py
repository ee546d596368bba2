"""Safetensors files, written tensor by tensor and read through a memory map.

Any safetensors library reads them (header.py says what they are). We write them ourselves because the library wants
every tensor in memory at once and returns no checksum; ours holds one tensor at a time, wherever it comes from, and
sink.py computes the crc32 on the way.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch

from megatron.checkpoint.header import header_bytes, read_header
from megatron.checkpoint.manifest import FileEntry
from megatron.checkpoint.sink import Sink
from megatron.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FILE_BYTES = 4 << 30
"""A file is closed when the next tensor would make it larger: lost or damaged files stay small, copies resume."""


AT_A_TIME = 16 << 20
"""Bytes that are copied at a time out of a file under reading: it has about so much memory."""


@dataclass(frozen=True)
class Item:
    """One tensor to be written: its size is known now, its data is fetched when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def split_files(items: Sequence[Item], limit: int | None = None) -> Iterator[list[Item]]:
    """The items of each file, filled in order; wide dtypes first, so that each is aligned to its width."""
    ordered = sorted(items, key=lambda item: -item.dtype.itemsize)
    batch: list[Item] = []
    used = 0
    for item in ordered:
        if batch and used + item.nbytes > (limit or FILE_BYTES):
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += item.nbytes
    if batch:
        yield batch


def write_file(path: Path, items: Sequence[Item], metadata: Mapping[str, str] = {}, signed: bool = False) -> FileEntry:
    """Write and fsync a new safetensors file."""
    with open(path, "xb", buffering=0) as file:
        return write_items(file, items, metadata, signed)


def write_items(file: IO[bytes], items: Sequence[Item], metadata: Mapping[str, str] = {},
                signed: bool = False) -> FileEntry:
    with Sink(file, signed) as sink:
        sink.write(_header(items, metadata))
        for item in items:
            sink.write(_bytes_of(item))
        return sink.finish()


def write_blob(path: Path, data: bytes, signed: bool = False) -> FileEntry:
    """Write and fsync a new file of other content."""
    with open(path, "xb", buffering=0) as file, Sink(file, signed) as sink:
        sink.write(data)
        return sink.finish()


def _header(items: Sequence[Item], metadata: Mapping[str, str]) -> bytes:
    return header_bytes({item.key: (DTYPE_NAMES[item.dtype], item.shape) for item in items}, metadata)


def _bytes_of(item: Item) -> memoryview:
    tensor = item.load()
    assert tensor.dtype == item.dtype and tensor.numel() == prod(item.shape), f"{item.key}: not what was announced"
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file under reading; touching a run of a tensor reads only its pages. They count as memory of the
    process until they are dropped, which `read` does."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        try:
            with open(path, "rb") as file:
                self.places = read_header(file, where).places
                # Not writable: a private, writable map of the file would be charged to RLIMIT_DATA, all of it.
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror or error})") from error
        self._flat: dict[str, torch.Tensor] = {}
        """Views already made: a resharding reads the same tensor row by row."""
        self._touched = 0  # bytes, since pages were dropped

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor, as a view of the map."""
        if key not in self.places:
            raise CheckpointError(f"{self.where}: no tensor {key!r}")
        place = self.places[key]
        dtype, shape = DTYPES[place.dtype], place.shape
        if place.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():  # torch warns of a buffer that cannot be written to
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(self.map, dtype=dtype, count=prod(shape), offset=place.start).view(shape)

    def read(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the elements from `start` on of the flattened tensor; copy_ converts dtype and
        device."""
        flat = self._flat.get(key)
        if flat is None:
            flat = self._flat[key] = self.tensor(key).view(-1)
        if start + len(out) > flat.numel():
            raise CheckpointError(f"{self.where}: {key!r} has {flat.numel()} elements, {start + len(out)} expected")
        done = 0
        for part in flat[start : start + len(out)].split(AT_A_TIME // flat.element_size()):
            out[done : done + len(part)].copy_(part)
            done += len(part)
            self._drop_behind(part.nbytes)

    def _drop_behind(self, nbytes: int) -> None:
        """Let go of what has been read; touched again, it comes back."""
        self._touched += nbytes
        if self._touched >= AT_A_TIME:
            self.map.madvise(mmap.MADV_DONTNEED)
            self._touched = 0
