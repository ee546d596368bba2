"""Metrics of one optimizer step (loss, throughput, MFU, peak memory), and the timer behind them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from megatron.errors import format_bytes
from megatron.host_memory import peak_resident_bytes


STEP_SCALARS = ("lm_loss", "grad_norm", "learning_rate", "loss_scale", "step_ms", "tokens_per_s", "tflops", "mfu")


@dataclass(frozen=True)
class NvmeStats:
    """Totals since the engine was created, or the difference of two totals."""

    wait_seconds: float = 0.0  # the training thread was blocked on reads and writes
    read_bytes: int = 0  # requested, as are written_bytes: a write may finish in the next step
    written_bytes: int = 0

    def format_per_step(self, steps: int) -> str:
        """Averages over `steps`. Compared with the step time they show whether the step is bound by NVMe."""
        return (f"drive wait (ms): {self.wait_seconds * 1e3 / steps:.1f} | drive read "
                f"{format_bytes(self.read_bytes / steps)}, written {format_bytes(self.written_bytes / steps)}")

    def __add__(self, other: NvmeStats) -> NvmeStats:
        return NvmeStats(self.wait_seconds + other.wait_seconds, self.read_bytes + other.read_bytes,
                         self.written_bytes + other.written_bytes)

    def __sub__(self, other: NvmeStats) -> NvmeStats:
        return NvmeStats(self.wait_seconds - other.wait_seconds, self.read_bytes - other.read_bytes,
                         self.written_bytes - other.written_bytes)


class LayerDropMetrics(NamedTuple):
    theta: float
    blocks: int  # blocks that ran
    arithmetic_fraction: float  # share of the arithmetic of a step that runs all blocks


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
    drive: NvmeStats | None = None  # drives of rank 0; None if no state is on NVMe
    dropping: LayerDropMetrics | None = None  # None without progressive layer drop

    def to_json(self) -> dict[str, Any]:
        own = {key: value for key, value in asdict(self).items() if key not in ("drive", "dropping")}
        return own | self._optional_values()

    def to_scalars(self) -> dict[str, float]:
        """By their names on a dashboard, without unknown values."""
        values = {**{key: getattr(self, key) for key in STEP_SCALARS}, "memory_gib": self.max_memory_bytes / 2**30,
                  **self._optional_values()}
        return {f"train/{key}": value for key, value in values.items() if value is not None}

    def _optional_values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self.drive is not None:
            values |= {"drive_wait_ms": self.drive.wait_seconds * 1e3, "drive_read_bytes": self.drive.read_bytes,
                       "drive_written_bytes": self.drive.written_bytes}
        if self.dropping is not None:
            values |= {"pld_theta": self.dropping.theta, "pld_blocks": self.dropping.blocks}
        return values


def max_memory_bytes(device: torch.device) -> int:
    """Peak of allocated device memory, or of the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


class StepTimer:
    """Measures the seconds and NVMe use between two laps."""

    def __init__(self, nvme_stats: Callable[[], NvmeStats | None]) -> None:
        self._nvme_stats = nvme_stats
        self._last = time.perf_counter(), nvme_stats()

    def lap(self) -> tuple[float, NvmeStats | None]:
        (begin, used_before), self._last = self._last, (time.perf_counter(), self._nvme_stats())
        end, used = self._last
        return end - begin, None if used is None or used_before is None else used - used_before
