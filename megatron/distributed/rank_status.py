"""Status of each rank (step, phase, block, collective), written to a small shared file that the launcher reads on failure.

The file has one slot per rank of a node, mapped into memory: an update is a few integer writes, without system call or
lock, and survives the rank. Texts (phases, blocks) are written once and referred to by number.

    activity     what the program does: start-up, training, evaluation, a save
    phase        what the engine does for it: forward, backward, optimizer step
    unit         the block of the model
    collective   1: the rank sends, 2: it waits for other ranks, 0: neither (mpu/collective_tracker.py)

There is no clock: a reader compares two reads (megatron/launch/stragglers.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, final

SLOT_BYTES = 1 << 14
"""Bytes of a rank: its numbers, then its words."""
COUNTER_BYTES = 128
STATE, PID, STEP, ACTIVITY, PHASE, UNIT, COLLECTIVE, COLLECTIVES_STARTED = range(8)
UNKNOWN, RUNNING, FAILED, DONE = range(4)
"""States: nothing was written yet; the program runs; the engine has raised an error, which the program may have caught;
it has taken its leave of the others."""
MAX_TEXT_BYTES = 200
"""Bytes of a word."""
STATUS_FILE_VARIABLE = "MEGATRON_PLACES_FILE"
"""Set by our launcher."""

START_UP, TRAINING, READING, EVALUATION = "start-up", "training", "reading of batches", "evaluation"
FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "optimizer step"


@dataclass(frozen=True)
class StatusSnapshot:
    """Of one rank, as it was read."""

    state: int = UNKNOWN
    pid: int = 0
    step: int = 0
    activity: str = ""
    phase: str = ""
    unit: str = ""
    collective: int = 0
    collectives_started: int = 0
    """Exchanges."""

    @property
    def in_collective(self) -> bool:
        return self.collective > 0

    @property
    def is_waiting(self) -> bool:
        """For other ranks."""
        return self.collective > 1

    @property
    def is_mid_operation(self) -> bool:
        """In the middle of something that a program does not leave in good order."""
        return self.state == RUNNING and bool(self.activity or self.phase or self.in_collective)

    def __str__(self) -> str:
        if self.state == UNKNOWN:
            return "before its program began"
        activity = "" if self.activity == TRAINING and (self.phase or self.in_collective) else self.activity
        words = [activity, self.phase, self.unit, "exchange" if self.in_collective else ""]
        where = ", ".join(word for word in words if word) or ("between two steps" if self.step else START_UP)
        return f"step {self.step}: {where}" if self.step else where


class StatusCounters(Protocol):
    def __getitem__(self, index: Any) -> Any: ...

    def __setitem__(self, index: int, number: int) -> None: ...


@final
class ObservedCounters:
    """The same numbers; somebody else hears of each that is written."""

    def __init__(self, numbers: StatusCounters, on_write: Callable[[int, int], None]) -> None:
        self._counters, self._on_write = numbers, on_write

    def __getitem__(self, index: Any) -> Any:
        return self._counters[index]

    def __setitem__(self, index: int, number: int) -> None:
        self._counters[index] = number
        self._on_write(index, number)


@final
class RankStatus:
    """Of this process. What is said before there is a file is kept in memory."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._use_slot(memoryview(bytearray(SLOT_BYTES)))

    def _use_slot(self, slot: memoryview) -> None:
        counters = slot[:COUNTER_BYTES].cast("Q")
        self.collective_counters = counters[COLLECTIVE:COLLECTIVES_STARTED + 1]
        """For mpu/collective_tracker.py."""
        self._counters: StatusCounters = counters
        self._text_buffer = slot[COUNTER_BYTES:SLOT_BYTES]
        self._text_ids, self._text_end = {"": 0}, 0

    @property
    def is_published(self) -> bool:
        """Somebody else can read it."""
        return self._map is not None

    def publish_in(self, path: str | None, slot: int) -> None:
        """From now on in this file; where it cannot be mapped everything stays as it is. Once a process."""
        if not path or self.is_published:
            return
        with suppress(OSError, ValueError):  # a diagnosis is not worth an error
            descriptor = os.open(path, os.O_RDWR)
            try:
                found = mmap.mmap(descriptor, SLOT_BYTES, offset=slot * SLOT_BYTES)
            finally:
                os.close(descriptor)
            before, known_texts = self._counters, {number: word for word, number in self._text_ids.items()}
            self._use_slot(memoryview(found))
            for place in (STEP, COLLECTIVE, COLLECTIVES_STARTED):
                self._counters[place] = before[place]
            for place in (ACTIVITY, PHASE, UNIT):
                self._counters[place] = self._text_id(known_texts[before[place]])
            self.mark_running()
            self._map = found

    def mark_running(self) -> None:
        """Others wait for this rank from now on."""
        self._counters[PID], self._counters[STATE] = os.getpid(), RUNNING

    def set_step(self, number: int) -> None:
        self._counters[STEP] = number

    def set_phase(self, phase: str, unit: str = "") -> None:
        """The engine is in this phase now, and in this block."""
        counters, text_ids = self._counters, self._text_ids
        try:
            counters[PHASE], counters[UNIT] = text_ids[phase], text_ids[unit]
        except KeyError:
            counters[PHASE], counters[UNIT] = self._text_id(phase), self._text_id(unit)

    def set_activity(self, activity: str) -> None:
        """The program does this from now on; of phases nothing is known."""
        self._counters[ACTIVITY] = self._text_id(activity)
        self.set_phase("")

    @contextmanager
    def in_activity(self, activity: str) -> Iterator[None]:
        """An exit in the middle of it is where the rank was; an error may be caught."""
        before = self._counters[ACTIVITY]
        self.set_activity(activity)
        with self:
            try:
                yield
            except Exception:
                self._counters[ACTIVITY] = before
                raise
        self._counters[ACTIVITY] = before
        self.set_phase("")

    @contextmanager
    def observed_by(self, on_write: Callable[[int, int], None]) -> Iterator[None]:
        """Inside, somebody hears where this process is: which number is written, and what; first what is there."""
        counters = self._counters
        for place in (STEP, ACTIVITY, PHASE, UNIT):
            on_write(place, counters[place])
        self._counters = ObservedCounters(counters, on_write)
        try:
            yield
        finally:
            self._counters = counters

    def text_of(self, text_id: int) -> str:
        return next((word for word, its in self._text_ids.items() if its == text_id), "")

    def mark_done(self) -> None:
        """The others need not wait for this rank any more."""
        self._counters[STATE] = DONE

    def __enter__(self) -> None:
        """A call of the engine's."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """What it raises is told otherwise, or caught; an exit with code 0 in the middle of it is neither."""
        leaves = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not leaves and self._counters[STATE] == RUNNING:
            self._counters[STATE] = FAILED

    @property
    def snapshot(self) -> StatusSnapshot:
        return _parse_slot(self._counters, self._text_buffer)

    def _text_id(self, text: str) -> int:
        if text not in self._text_ids:
            encoded = text.encode(errors="replace")[:MAX_TEXT_BYTES]
            if self._text_end + len(encoded) + 1 > len(self._text_buffer):
                return 0
            self._text_buffer[self._text_end:self._text_end + len(encoded) + 1] = bytes([len(encoded)]) + encoded
            self._text_end += len(encoded) + 1
            self._text_ids[text] = len(self._text_ids)
        return self._text_ids[text]


def _parse_slot(counters: StatusCounters, texts: memoryview) -> StatusSnapshot:
    known = _decode_texts(bytes(texts), max(counters[ACTIVITY:UNIT + 1]))
    state, pid, step, activity, phase, unit, exchange, begun = counters[:COLLECTIVES_STARTED + 1]
    return StatusSnapshot(state, pid, step, known.get(activity, ""), known.get(phase, ""), known.get(unit, ""),
                          exchange, begun)


def _decode_texts(texts: bytes, count: int) -> dict[int, str]:
    found, at = {0: ""}, 0
    for number in range(1, count + 1):
        if at >= len(texts) or not texts[at]:
            break
        found[number] = texts[at + 1:at + 1 + texts[at]].decode(errors="replace")
        at += 1 + texts[at]
    return found


@final
class StatusFile:
    """The file, for who reads it."""

    def __init__(self, path: str, ranks: int) -> None:
        """Created where it is not there."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < ranks * SLOT_BYTES:
                os.posix_fallocate(descriptor, 0, ranks * SLOT_BYTES)  # a hole, in a map, can end who writes there
            self._map = mmap.mmap(descriptor, ranks * SLOT_BYTES)
        finally:
            os.close(descriptor)

    def counters_of(self, slot: int) -> bytes:
        """What changes whenever the rank of this slot goes on."""
        return self._map[slot * SLOT_BYTES:slot * SLOT_BYTES + COUNTER_BYTES]

    def read(self, slot: int) -> StatusSnapshot:
        part = self._map[slot * SLOT_BYTES:(slot + 1) * SLOT_BYTES]
        return _parse_slot(memoryview(part)[:COUNTER_BYTES].cast("Q"), memoryview(part)[COUNTER_BYTES:])


STATUS = RankStatus()
"""Of the process, as its launcher's file is."""
