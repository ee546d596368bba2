"""Requests to stop: SIGTERM, SIGUSR1 and Ctrl-C ask the training loop to leave after the step it is in.

Any rank may be asked; the loop makes all ranks agree (train/loop.py). Further signals change nothing, except that a
second Ctrl-C does not wait: it raises KeyboardInterrupt. The clock of --exit-duration-in-mins is here too, because a
job's time limit includes its start-up. No torch: handlers and clock are set before the slow imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

from megatron.errors import EXIT_INTERRUPTED

TAKEN = signal.SIGUSR2
"""What a rank tells its launcher by: from now on Ctrl-C is that of whoever types at rank 0."""
GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOPPING = b"stopping after this step (Ctrl-C again ends at once, without saving)\n"
ERASE_LINE = b"\r\x1b[K"


class StopRequest:
    """Whether this process was asked to stop, and by what first."""

    def __init__(self, said: bytes = STOPPING) -> None:
        """`said` goes to the person who pressed Ctrl-C."""
        self._said = said
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        self._began = time.monotonic()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def minutes(self) -> float:
        """Since the program began."""
        return (time.monotonic() - self._began) / 60

    def listen(self) -> StopRequest:
        """Install the handlers (only the main thread can)."""
        if threading.current_thread() is threading.main_thread():
            for number in GRACEFUL:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt
        if number == signal.SIGINT and is_seen_by_a_person():
            write_lines(self._said)
        self.signal = self.signal or signal.Signals(number)


def take_interrupts() -> None:
    """A launcher of ours, if there is one, passes Ctrl-C on to rank 0 alone from now on, and ends nothing for it."""
    if os.environ.get("MEGATRON_LAUNCHER") == str(os.getppid()):
        os.kill(os.getppid(), TAKEN)


def end_when_asked() -> None:
    """Until somebody else listens, a request to stop ends the program at once: nothing has begun."""
    for number in GRACEFUL:
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    write_stderr(b"error: interrupted before a rank was started; start the same command again\n")
    raise SystemExit(EXIT_INTERRUPTED)


def is_seen_by_a_person(descriptor: int = 2) -> bool:
    """Whether this process answers a terminal: a launcher of ours does so for its ranks, and rank 0 for those of
    others."""
    return os.isatty(descriptor) and "MEGATRON_LAUNCHER" not in os.environ and os.environ.get("RANK", "0") == "0"


def write_lines(text: bytes) -> None:
    """Lines for stderr. On a terminal where a progress bar may have been drawn they replace it."""
    write_stderr((ERASE_LINE if text and os.isatty(2) else b"") + text)


def write_stderr(text: bytes) -> None:
    """Unbuffered, and never an error: the reader of stderr may be gone."""
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text):]
