"""What a rank has used its drives for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero.homes.words import format_bytes


@dataclass(frozen=True)
class NvmeStats:
    """Since the engine began, or of a step: now - before."""

    wait_seconds: float = 0.0
    """That its training thread did nothing but wait for reads and writes to end."""
    read_bytes: int = 0
    """Asked for, as is what was written: a write may end in the next step."""
    written_bytes: int = 0

    def format_per_step(self, steps: int) -> str:
        """The mean of so many. Beside a step's time it tells whether the drive is what the step waits for."""
        return (
            f"drive wait (ms): {self.wait_seconds * 1e3 / steps:.1f} | drive read {format_bytes(self.read_bytes / steps)}, "
            f"written {format_bytes(self.written_bytes / steps)}")

    def __add__(self, other: NvmeStats) -> NvmeStats:
        return NvmeStats(self.wait_seconds + other.wait_seconds, self.read_bytes + other.read_bytes,
                         self.written_bytes + other.written_bytes)

    def __sub__(self, other: NvmeStats) -> NvmeStats:
        return NvmeStats(self.wait_seconds - other.wait_seconds, self.read_bytes - other.read_bytes,
                         self.written_bytes - other.written_bytes)
