"""Keeps the C allocator from giving memory back to the system between steps of a CPU run.

A training step frees and takes the same few gigabytes again and again. glibc hands large blocks back at once, so
every step pays for fresh zeroed pages: a third of the time of a bf16 step of plain torch on a virtual machine
(docs/benchmarks.md, docs/decisions/003-allocator.md). When glibc keeps what it has, the process stays at its peak.

Memory that is kept has to be found again. torch asks for aligned blocks, for which glibc takes some 100 bytes more;
what is left over (48 bytes as a rule) lies between two large blocks, and keeps the holes that these leave apart, and
too small for the next block of the same size, unless it joins them when they are freed.
    It does not join them while it is in a list of small blocks for fast use. So CPU runs go without those lists:
fastbins are switched off here, tcache before the process starts, by scripts/lib.sh.
    Nor does it once something small has taken it: a node of autograd, say, which lives until the loss is let go. Among
free blocks of one small size glibc takes that which has been free longest. So a stock of them is made at the start, and
by the time that leftovers have their turn they have gone back to their neighbours.

A run whose state is on a drive is short of memory, not of time: there large blocks are mapped one by one, and go back
to the system. Nothing lies between them then, and what the process holds is what is in use.
"""

from __future__ import annotations

import ctypes
import sys

M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = 1, -1, -2, -3, -4
MAX_MAPPED_BLOCKS = 65536
"""Blocks that are mapped one by one: glibc's own number."""

LARGE_BLOCK_BYTES = 4 << 20
"""Bytes of a block that is worth a call of the system."""

PREALLOCATED_BLOCKS = 100_000
"""Small blocks, 8 MB with what keeps them apart: more than a training step takes."""
LEFTOVER_BYTES, SEPARATOR_BYTES = 40, 16
"""Bytes that a program can ask of a block of 48, and of one of 32."""


def keep_freed_memory(*, return_large_blocks: bool = False) -> bool:
    """Ask glibc for it; False where there is no glibc. Environment variables MALLOC_..._ do the same for any
    program."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    large = {M_MMAP_MAX: 0, M_TOP_PAD: 64 << 20}
    if return_large_blocks:
        libc.malloc_trim(0)  # what an earlier run of this process kept
        large = {M_MMAP_MAX: MAX_MAPPED_BLOCKS, M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES, M_TOP_PAD: LARGE_BLOCK_BYTES}
    taken = all(libc.mallopt(option, value)
                for option, value in {M_MXFAST: 0, M_TRIM_THRESHOLD: 2**31 - 1, **large}.items())
    if taken:
        _preallocate_small_blocks(libc)
    return taken


def _preallocate_small_blocks(libc: ctypes.CDLL) -> None:
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = []
    for _ in range(PREALLOCATED_BLOCKS):
        blocks.append(libc.malloc(LEFTOVER_BYTES))
        libc.malloc(SEPARATOR_BYTES)  # stays: free neighbours would become one block
    for block in blocks:
        libc.free(block)
