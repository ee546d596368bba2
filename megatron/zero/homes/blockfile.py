"""Positioned reads and writes of one file, past the page cache where the file system lets them.

Two descriptors of the same file: one with O_DIRECT, and an ordinary one for what the first refuses (no such flag, a
buffer that does not begin a page). A length that is no multiple of a page is filled up with a page of our own, so the
places of what is written must be a page's multiples, and lie that far apart. What goes wrong is an OSError.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

PAGE_SIZE = 4096
"""Bytes. O_DIRECT wants addresses, lengths and places in a file to be multiples of a sector, which is at most this."""

O_DIRECT = getattr(os, "O_DIRECT", 0)

PositionedCall = Callable[[int, Sequence[memoryview], int], int]
"""preadv or pwritev: (descriptor, buffers, place) -> bytes."""


@final
class DirectIoFile:
    def __init__(self, descriptor: int, size: int) -> None:
        """Takes over an empty file, and makes room for `size` bytes: a full disk is known now."""
        self.descriptor = descriptor
        try:
            _preallocate(self.descriptor, size)
            self._direct = _reopen_direct(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, data: memoryview, offset: int) -> None:
        whole = len(data) // PAGE_SIZE * PAGE_SIZE
        parts = [data[:whole]]
        if whole < len(data):
            last = memoryview(mmap.mmap(-1, PAGE_SIZE))
            last[:len(data) - whole] = data[whole:]
            parts.append(last)
        self._transfer(os.pwritev, parts, offset)

    def read(self, into: memoryview, offset: int) -> None:
        whole = len(into) // PAGE_SIZE * PAGE_SIZE
        parts, last = [into[:whole]], None
        if whole < len(into):
            last = memoryview(mmap.mmap(-1, PAGE_SIZE))
            parts.append(last)
        self._transfer(os.preadv, parts, offset)
        if last is not None:
            into[whole:] = last[:len(into) - whole]

    def close(self) -> None:
        for descriptor in {self.descriptor, self._direct}:
            with suppress(OSError):
                os.close(descriptor)

    def _transfer(self, call: PositionedCall, parts: list[memoryview], offset: int) -> None:
        """Call until every byte has gone."""
        while parts := [part for part in parts if len(part)]:
            count = self._call(call, parts, offset)
            if count == 0:
                raise OSError(errno.EIO, "the file ends before its time")
            offset += count
            parts = _skip_bytes(parts, count)

    def _call(self, call: PositionedCall, parts: list[memoryview], offset: int) -> int:
        try:
            return call(self._direct, parts, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct == self.descriptor:
                raise
        return call(self.descriptor, parts, offset)


def round_up_to_page(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE_SIZE) * PAGE_SIZE


def _skip_bytes(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left when the first `count` bytes have gone."""
    left = []
    for part in parts:
        skipped = min(count, len(part))
        count -= skipped
        left.append(part[skipped:])
    return left


def _preallocate(descriptor: int, size: int) -> None:
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)  # the file system cannot promise room: it is missed when it is needed


def _reopen_direct(descriptor: int) -> int:
    """The same file opened past the page cache, or the descriptor itself where that cannot be."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | O_DIRECT)
    except OSError:
        return descriptor
