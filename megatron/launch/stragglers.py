"""Find the rank that the others wait for, from the ranks' status file (megatron/distributed/rank_status.py).

A rank that waits in a collective is a victim, even if it reports the timeout. A *straggler* is not in a collective and
has started none for a while: it hangs or is too slow. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import final

from megatron.distributed.rank_status import (COLLECTIVE, COLLECTIVES_STARTED, FAILED, RUNNING, SLOT_BYTES,
                                              StatusSnapshot, parse_slot)

STRAGGLER_SECONDS = 2.0  # seconds without a collective before a rank counts as a straggler
RESUME_ADVICE = "start the same command to resume from the last checkpoint"


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for."""

    local_rank: int
    status: StatusSnapshot
    seconds: float

    def describe(self, who: str) -> str:
        if self.status.state not in (RUNNING, FAILED):
            return (f"error: {who} did not come to the others in {self.seconds:.0f} s and has not said where it is: "
                    "its program or Python's start hangs, or is too slow; start the same command again, perhaps with "
                    "a higher --startup-timeout-seconds")
        return (f"error: {who} hangs or is too slow: the others waited for it, and it has exchanged nothing for "
                f"{self.seconds:.0f} s, at {self.status}; {RESUME_ADVICE}")


@final
class StragglerMonitor:
    """Reads the status file, and tracks when the collective counters of each local rank last changed. Call `update`
    often."""

    def __init__(self, path: str, ranks: int) -> None:
        """Create the file if it does not exist."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < ranks * SLOT_BYTES:
                # writing to a hole in a mapped file on a full disk raises SIGBUS in the rank
                os.posix_fallocate(descriptor, 0, ranks * SLOT_BYTES)
            self._map = mmap.mmap(descriptor, ranks * SLOT_BYTES)
        finally:
            os.close(descriptor)
        self._last_counters = [b""] * ranks
        self._unchanged_since = [time.monotonic()] * ranks

    def update(self) -> None:
        for local, before in enumerate(self._last_counters):
            slot = local * SLOT_BYTES
            counters = self._map[slot + 8 * COLLECTIVE:slot + 8 * (COLLECTIVES_STARTED + 1)]
            if counters != before:
                self._last_counters[local], self._unchanged_since[local] = counters, time.monotonic()

    def status_of(self, local_rank: int) -> StatusSnapshot:
        return parse_slot(memoryview(self._map[local_rank * SLOT_BYTES:(local_rank + 1) * SLOT_BYTES]))

    def stragglers(self, running: list[int]) -> list[Straggler]:
        """The `running` local ranks that the others wait for now, the one without progress for longest first."""
        self.update()
        now = time.monotonic()
        ranks = [Straggler(local, self.status_of(local), now - self._unchanged_since[local]) for local in running]
        return sorted((one for one in ranks if not one.status.is_waiting and one.seconds >= STRAGGLER_SECONDS),
                      key=lambda one: -one.seconds)
