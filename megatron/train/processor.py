"""What a CPU's arithmetic is fit for, measured, because a table of processors would always lack the newest.

A processor without 16-bit products has them emulated by torch, one hundred times slower than fp32 in places. A run
asked for `--bf16` there trains rightly and seems to hang.
"""

from __future__ import annotations

import time

import torch

from megatron.zero.precision import DTYPES

SIDE = 192
"""Of the square matrices: long enough to time, and 20 ms at the worst rate seen (1 GFLOP/s)."""

TOLERATED = 2.0
"""16 bits halve the bytes of a step, so that they may be worth slightly slower products; not slower than this."""


def seconds_of_products(dtype: torch.dtype) -> float:
    """The three products of a linear layer: forward, gradient of its input, gradient of its weight. The faster of two
    rounds, as the first one sets up kernels."""
    a, b = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
    rounds = []
    for _ in range(2):
        begin = time.perf_counter()
        for left, right in ((a, b.t()), (a, b), (a.t(), b)):
            left @ right
        rounds.append(time.perf_counter() - begin)
    return min(rounds)


def notes(precision: str, device: torch.device) -> tuple[str, ...]:
    """A line for the start of a run whose precision this CPU has to emulate."""
    if device.type != "cpu" or precision == "fp32":
        return ()
    times = seconds_of_products(DTYPES[precision]) / seconds_of_products(torch.float32)
    if times < TOLERATED:
        return ()
    return (f" warning: this CPU takes about {times:.0f} times as long for matrix products in {precision} as in fp32; "
            f"train in fp32 (--no-{precision}) unless {precision} is what you study",)
