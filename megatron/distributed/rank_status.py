"""Status of each rank (step, phase, block, collective), in a small shared file in which the launcher finds the rank
that the others wait for.

The file has one slot per rank of a node, mapped into memory: an update is a few integer writes, without system call or
lock, and survives the rank. Texts (phases, blocks) are written once and referred to by number. There is no clock: a
reader compares two reads.

    activity     what the program does: start-up, training, evaluation, a save
    phase        what the engine does for it: forward, backward, optimizer step
    unit         the block of the model
    collective   1: the rank sends, 2: it waits for other ranks, 0: neither (mpu/collective_tracker.py)

A rank that waits in a collective is a victim, even if it reports the timeout. A *straggler* is not in a collective and
has started none for a while: it hangs or is too slow. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

SLOT_BYTES = 1 << 14  # bytes per rank: COUNTER_BYTES of uint64 counters, then the texts
COUNTER_BYTES = 128
STATE, PID, STEP, ACTIVITY, PHASE, UNIT, COLLECTIVE, COLLECTIVES_STARTED = range(8)
# Values of STATE. FAILED: the engine raised an error, perhaps caught. DONE: the rank announced its exit.
UNKNOWN, RUNNING, FAILED, DONE = range(4)
MAX_TEXT_BYTES = 200  # longest text; longer ones are cut
STATUS_FILE_VARIABLE = "MEGATRON_STATUS_FILE"  # set by our launcher

START_UP, TRAINING, READING, EVALUATION = "start-up", "training", "reading of batches", "evaluation"
FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "optimizer step"
STRAGGLER_SECONDS = 2.0  # seconds without a collective before a rank counts as a straggler
RESUME_ADVICE = "start the same command to resume from the last checkpoint"


@dataclass(frozen=True)
class StatusSnapshot:
    """The status of one rank when it was read."""

    state: int = UNKNOWN
    pid: int = 0
    step: int = 0
    activity: str = ""
    phase: str = ""
    unit: str = ""
    collective: int = 0
    collectives_started: int = 0

    @property
    def in_collective(self) -> bool:
        return self.collective > 0

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks."""
        return self.collective > 1

    @property
    def is_mid_operation(self) -> bool:
        """Whether the rank is inside an operation that other ranks expect it to finish."""
        return self.state == RUNNING and bool(self.activity or self.phase or self.in_collective)

    def __str__(self) -> str:
        if self.state == UNKNOWN:
            return "before its program began"
        activity = "" if self.activity == TRAINING and (self.phase or self.in_collective) else self.activity
        parts = [activity, self.phase, self.unit, "exchange" if self.in_collective else ""]
        where = ", ".join(filter(None, parts)) or ("between two steps" if self.step else START_UP)
        return f"step {self.step}: {where}" if self.step else where


@final
class ObservedCounters:
    """Counters that also report each write to `on_write(index, value)`."""

    def __init__(self, numbers: Any, on_write: Callable[[int, int], None]) -> None:
        self._counters, self._on_write = numbers, on_write

    def __getitem__(self, index: Any) -> Any:
        return self._counters[index]

    def __setitem__(self, index: int, number: int) -> None:
        self._counters[index] = number
        self._on_write(index, number)


