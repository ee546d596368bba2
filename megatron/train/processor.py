"""Which precision a CPU is fit for. The one place that decides it: `python -m megatron.train.processor` prints the
flag that the scripts start a CPU run with, and `notes` warns those who chose another precision.

A processor without 16-bit products has them emulated by torch, up to a hundred times slower than in fp32: a run with
`--bf16` trains correctly there and seems to hang. Where the processor lists 16-bit instructions there is nothing to
measure. Elsewhere products are timed, because a list of processors would always lack the newest; and as this may
happen on a busy machine, a warning needs every 16-bit time to be far above every fp32 time. In doubt there is none.

Not here: torch, until products are timed; the scripts ask before every run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
