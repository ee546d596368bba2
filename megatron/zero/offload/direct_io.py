"""O_DIRECT file access, and the page-aligned host buffers that it and fast device copies need.

`DirectIoFile` opens a file twice: with O_DIRECT, and normally for calls that O_DIRECT refuses. Offsets are multiples of
a page, and a last partial page is padded. Buffers are private mappings (huge pages where available), not inherited by
forked children, and optionally page-locked with cudaHostRegister, as torch's own pinned memory rounds sizes up to
powers of two.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

# Bytes. O_DIRECT needs addresses, lengths and offsets that are multiples of a sector, which is at most this.
PAGE_SIZE = 4096

O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectIoFile:
    def __init__(self, descriptor: int, size: int) -> None:
        """Take ownership of an empty file and reserve `size` bytes, so that a full disk is detected now."""
        self.descriptor = self._direct = descriptor
        self.close = weakref.finalize(self, self._close_all, descriptors := {descriptor})  # idempotent
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                self.close()
                raise
            os.ftruncate(descriptor, size)  # no reservation on this file system: a full disk shows at a write
        with suppress(OSError):  # without O_DIRECT, if it is not supported
            self._direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | O_DIRECT)
            descriptors.add(self._direct)

    @staticmethod
    def _close_all(descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)

    def write(self, data: memoryview, offset: int) -> None:
        whole = len(data) // PAGE_SIZE * PAGE_SIZE
        self._transfer(os.pwritev, data[:whole], offset)
        if whole < len(data):
            last = memoryview(mmap.mmap(-1, PAGE_SIZE))
            last[:len(data) - whole] = data[whole:]
            self._transfer(os.pwritev, last, offset + whole)

    def read(self, into: memoryview, offset: int) -> None:
        whole = len(into) // PAGE_SIZE * PAGE_SIZE
        self._transfer(os.preadv, into[:whole], offset)
        if whole < len(into):
            last = memoryview(mmap.mmap(-1, PAGE_SIZE))
            self._transfer(os.preadv, last, offset + whole)
            into[whole:] = last[:len(into) - whole]

    def _transfer(self, call: Callable[[int, Sequence[memoryview], int], int], data: memoryview, offset: int) -> None:
        """Repeat the call, preadv or pwritev, until all bytes are transferred."""
        while len(data):
            try:
                count = call(self._direct, [data], offset)
            except OSError as error:
                if error.errno != errno.EINVAL or self._direct == self.descriptor:
                    raise
                count = call(self.descriptor, [data], offset)
            if count == 0:
                raise OSError(errno.EIO, "the file ends before its time")
            data, offset = data[count:], offset + count


def round_up_to_page(nbytes: int) -> int:
    return -(-nbytes // PAGE_SIZE) * PAGE_SIZE


_LIVE_MAPPINGS: weakref.WeakSet[_HostMapping] = weakref.WeakSet()
# In a forked child: keeps the parent's mappings from being unmapped, as their addresses may now hold something else.
_PARENT_MAPPINGS: list[_HostMapping] = []

os.register_at_fork(after_in_child=lambda: _PARENT_MAPPINGS.extend(_LIVE_MAPPINGS))

_CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegister flag: page-locked for every device of the process


def page_aligned_bytes(nbytes: int, *, pinned: bool) -> Tensor:
    """uint8 zeros [nbytes], page-aligned. `pinned` (needs a GPU) page-locks them; if the system refuses, a warning is
    printed once and the memory is pageable."""
    try:
        memory = _HostMapping(-1, max(round_up_to_page(nbytes), PAGE_SIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {nbytes} bytes for a tile: {error.strerror}") from error
    _LIVE_MAPPINGS.add(memory)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(AttributeError, OSError):  # not supported by this system
            memory.madvise(getattr(mmap, name))
    if pinned and nbytes:
        try:
            memory.pin()
        except RuntimeError as error:
            _warn_not_pinned(str(error).partition("\n")[0])
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)


def page_aligned_zeros(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Zeros [numel], page-aligned; see `page_aligned_bytes`."""
    return page_aligned_bytes(numel * dtype.itemsize, pinned=pinned).view(dtype)


class _HostMapping(mmap.mmap):
    _registered_address = 0  # nonzero if registered with CUDA

    def pin(self) -> None:
        all_bytes = torch.frombuffer(self, dtype=torch.uint8)
        all_bytes.zero_()  # faults the pages in with all threads; cudaHostRegister would use one
        address, self._device, runtime = all_bytes.data_ptr(), torch.cuda.current_device(), torch.cuda.cudart()
        if int(error := runtime.cudaHostRegister(address, len(self), _CUDA_HOST_REGISTER_PORTABLE)):
            with suppress(Exception):  # an unneeded kernel consumes the sticky error, which the next one would report
                torch.zeros(1, device="cuda")
            raise RuntimeError(runtime.cudaGetErrorString(error))
        self._registered_address = address

    def __del__(self) -> None:  # unregister before the memory is unmapped
        if self._registered_address:
            with suppress(Exception):  # at interpreter exit CUDA may be shut down
                torch.cuda.synchronize(self._device)  # a copy may still be running
                torch.cuda.cudart().cudaHostUnregister(self._registered_address)


@cache
def _warn_not_pinned(reason: str) -> None:
    """Once per process."""
    print(f"warning: memory cannot be page-locked ({reason}); offloading uses ordinary memory, which is copied more "
          "slowly: raise the limit (ulimit -l), or set pin_memory to false", file=sys.stderr, flush=True)
