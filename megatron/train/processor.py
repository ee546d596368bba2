"""CPU runs: which precision the processor supports natively, and malloc settings that keep freed memory.

`python -m megatron.train.processor` prints the precision flag for the scripts. glibc returns large blocks to the system
at once, so each step would fault in zeroed pages again: `keep_freed_memory` turns that off
(docs/decisions/003-allocator.md). Runs with state on NVMe are short of memory: they return large blocks.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = 1, -1, -2, -3, -4
MAX_MAPPED_BLOCKS = 65536  # glibc's default number of blocks allocated with mmap

LARGE_BLOCK_BYTES = 4 << 20  # smallest block allocated with mmap, in bytes

PREALLOCATED_BLOCKS = 100_000  # number of small blocks, more than a training step uses: 8 MB with separators
LEFTOVER_BYTES, SEPARATOR_BYTES = 40, 16  # requested bytes that make glibc allocate chunks of 48 and 32


def keep_freed_memory(*, return_large_blocks: bool = False) -> bool:
    """Set malloc options so that glibc keeps freed memory; False without glibc. Same effect as the MALLOC_..._
    environment variables. `return_large_blocks` still returns blocks above LARGE_BLOCK_BYTES."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    large = {M_MMAP_MAX: 0, M_TOP_PAD: 64 << 20}
    if return_large_blocks:
        libc.malloc_trim(0)  # release what an earlier run in this process kept
        large = {M_MMAP_MAX: MAX_MAPPED_BLOCKS, M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES, M_TOP_PAD: LARGE_BLOCK_BYTES}
    if not all(libc.mallopt(option, value)
               for option, value in {M_MXFAST: 0, M_TRIM_THRESHOLD: 2**31 - 1, **large}.items()):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = []
    for _ in range(PREALLOCATED_BLOCKS):
        blocks.append(libc.malloc(LEFTOVER_BYTES))
        libc.malloc(SEPARATOR_BYTES)  # never freed: it keeps free neighbours from merging
    for block in blocks:
        libc.free(block)
    return True


# Flags in /proc/cpuinfo of instructions that torch's kernels use for this precision.
NATIVE_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16")}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The words of /proc/cpuinfo; empty if it cannot be read (not Linux)."""
    try:
        return frozenset(re.findall(r"\w+", cpuinfo.read_text()))
    except OSError:
        return frozenset()


def has_native_products(precision: str, flags: Collection[str]) -> bool:
    return not frozenset(flags).isdisjoint(NATIVE_CPU_FLAGS[precision])


def precision_notes(precision: str, device: torch.device, flags: Collection[str] | None = None) -> tuple[str, ...]:
    """A warning if this x86 CPU emulates the run's precision."""
    flags = cpu_flags() if flags is None else flags
    if device.type != "cpu" or precision == "fp32" or "fpu" not in flags or has_native_products(precision, flags):
        return ()
    return (f" warning: this CPU has no {precision} instructions and torch emulates them, which can make matrix "
            f"products many times slower than in fp32; train in fp32 (--no-{precision}) unless {precision} is what you "
            "study",)


def main() -> None:
    """Print the precision flag of a CPU run for scripts/lib.sh; nothing means fp32."""
    if has_native_products("bf16", cpu_flags()):
        print("--bf16")


if __name__ == "__main__":
    main()
