"""CPU runs: which precision the processor supports natively, and malloc settings that keep freed memory.

`python -m megatron.train.processor` prints the precision flag for the scripts. Without native instructions, 16-bit
products are timed; a warning needs every 16-bit time to be far above every fp32 time. glibc returns large blocks to the
system at once, so each step would fault in zeroed pages again: `keep_freed_memory` turns that off
(docs/decisions/003-allocator.md). Runs with state on NVMe are short of memory: they return large blocks.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = 1, -1, -2, -3, -4
MAX_MAPPED_BLOCKS = 65536
"""glibc's default number of blocks allocated with mmap."""

LARGE_BLOCK_BYTES = 4 << 20
"""Smallest block allocated with mmap, in bytes."""

PREALLOCATED_BLOCKS = 100_000
"""Number of small blocks, more than a training step uses: 8 MB with separators."""
LEFTOVER_BYTES, SEPARATOR_BYTES = 40, 16
"""Requested bytes that make glibc allocate chunks of 48 and 32."""


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


NATIVE_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16")}
"""Flags in /proc/cpuinfo of instructions that torch's kernels use for this precision."""

MATRIX_SIZE = 192
"""Side of the square matrices: long enough to time, 20 ms at the slowest rate seen (1 GFLOP/s)."""

ROUNDS = 6
"""Alternating fp32 and 16-bit measurements, so that changing load affects both."""

MAX_SLOWDOWN = 2.0
"""16-bit halves memory traffic, which is worth somewhat slower products, but not slower than this factor."""


def has_native_products(precision: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU lists instructions for products of this precision; False if unknown."""
    try:
        words = set(re.findall(r"\w+", cpuinfo.read_text()))
    except OSError:  # not Linux
        return False
    return not words.isdisjoint(NATIVE_CPU_FLAGS[precision])


def time_matmuls(precision: str) -> float:
    """CPU seconds of a linear layer's three products: forward, input gradient, weight gradient. Thread time excludes
    other processes."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a, b = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype), torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    begin = time.thread_time()
    for left, right in ((a, b.t()), (a, b), (a.t(), b)):
        left @ right
    return time.thread_time() - begin


def slowdown(precision: str, measure: Callable[[str], float] = time_matmuls) -> float | None:
    """Time of products relative to fp32 if it exceeds MAX_SLOWDOWN beyond noise, else None."""
    for each in ("fp32", precision):
        measure(each)  # the first products initialize kernels
    wide, narrow = list[float](), list[float]()
    for _ in range(ROUNDS):
        wide.append(measure("fp32"))
        narrow.append(measure(precision))
        if min(narrow) <= MAX_SLOWDOWN * max(wide):
            return None
    return min(narrow) / min(wide)


def precision_notes(precision: str, device: torch.device) -> tuple[str, ...]:
    """A warning if this CPU emulates the run's precision."""
    import torch

    if device.type != "cpu" or precision == "fp32" or has_native_products(precision):
        return ()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of this thread then covers the products
    try:
        times = slowdown(precision)
    finally:
        torch.set_num_threads(threads)
    if times is None:
        return ()
    return (f" warning: this CPU takes about {times:.0f} times as long for matrix products in {precision} as in fp32; "
            f"train in fp32 (--no-{precision}) unless {precision} is what you study",)


def main() -> None:
    """Print the precision flag of a CPU run for scripts/lib.sh; nothing means fp32."""
    if has_native_products("bf16"):
        print("--bf16")


if __name__ == "__main__":
    main()
