"""Keeps the C allocator from giving memory back to the system between steps of a CPU run.

A training step frees and takes the same few gigabytes again and again. glibc hands large blocks back at once, so
every step pays for fresh zeroed pages: a third of the time of a bf16 step of plain torch on a virtual machine
(docs/benchmarks.md, docs/decisions/003-allocator.md). When glibc keeps what it has, the process stays at its peak.

Memory that is kept has to be found again. torch asks for aligned blocks, for which glibc takes some 100 bytes more;
what is left over goes to lists of small blocks, where it does not join the hole that the large block leaves, and the
next block of the same size finds no room there. So CPU runs go without those lists: fastbins are switched off here,
tcache before the process starts, by scripts/lib.sh.
"""

from __future__ import annotations

import ctypes
import sys

M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = 1, -1, -2, -4


def keep_freed_memory() -> bool:
    """Ask glibc for it; False where there is no glibc. Environment variables MALLOC_..._ do the same for any
    program."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(option, value) for option, value in (
        (M_MXFAST, 0), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)))
