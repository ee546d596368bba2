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


NATIVE_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16")}
"""Flags of /proc/cpuinfo: products of this precision that torch's kernels use."""

MATRIX_SIZE = 192
"""Of the square matrices: long enough to time, and 20 ms at the worst rate seen (1 GFLOP/s)."""

ROUNDS = 6
"""Of one fp32 and one 16-bit measurement each: in turn, so that a load that comes or goes hits both."""

MAX_SLOWDOWN = 2.0
"""16 bits halve the bytes of a step, which may be worth somewhat slower products, but not slower than this."""


def has_native_products(precision: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor lists products of this precision; False where nothing is known."""
    try:
        words = set(re.findall(r"\w+", cpuinfo.read_text()))
    except OSError:  # not Linux
        return False
    return not words.isdisjoint(NATIVE_CPU_FLAGS[precision])


def time_matmuls(precision: str) -> float:
    """Processor time of the three products of a linear layer: forward, gradient of its input, gradient of its weight.
    Time that other processes take is not counted."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a, b = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype), torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    begin = time.thread_time()
    for left, right in ((a, b.t()), (a, b), (a.t(), b)):
        left @ right
    return time.thread_time() - begin


def slowdown(precision: str, measure: Callable[[str], float] = time_matmuls) -> float | None:
    """How many times as long products take as in fp32, where that is above MAX_SLOWDOWN beyond doubt; otherwise None."""
    for each in ("fp32", precision):
        measure(each)  # the first products set up kernels
    wide: list[float] = []
    narrow: list[float] = []
    for _ in range(ROUNDS):
        wide.append(measure("fp32"))
        narrow.append(measure(precision))
        if min(narrow) <= MAX_SLOWDOWN * max(wide):
            return None
    return min(narrow) / min(wide)


def precision_notes(precision: str, device: torch.device) -> tuple[str, ...]:
    """A warning for the start of a run whose precision this CPU has to emulate."""
    if device.type != "cpu" or precision == "fp32" or has_native_products(precision):
        return ()
    times = _on_one_thread(lambda: slowdown(precision))
    if times is None:
        return ()
    return (f" warning: this CPU takes about {times:.0f} times as long for matrix products in {precision} as in fp32; "
            f"train in fp32 (--no-{precision}) unless {precision} is what you study",)


def _on_one_thread(work: Callable[[], float | None]) -> float | None:
    """The time of a thread is all of the work then, without waiting for others."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    """The precision flag of a CPU run for scripts/lib.sh: none is fp32."""
    if has_native_products("bf16"):
        print("--bf16")


if __name__ == "__main__":
    main()
