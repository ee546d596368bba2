"""The bytes of a new file on their way to the disk: counted, checksummed, and written past the page cache.

An ordinary write copies every byte into a page that the kernel has to find first, and gigabytes of such pages push out
what training reads. O_DIRECT hands a block of our own memory to the disk instead, which leaves the processor to the
training that goes on meanwhile (docs/benchmarks.md). Only whole blocks go that way: small files and the end of large
ones are ordinary writes, and so is everything on a file system that does not know the flag.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Self

import numpy as np

from data.storage import crc32
from megatron.checkpoint.manifest import FileEntry

BLOCK = 8 << 20
"""Bytes handed to the disk at once: from here on a disk is as fast as it can be. A multiple of every sector size."""

O_DIRECT = getattr(os, "O_DIRECT", 0)


class Sink:
    """An empty file being written, and what its manifest entry will say. While one block is filled and checksummed, a
    second thread writes the other one; both leave the interpreter to the training."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.crc = file, 0, 0
        self._filling, self._leaving = (np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8) for _ in range(2))
        self._used = 0
        self._helper = ThreadPoolExecutor(1)  # starts its thread at the first full block
        self._written: Future[None] | None = None

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
            self.crc = crc32(part.data, self.crc)  # while it is in the processor's cache
            self._used += part.size
            rest = rest[part.size:]
            if self._used == BLOCK:
                self._send()

    def finish(self) -> FileEntry:
        """Wait until everything is on the disk."""
        self._settle()
        _set_direct(self.file, False)
        _write(self.file, self._filling[:self._used].data)
        os.fsync(self.file.fileno())
        return FileEntry(self.size, f"{self.crc:08x}")

    def _send(self) -> None:
        """The full block leaves, the other one is filled next."""
        if self._written is None:
            _set_direct(self.file, True)
        self._settle()
        try:
            self._written = self._helper.submit(_write, self.file, self._filling.data)
        except RuntimeError:  # no thread can be had: the interpreter is ending, for one
            self._helper.shutdown(cancel_futures=True)  # or a later thread would write this block once more
            _write(self.file, self._filling.data)
        self._filling, self._leaving, self._used = self._leaving, self._filling, 0

    def _settle(self) -> None:
        if self._written is not None:
            self._written.result()


def _write(file: IO[bytes], data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(file.fileno(), data):]
        except OSError as error:  # EINVAL: the flag was taken, but not these bytes (a short write before them)
            if error.errno != errno.EINVAL or not _set_direct(file, False):
                raise


def _set_direct(file: IO[bytes], on: bool) -> bool:
    """Whether the flag could be, and was, changed."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | O_DIRECT if on else flags & ~O_DIRECT
    try:
        return wanted != flags and fcntl.fcntl(file, fcntl.F_SETFL, wanted) == 0
    except OSError:
        return False
