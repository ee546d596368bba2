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

from megatron.launch.leaving import STOP_SIGNALS, StopRequested, interruption_text, is_handled_signal

SIGNAL_INTERRUPTS_OWNED_BY_RANK0 = signal.SIGURG
"""What a rank tells its launcher by: from now on Ctrl-C is that of whoever types at rank 0. Who does not know this
signal ignores it."""
STOPPING_LINE = b"stopping after this step (Ctrl-C again ends at once, without saving)\n"
BEFORE_FIRST_STEP = "before the first step, so that nothing was lost: start the same command again"
MAIN_THREAD_SECONDS = 1.0
"""For the main thread to hear a request at start-up: it may wait for other ranks inside a library, which nothing can
interrupt."""
CLEANUP_SECONDS = 2.5
"""For one that has heard to remove what it had begun."""
ERASE_LINE = b"\r\x1b[K"

ExitFunction = Callable[[str], object]


class StopListener:
    """Whether this process was asked to stop, and by what first."""

    def __init__(self, message: bytes = STOPPING_LINE, *, startup_reason: str = "") -> None:
        """`said` goes to the person who pressed Ctrl-C. `starting`: until `begin` a request ends the program, with this
        reason."""
        self._message, self._startup_reason = message, startup_reason
        self.signal: signal.Signals | None = None
        self.is_stopping = False
        """No further step is taken: this rank was asked, or another one, or the time is up."""
        self._interrupts = 0
        self._started_at = time.monotonic()
        self._wakeup_pipe: int | None = None
        self._is_closed = False
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def is_stop_pending(self) -> bool:
        """Nothing is begun any more, nor waited for, that can be left out."""
        return self.is_stopping or self.signal is not None

    @property
    def minutes_since_start(self) -> float:
        """Since the program began."""
        return (time.monotonic() - self._started_at) / 60

    def listen(self, exit_function: ExitFunction | None = None, *, dump_stacks: bool = False) -> StopListener:
        """Install the handlers (only the main thread can). `leave` ends a program at its start whose main thread does
        not hear, and is given the reason; with `stacks`, SIGQUIT also shows where every thread is."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in filter(is_handled_signal, STOP_SIGNALS):
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        if dump_stacks:
            faulthandler.register(signal.SIGQUIT, chain=True)  # heard or not by the main thread
        os.register_at_fork(after_in_child=self._reset_in_child)
        if exit_function is not None and self._startup_reason:
            ours, self._wakeup_pipe = os.pipe()
            os.set_blocking(self._wakeup_pipe, False)
            signal.set_wakeup_fd(self._wakeup_pipe, warn_on_full_buffer=False)
            threading.Thread(target=self._exit_if_unhandled, args=(ours, exit_function), name="stop",
                             daemon=True).start()
        return self

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopListener]:
        """Listen meanwhile: afterwards requests are for whoever listened before."""
        try:
            yield self.listen()
        finally:
            self._is_closed = True
            for number, handler in self._previous_handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def mark_started(self) -> None:
        """From now on there is something to save, or to finish."""
        self._startup_reason = ""
        self.close()

    def close(self) -> None:
        """The program has heard, or is over, which may be one of several that a process runs."""
        if self._wakeup_pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup_pipe)  # the thread ends
            self._wakeup_pipe = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A launcher of ours counts by itself, and a batch system may ask both it and its ranks.
        self._interrupts += number == signal.SIGINT and not is_child_of_launcher()
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt
        is_first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if self._startup_reason:
            if is_first:
                raise StopRequested(number, self._reason(number))
        elif number == signal.SIGINT and answers_terminal():
            write_lines(self._message)

    def _reason(self, number: int) -> str:
        return f"{interruption_text(number)} {self._startup_reason}"

    def _exit_if_unhandled(self, wakeup_pipe: int, exit_function: ExitFunction) -> None:
        """The kernel's side of each signal wakes this thread, whatever the main thread waits for."""
        with open(wakeup_pipe, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] in STOP_SIGNALS:
                    time.sleep(MAIN_THREAD_SECONDS)
                    if self.signal is not None:
                        time.sleep(CLEANUP_SECONDS)
                    if self._startup_reason and self._wakeup_pipe is not None:
                        exit_function(self._reason(number[0]))

    def _reset_in_child(self) -> None:
        """In a forked child, which ends as whoever forked it wants."""
        if self._is_closed:
            return
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)


def own_interrupts() -> None:
    """A launcher of ours, if there is one, passes Ctrl-C on to rank 0 alone from now on, and ends nothing for it."""
    if is_child_of_launcher():
        os.kill(os.getppid(), SIGNAL_INTERRUPTS_OWNED_BY_RANK0)


def is_child_of_launcher() -> bool:
    """Of ours, and its name was not left in the environment by somebody else's."""
    return os.environ.get("MEGATRON_LAUNCHER") == str(os.getppid())


def answers_terminal(descriptor: int = 2) -> bool:
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