@final
class RankStatus:
    """Status of this process; kept in memory until `publish_in` maps the launcher's file."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._use_slot(memoryview(bytearray(SLOT_BYTES)))

    def _use_slot(self, slot: memoryview) -> None:
        self._slot, counters = slot, slot[:COUNTER_BYTES].cast("Q")
        self.collective_counters = counters[COLLECTIVE:COLLECTIVES_STARTED + 1]  # for mpu/collective_tracker.py
        self._counters: Any = counters
        self._text_buffer = slot[COUNTER_BYTES:SLOT_BYTES]
        self._text_ids, self._text_end = {"": 0}, 0

    def publish_in(self, path: str | None, slot: int) -> None:
        """Move the status to a slot of the file at `path`, once. No effect if the file cannot be mapped."""
        if not path or self._map is not None:
            return
        with suppress(OSError, ValueError):  # diagnostics must not fail the run
            descriptor = os.open(path, os.O_RDWR)
            try:
                mapped = mmap.mmap(descriptor, SLOT_BYTES, offset=slot * SLOT_BYTES)
            finally:
                os.close(descriptor)
            before, texts = self._counters, {number: text for text, number in self._text_ids.items()}
            self._use_slot(memoryview(mapped))
            for index in (STEP, COLLECTIVE, COLLECTIVES_STARTED):
                self._counters[index] = before[index]
            for index in (ACTIVITY, PHASE, UNIT):
                self._counters[index] = self._text_id(texts[before[index]])
            self.mark_running()
            self._map = mapped

    def mark_running(self) -> None:
        """Set the state to RUNNING: other ranks wait for this one from now on."""
        self._counters[PID], self._counters[STATE] = os.getpid(), RUNNING

    def set_step(self, number: int) -> None:
        self._counters[STEP] = number

    def set_phase(self, phase: str, unit: str = "") -> None:
        """Set the engine's phase and unit."""
        counters, text_ids = self._counters, self._text_ids
        try:
            counters[PHASE], counters[UNIT] = text_ids[phase], text_ids[unit]
        except KeyError:
            counters[PHASE], counters[UNIT] = self._text_id(phase), self._text_id(unit)

    def set_activity(self, activity: str) -> None:
        """Set the program's activity and clear phase and unit."""
        self._counters[ACTIVITY] = self._text_id(activity)
        self.set_phase("")

    @contextmanager
    def in_activity(self, activity: str) -> Iterator[None]:
        """Set the activity inside the context. An Exception restores the previous one; an exit keeps it."""
        before = self._counters[ACTIVITY]
        self.set_activity(activity)
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                self._counters[ACTIVITY] = before
            self.mark_failed(error)
            raise
        self._counters[ACTIVITY] = before
        self.set_phase("")

    @contextmanager
    def observed_by(self, on_write: Callable[[int, int], None]) -> Iterator[None]:
        """Call `on_write(index, value)` for the current values, then for each write inside the context."""
        counters = self._counters
        for index in (STEP, ACTIVITY, PHASE, UNIT):
            on_write(index, counters[index])
        self._counters = ObservedCounters(counters, on_write)
        try:
            yield
        finally:
            self._counters = counters

    def text_of(self, text_id: int) -> str:
        return next((text for text, number in self._text_ids.items() if number == text_id), "")

    def mark_done(self) -> None:
        """Set the state to DONE: other ranks need not wait for this one any more."""
        self._counters[STATE] = DONE

    def mark_failed(self, error: BaseException) -> None:
        """Set FAILED, but not on sys.exit(0): the launcher sees an early exit if the state is RUNNING."""
        leaves = isinstance(error, SystemExit) and error.code in (None, 0)
        if not leaves and self._counters[STATE] == RUNNING:
            self._counters[STATE] = FAILED

    @property
    def snapshot(self) -> StatusSnapshot:
        return parse_slot(self._slot)

    def _text_id(self, text: str) -> int:
        if text not in self._text_ids:
            encoded = text.encode(errors="replace")[:MAX_TEXT_BYTES]
            # A full buffer maps further texts to "".
            if self._text_end + len(encoded) + 1 > len(self._text_buffer):
                return 0
            self._text_buffer[self._text_end:self._text_end + len(encoded) + 1] = bytes([len(encoded)]) + encoded
            self._text_end += len(encoded) + 1
            self._text_ids[text] = len(self._text_ids)
        return self._text_ids[text]


def parse_slot(slot: memoryview) -> StatusSnapshot:
    """The status in a slot of the file."""
    counters = slot[:COUNTER_BYTES].cast("Q").tolist()
    state, pid, step, activity, phase, unit, collective, collectives_started = counters[:COLLECTIVES_STARTED + 1]
    # each text is a length byte and its bytes; a length of 0 ends them
    buffer, texts, at = bytes(slot[COUNTER_BYTES:]), [""], 0
    while len(texts) <= max(activity, phase, unit) and at < len(buffer) and buffer[at]:
        texts.append(buffer[at + 1:at + 1 + buffer[at]].decode(errors="replace"))
        at += 1 + buffer[at]
    named = [texts[number] if number < len(texts) else "" for number in (activity, phase, unit)]
    return StatusSnapshot(state, pid, step, named[0], named[1], named[2], collective, collectives_started)


STATUS = RankStatus()  # the status of this process


# ---- the launcher's side -------------------------------------------------------------------------------------------


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
