"""Host buffers that begin on a page: what O_DIRECT asks of memory, and what a GPU copies fastest when it is locked.

They are private mappings of huge pages where the system has them: the kernel hands those to a drive in a quarter of the
processor time. Forked children (workers of a data loader) do not get them: the parent would have to copy every page it
writes after the fork. Locked ones are mappings too, which CUDA is told of: torch's own page-locked memory is rounded up
to powers of two.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from megatron.zero.homes.blockfile import PAGE_SIZE, round_up_to_page

_LIVE_MAPPINGS: weakref.WeakSet[_HostMapping] = weakref.WeakSet()
_PARENT_MAPPINGS: list[_HostMapping] = []
"""In a forked child: where they were something else may be by now, which must not go with them."""

os.register_at_fork(after_in_child=lambda: _PARENT_MAPPINGS.extend(_LIVE_MAPPINGS))

_PIN_WARNINGS: list[str] = []
"""Of the process, as its limit is: why it locks no memory."""

_CUDA_HOST_REGISTER_PORTABLE = 1
"""Of cudaHostRegister: locked for every device of the process."""


def page_aligned_bytes(nbytes: int, *, pinned: bool) -> Tensor:
    """[nbytes] of uint8 whose first byte begins a page, all zero. `pinned`, of a process with a GPU, asks for
    page-locked memory: where the system locks no more, one line says so and the memory is ordinary."""
    memory = _map_pages(nbytes)
    if pinned and nbytes:
        try:
            memory.pin()
        except RuntimeError as error:
            _warn_once(str(error).partition("\n")[0])
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)


def page_aligned_zeros(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """[count], all zero, in such a buffer."""
    return page_aligned_bytes(numel * dtype.itemsize, pinned=pinned).view(dtype)


class _HostMapping(mmap.mmap):
    _registered_address = 0
    """The address, where CUDA has to be told that it goes."""

    def pin(self) -> None:
        all_bytes = torch.frombuffer(self, dtype=torch.uint8)
        all_bytes.zero_()  # by all threads: CUDA would have the pages made one after the other
        address, self._device = all_bytes.data_ptr(), _current_device()
        if int(error := _cudart().cudaHostRegister(address, len(self), _CUDA_HOST_REGISTER_PORTABLE)):
            _clear_cuda_error()
            raise RuntimeError(_cudart().cudaGetErrorString(error))
        self._registered_address = address

    def __del__(self) -> None:  # before the memory goes
        if self._registered_address:
            with suppress(Exception):  # at the end of the program CUDA may be gone
                _synchronize(self._device)  # a copy may be under way
                _cudart().cudaHostUnregister(self._registered_address)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _current_device() -> int:
    return torch.cuda.current_device()


def _synchronize(device: int) -> None:
    torch.cuda.synchronize(device)


def _clear_cuda_error() -> None:
    """CUDA keeps the error of a call, and the next kernel would be blamed for it: one that is not needed."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _map_pages(nbytes: int) -> _HostMapping:
    try:
        memory = _HostMapping(-1, max(round_up_to_page(nbytes), PAGE_SIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"can't allocate memory: {nbytes} bytes for a tile: {error.strerror}") from error
    _LIVE_MAPPINGS.add(memory)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        try:
            memory.madvise(getattr(mmap, name))
        except (AttributeError, OSError):
            pass  # not known to this system
    return memory


def _warn_once(reason: str) -> None:
    if _PIN_WARNINGS:
        return
    _PIN_WARNINGS.append(reason)
    print(f"warning: memory cannot be page-locked ({reason}); offloading uses ordinary memory, which is copied more "
          "slowly: raise the limit (ulimit -l), or set pin_memory to false", file=sys.stderr, flush=True)
