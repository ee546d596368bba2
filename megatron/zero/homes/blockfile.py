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

PAGE = 4096
"""Bytes. O_DIRECT wants addresses, lengths and places in a file to be multiples of a sector, which is at most this."""

O_DIRECT = getattr(os, "O_DIRECT", 0)

Call = Callable[[int, Sequence[memoryview], int], int]
"""preadv or pwritev: (descriptor, buffers, place) -> bytes."""


@final
class BlockFile:
    def __init__(self, descriptor: int, size: int) -> None:
        """Takes over an empty file, and makes room for `size` bytes: a full disk is known now."""
        self.descriptor = descriptor
        try:
            _reserve(self.descriptor, size)
            self._direct = _once_more(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, data: memoryview, at: int) -> None:
        whole = len(data) // PAGE * PAGE
        parts = [data[:whole]]
        if whole < len(data):
            last = memoryview(mmap.mmap(-1, PAGE))
            last[:len(data) - whole] = data[whole:]
            parts.append(last)
        self._transfer(os.pwritev, parts, at)

    def read(self, into: memoryview, at: int) -> None:
        whole = len(into) // PAGE * PAGE
        parts, last = [into[:whole]], None
        if whole < len(into):
            last = memoryview(mmap.mmap(-1, PAGE))
            parts.append(last)
        self._transfer(os.preadv, parts, at)
        if last is not None:
            into[whole:] = last[:len(into) - whole]

    def close(self) -> None:
        for descriptor in {self.descriptor, self._direct}:
            with suppress(OSError):
                os.close(descriptor)

    def _transfer(self, call: Call, parts: list[memoryview], at: int) -> None:
        """Call until every byte has gone."""
        while parts := [part for part in parts if len(part)]:
            count = self._call(call, parts, at)
            if count == 0:
                raise OSError(errno.EIO, "the file ends before its time")
            at += count
            parts = _behind(parts, count)

    def _call(self, call: Call, parts: list[memoryview], at: int) -> int:
        try:
            return call(self._direct, parts, at)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct == self.descriptor:
                raise
        return call(self.descriptor, parts, at)


def padded(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE) * PAGE


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left when the first `count` bytes have gone."""
    left = []
    for part in parts:
        gone = min(count, len(part))
        count -= gone
        left.append(part[gone:])
    return left


def _reserve(descriptor: int, size: int) -> None:
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)  # the file system cannot promise room: it is missed when it is needed


def _once_more(descriptor: int) -> int:
    """The same file opened past the page cache, or the descriptor itself where that cannot be."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | O_DIRECT)
    except OSError:
        return descriptor
