"""Which rank the others waited for: what a launcher makes of where its ranks are (megatron/whereabouts.py).

A rank that waits in an exchange is a victim, whatever it says when its time is up. One that does not, and has begun no
exchange for a while, is *late*: it hangs (in Python, in C with Python's lock held) or is too slow. One that ends with
exit code 0 in the middle of something has *left early*.

Standard library only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from megatron.whereabouts import BEGUN, EXCHANGE, RUNNING, STUMBLED, Place, Places

LATE_SECONDS = 2.0
"""Without an exchange. Less is what any step takes."""
WORDS = slice(8 * EXCHANGE, 8 * (BEGUN + 1))
AGAIN = "start the same command to resume from the last checkpoint"


@dataclass(frozen=True)
class Late:
    """A rank that the others waited for."""

    local: int
    place: Place
    seconds: float

    def describe(self, who: str) -> str:
        if self.place.state not in (RUNNING, STUMBLED):
            return (f"error: {who} did not come to the others in {self.seconds:.0f} s and has not said where it is: "
                    "its program or Python's start hangs, or is too slow; start the same command again, perhaps with "
                    "a higher --startup-timeout-seconds")
        return (f"error: {who} hangs or is too slow: the others waited for it, and it has exchanged nothing for "
                f"{self.seconds:.0f} s, at {self.place}; {AGAIN}")


@final
class Sight:
    """What a launcher sees of its ranks; look often."""

    def __init__(self, places: Places, ranks: int) -> None:
        self._places = places
        self._marks = [b""] * ranks
        self._since = [time.monotonic()] * ranks

    def look(self) -> None:
        for local, before in enumerate(self._marks):
            mark = self._places.mark(local)[WORDS]
            if mark != before:
                self._marks[local], self._since[local] = mark, time.monotonic()

    def place(self, local: int) -> Place:
        return self._places.of(local)

    def late(self, running: list[int]) -> list[Late]:
        """Of these ranks, those that the others wait for now; the one that has stood still for longest first."""
        self.look()
        now = time.monotonic()
        found = [Late(local, self.place(local), now - self._since[local]) for local in running]
        return sorted((one for one in found if not one.place.waits and one.seconds >= LATE_SECONDS),
                      key=lambda one: -one.seconds)
