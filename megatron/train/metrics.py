"""What is measured of a step, and the clocks behind it.

Not here: where the numbers are reported (log.py, console.py, board.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron.zero.accelerator import peak_resident_bytes


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step: one line of the metrics file."""

    iteration: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    consumed_samples: int
    samples_digest: str
    step_ms: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    max_memory_bytes: int


@dataclass(frozen=True)
class Rates:
    """What turns a step's time into rates."""

    tokens_per_step: int
    flops_per_token: float
    devices: int
    peak_tflops: float | None

    def of(self, seconds: float) -> tuple[float, float, float | None]:
        """(tokens/s over all devices, TFLOP/s of one device, MFU)."""
        tokens = self.tokens_per_step / seconds
        tflops = tokens * self.flops_per_token / self.devices / 1e12
        return tokens, tflops, tflops / self.peak_tflops if self.peak_tflops else None


def max_memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocator, or of the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


class Stopwatch:
    """Seconds since the last reading."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
