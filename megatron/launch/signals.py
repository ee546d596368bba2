"""Requests to stop: by SIGTERM, by Ctrl-C, by a terminal that closes, by a batch system (docs/launch.md has the table).

Any rank may be asked. Before the first step nothing has been done that could be saved, so the program ends at once;
from then on the loop makes all ranks agree, saves and leaves (train/loop.py). Further signals change nothing, except
that a second Ctrl-C does not wait: it raises KeyboardInterrupt. The clock of --exit-duration-in-mins is here too,
because a job's time limit includes its start-up. No torch: handlers and clock are set before the slow imports.

Programs that save nothing: data/leaving.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from megatron.launch.leaving import REQUESTS, Asked, heard, words_for

TAKEN = signal.SIGURG
"""What a rank tells its launcher by: from now on Ctrl-C is that of whoever types at rank 0. Who does not know this
signal ignores it."""
STOPPING = b"stopping after this step (Ctrl-C again ends at once, without saving)\n"
NOTHING_LOST = "before the first step, so that nothing was lost: start the same command again"
HEARING_SECONDS = 1.0
"""For the main thread to hear a request at start-up: it may wait for other ranks inside a library, which nothing can
interrupt."""
TIDYING_SECONDS = 2.5
"""For one that has heard to remove what it had begun."""
ERASE_LINE = b"\r\x1b[K"

Leave = Callable[[str], object]


class StopRequest:
    """Whether this process was asked to stop, and by what first."""

    def __init__(self, said: bytes = STOPPING, *, starting: str = "") -> None:
        """`said` goes to the person who pressed Ctrl-C. `starting`: until `begin` a request ends the program, with this
        reason."""
        self._said, self._starting = said, starting
        self.signal: signal.Signals | None = None
        self.is_heeded = False
        """No further step is taken: this rank was asked, or another one, or the time is up."""
        self._interrupts = 0
        self._began = time.monotonic()
        self._alarm: int | None = None
        self._is_over = False
        self._former: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def hurries(self) -> bool:
        """Nothing is begun any more, nor waited for, that can be left out."""
        return self.is_heeded or self.signal is not None

    @property
    def minutes(self) -> float:
        """Since the program began."""
        return (time.monotonic() - self._began) / 60

    def listen(self, leave: Leave | None = None, *, stacks: bool = False) -> StopRequest:
        """Install the handlers (only the main thread can). `leave` ends a program at its start whose main thread does
        not hear, and is given the reason; with `stacks`, SIGQUIT also shows where every thread is."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in filter(heard, REQUESTS):
            self._former[number] = signal.signal(number, self._note)
        if stacks:
            faulthandler.register(signal.SIGQUIT, chain=True)  # heard or not by the main thread
        os.register_at_fork(after_in_child=self._forget)
        if leave is not None and self._starting:
            ours, self._alarm = os.pipe()
            os.set_blocking(self._alarm, False)
            signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)
            threading.Thread(target=self._leave_unheard, args=(ours, leave), name="stop", daemon=True).start()
        return self

    @contextlib.contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """Listen meanwhile: afterwards requests are for whoever listened before."""
        try:
            yield self.listen()
        finally:
            self._is_over = True
            for number, handler in self._former.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def begin(self) -> None:
        """From now on there is something to save, or to finish."""
        self._starting = ""
        self.end()

    def end(self) -> None:
        """The program has heard, or is over, which may be one of several that a process runs."""
        if self._alarm is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._alarm)  # the thread ends
            self._alarm = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A launcher of ours counts by itself, and a batch system may ask both it and its ranks.
        self._interrupts += number == signal.SIGINT and not has_launcher()
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt
        is_first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if self._starting:
            if is_first:
                raise Asked(number, self._reason(number))
        elif number == signal.SIGINT and is_seen_by_a_person():
            write_lines(self._said)

    def _reason(self, number: int) -> str:
        return f"{words_for(number)} {self._starting}"

    def _leave_unheard(self, alarm: int, leave: Leave) -> None:
        """The kernel's side of each signal wakes this thread, whatever the main thread waits for."""
        with open(alarm, "rb", buffering=0) as signals:
            while told := signals.read(1):
                if told[0] in REQUESTS:
                    time.sleep(HEARING_SECONDS)
                    if self.signal is not None:
                        time.sleep(TIDYING_SECONDS)
                    if self._starting and self._alarm is not None:
                        leave(self._reason(told[0]))

    def _forget(self) -> None:
        """In a forked child, which ends as whoever forked it wants."""
        if self._is_over:
            return
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in REQUESTS:
                if number != signal.SIGINT and signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)


def take_interrupts() -> None:
    """A launcher of ours, if there is one, passes Ctrl-C on to rank 0 alone from now on, and ends nothing for it."""
    if has_launcher():
        os.kill(os.getppid(), TAKEN)


def has_launcher() -> bool:
    """Of ours, and its name was not left in the environment by somebody else's."""
    return os.environ.get("MEGATRON_LAUNCHER") == str(os.getppid())


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
