"""Where each rank is: what it does, and at which step, in a small file that its launcher reads when a job fails.

The file has one *slot* for each rank of a node. Its rank maps it into memory and writes a few numbers as it goes on: no
system call, no lock, a fraction of a microsecond; what is there outlives the rank, and is there also where the rank is
stopped, or holds Python's lock for ever. Words (names of phases and blocks) are written once, and numbered.

    activity    what the program is about: start-up, training, evaluation, a save
    phase       what the engine does for it: forward, backward, the optimizer step
    unit        the block of the model that it is in
    exchange    1 where the rank sends to others, 2 where it waits for them, else 0 (mpu/wire/waits.py)

Not here: who reads it, and what is made of it (launch/blame.py). No clock: a reader looks more than
once.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, final

SLOT = 1 << 14
"""Bytes of a rank: its numbers, then its words."""
HEAD = 128
STATE, PID, STEP, ACTIVITY, PHASE, UNIT, EXCHANGE, BEGUN = range(8)
UNKNOWN, RUNNING, STUMBLED, DONE = range(4)
"""States: nothing was written yet; the program runs; the engine has raised an error, which the program may have caught;
it has taken its leave of the others."""
LONGEST = 200
"""Bytes of a word."""
PLACES_VARIABLE = "MEGATRON_PLACES_FILE"
"""Set by our launcher."""

START_UP, TRAINING, READING, EVALUATION = "start-up", "training", "reading of batches", "evaluation"
FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "optimizer step"


@dataclass(frozen=True)
class Place:
    """Of one rank, as it was read."""

    state: int = UNKNOWN
    pid: int = 0
    step: int = 0
    activity: str = ""
    phase: str = ""
    unit: str = ""
    exchange: int = 0
    begun: int = 0
    """Exchanges."""

    @property
    def in_exchange(self) -> bool:
        return self.exchange > 0

    @property
    def waits(self) -> bool:
        """For other ranks."""
        return self.exchange > 1

    @property
    def is_inside(self) -> bool:
        """In the middle of something that a program does not leave in good order."""
        return self.state == RUNNING and bool(self.activity or self.phase or self.in_exchange)

    def __str__(self) -> str:
        if self.state == UNKNOWN:
            return "before its program began"
        activity = "" if self.activity == TRAINING and (self.phase or self.in_exchange) else self.activity
        words = [activity, self.phase, self.unit, "exchange" if self.in_exchange else ""]
        where = ", ".join(word for word in words if word) or ("between two steps" if self.step else START_UP)
        return f"step {self.step}: {where}" if self.step else where


class Numbers(Protocol):
    def __getitem__(self, place: Any) -> Any: ...

    def __setitem__(self, place: int, number: int) -> None: ...


@final
class Told:
    """The same numbers; somebody else hears of each that is written."""

    def __init__(self, numbers: Numbers, hears: Callable[[int, int], None]) -> None:
        self._numbers, self._hears = numbers, hears

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[place]

    def __setitem__(self, place: int, number: int) -> None:
        self._numbers[place] = number
        self._hears(place, number)


@final
class Whereabouts:
    """Of this process. What is said before there is a file is kept in memory."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._lay_out(memoryview(bytearray(SLOT)))

    def _lay_out(self, slot: memoryview) -> None:
        words = slot[:HEAD].cast("Q")
        self.waits = words[EXCHANGE:BEGUN + 1]
        """For mpu/wire/waits.py."""
        self._words: Numbers = words
        self._texts = slot[HEAD:SLOT]
        self._numbers, self._end = {"": 0}, 0

    @property
    def is_shown(self) -> bool:
        """Somebody else can read it."""
        return self._map is not None

    def show_in(self, path: str | None, slot: int) -> None:
        """From now on in this file; where it cannot be mapped everything stays as it is. Once a process."""
        if not path or self.is_shown:
            return
        with suppress(OSError, ValueError):  # a diagnosis is not worth an error
            descriptor = os.open(path, os.O_RDWR)
            try:
                found = mmap.mmap(descriptor, SLOT, offset=slot * SLOT)
            finally:
                os.close(descriptor)
            before, words = self._words, {number: word for word, number in self._numbers.items()}
            self._lay_out(memoryview(found))
            for place in (STEP, EXCHANGE, BEGUN):
                self._words[place] = before[place]
            for place in (ACTIVITY, PHASE, UNIT):
                self._words[place] = self._number(words[before[place]])
            self.begin()
            self._map = found

    def begin(self) -> None:
        """Others wait for this rank from now on."""
        self._words[PID], self._words[STATE] = os.getpid(), RUNNING

    def at_step(self, number: int) -> None:
        self._words[STEP] = number

    def enter(self, phase: str, unit: str = "") -> None:
        """The engine is in this phase now, and in this block."""
        words, numbers = self._words, self._numbers
        try:
            words[PHASE], words[UNIT] = numbers[phase], numbers[unit]
        except KeyError:
            words[PHASE], words[UNIT] = self._number(phase), self._number(unit)

    def do(self, activity: str) -> None:
        """The program does this from now on; of phases nothing is known."""
        self._words[ACTIVITY] = self._number(activity)
        self.enter("")

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """An exit in the middle of it is where the rank was; an error may be caught."""
        before = self._words[ACTIVITY]
        self.do(activity)
        with self:
            try:
                yield
            except Exception:
                self._words[ACTIVITY] = before
                raise
        self._words[ACTIVITY] = before
        self.enter("")

    @contextmanager
    def followed(self, hears: Callable[[int, int], None]) -> Iterator[None]:
        """Inside, somebody hears where this process is: which number is written, and what; first what is there."""
        words = self._words
        for place in (STEP, ACTIVITY, PHASE, UNIT):
            hears(place, words[place])
        self._words = Told(words, hears)
        try:
            yield
        finally:
            self._words = words

    def word(self, number: int) -> str:
        return next((word for word, its in self._numbers.items() if its == number), "")

    def take_leave(self) -> None:
        """The others need not wait for this rank any more."""
        self._words[STATE] = DONE

    def __enter__(self) -> None:
        """A call of the engine's."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """What it raises is told otherwise, or caught; an exit with code 0 in the middle of it is neither."""
        leaves = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not leaves and self._words[STATE] == RUNNING:
            self._words[STATE] = STUMBLED

    @property
    def place(self) -> Place:
        return _read(self._words, self._texts)

    def _number(self, word: str) -> int:
        if word not in self._numbers:
            text = word.encode(errors="replace")[:LONGEST]
            if self._end + len(text) + 1 > len(self._texts):
                return 0
            self._texts[self._end:self._end + len(text) + 1] = bytes([len(text)]) + text
            self._end += len(text) + 1
            self._numbers[word] = len(self._numbers)
        return self._numbers[word]


def _read(words: Numbers, texts: memoryview) -> Place:
    known = _words_of(bytes(texts), max(words[ACTIVITY:UNIT + 1]))
    state, pid, step, activity, phase, unit, exchange, begun = words[:BEGUN + 1]
    return Place(state, pid, step, known.get(activity, ""), known.get(phase, ""), known.get(unit, ""), exchange, begun)


def _words_of(texts: bytes, count: int) -> dict[int, str]:
    found, at = {0: ""}, 0
    for number in range(1, count + 1):
        if at >= len(texts) or not texts[at]:
            break
        found[number] = texts[at + 1:at + 1 + texts[at]].decode(errors="replace")
        at += 1 + texts[at]
    return found


@final
class Places:
    """The file, for who reads it."""

    def __init__(self, path: str, ranks: int) -> None:
        """Created where it is not there."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < ranks * SLOT:
                os.posix_fallocate(descriptor, 0, ranks * SLOT)  # a hole, in a map, can end who writes there
            self._map = mmap.mmap(descriptor, ranks * SLOT)
        finally:
            os.close(descriptor)

    def mark(self, slot: int) -> bytes:
        """What changes whenever the rank of this slot goes on."""
        return self._map[slot * SLOT:slot * SLOT + HEAD]

    def of(self, slot: int) -> Place:
        part = self._map[slot * SLOT:(slot + 1) * SLOT]
        return _read(memoryview(part)[:HEAD].cast("Q"), memoryview(part)[HEAD:])


HERE = Whereabouts()
"""Of the process, as its launcher's file is."""
