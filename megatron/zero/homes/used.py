"""What a rank has used its drives for."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero.homes.words import in_bytes


@dataclass(frozen=True)
class DriveUse:
    """Since the engine began, or of a step: now - before."""

    seconds: float = 0.0
    """That its training thread did nothing but wait for reads and writes to end."""
    read_bytes: int = 0
    """Asked for, as is what was written: a write may end in the next step."""
    written_bytes: int = 0

    def a_step(self, steps: int) -> str:
        """The mean of so many. Beside a step's time it tells whether the drive is what the step waits for."""
        return (f"drive wait (ms): {self.seconds * 1e3 / steps:.1f} | drive read {in_bytes(self.read_bytes / steps)}, "
                f"written {in_bytes(self.written_bytes / steps)}")

    def __add__(self, other: DriveUse) -> DriveUse:
        return DriveUse(self.seconds + other.seconds, self.read_bytes + other.read_bytes,
                        self.written_bytes + other.written_bytes)

    def __sub__(self, other: DriveUse) -> DriveUse:
        return DriveUse(self.seconds - other.seconds, self.read_bytes - other.read_bytes,
                        self.written_bytes - other.written_bytes)
