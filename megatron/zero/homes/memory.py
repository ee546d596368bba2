"""Host buffers that begin on a page: what O_DIRECT asks of memory, and what a GPU copies fastest when it is locked.

Ordinary buffers are private mappings of huge pages where the system has them: the kernel hands those to a drive in a
quarter of the processor time. Forked children (workers of a data loader) do not get them: the parent would have to copy
every page it writes after the fork.

torch rounds a page-locked buffer up to a power of two: large ones should have such sizes.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

from megatron.zero.homes.blockfile import PAGE, padded

_LIVE: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_NOT_OURS: list[mmap.mmap] = []
"""In a forked child: where they were something else may be by now, which must not go with them."""

os.register_at_fork(after_in_child=lambda: _NOT_OURS.extend(_LIVE))

_TOLD: list[str] = []
"""Of the process, as its limit is: why it locks no memory."""


def aligned(nbytes: int, *, pinned: bool) -> Tensor:
    """[nbytes] of uint8 whose first byte begins a page, with unknown content. `pinned` asks for page-locked memory:
    without a GPU it means nothing, and where the system locks no more, one line says so and the memory is ordinary."""
    if pinned and torch.cuda.is_available():
        try:
            return _page_locked(nbytes)
        except RuntimeError as error:
            _tell_once(str(error).partition("\n")[0])
    return _ordinary(nbytes)


def _page_locked(nbytes: int) -> Tensor:
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if buffer.data_ptr() % PAGE:  # CUDA's blocks begin on a page; parts of them need not
        buffer = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
    return buffer.narrow(0, -buffer.data_ptr() % PAGE, nbytes)


def _ordinary(nbytes: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, max(padded(nbytes), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {nbytes} bytes for a tile: {error.strerror}") from error
    _LIVE.add(memory)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        try:
            memory.madvise(getattr(mmap, name))
        except (AttributeError, OSError):
            pass  # not known to this system
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)


def _tell_once(reason: str) -> None:
    if _TOLD:
        return
    _TOLD.append(reason)
    print(f"warning: memory cannot be page-locked ({reason}); offloading uses ordinary memory, which is copied more "
          "slowly: raise the limit (ulimit -l), or set pin_memory to false", file=sys.stderr, flush=True)
