"""Requests to stop a program: SIGTERM, Ctrl-C, a closed terminal, a batch system (docs/launch.md has the table).

Programs that save nothing exit with one line and code 130 (`exit_on_stop_signal`, `raise_on_stop_signal`). Training
uses a `StopListener`: before the first step a request exits at once; afterwards all ranks agree, save and exit.
Further signals are ignored; a second Ctrl-C raises KeyboardInterrupt. The listener also holds the clock of
--exit-duration-in-mins, which includes start-up. Standard library only: called before the slow imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
                signal.SIGXCPU)
"""What people, terminals that close and batch systems send, and what would end a program without a word."""
EXIT_STOPPED = 130

SignalHandler = Callable[[int, FrameType | None], Any] | signal.Handlers


class StopRequested(SystemExit):
    """Not an Exception: nothing that only meets a failure of its own takes it for one."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(EXIT_STOPPED)
        self.text = text or interruption_text(number)
        """For the error line of whoever ends the program."""


def interruption_text(number: int) -> str:
    """People who press Ctrl-C know it."""
    return "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"


def is_handled_signal(number: signal.Signals) -> bool:
    """`nohup` has a program ignore that its terminal closes. (A shell's `&` in a script ignores Ctrl-C and SIGQUIT as
    well: there is no terminal to press them at, and whoever sends them means it.)"""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


def exit_on_stop_signal(before: str = "it began") -> None:
    """Until somebody else listens, a request ends the program, and the line is written at once: nobody has begun who
    would write it."""
    def end(number: int, frame: FrameType | None) -> NoReturn:
        ignore_further_stop_signals()
        with suppress(OSError):
            os.write(2, f"error: {interruption_text(number)} before {before}; start the same command again\n".encode())
        raise StopRequested(number)

    _install_handler(end, STOP_SIGNALS)


def raise_on_stop_signal() -> None:
    """The same for a program that ends in one place (exits.py), which writes the line. Ctrl-C is
    Python's KeyboardInterrupt there."""
    def ask(number: int, frame: FrameType | None) -> NoReturn:
        ignore_further_stop_signals()
        raise StopRequested(number)

    _install_handler(ask, [number for number in STOP_SIGNALS if number != signal.SIGINT])
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_stop_signals_at_exit() -> None:
    """Requests after the end of the main program change nothing: raised in a callback of atexit, they would print a
    traceback."""
    def ask(number: int, frame: FrameType | None) -> None:
        while frame is not None and (frame := frame.f_back) is not None:
            if frame.f_globals.get("__name__") == "__main__":  # it goes on
                raise KeyboardInterrupt if number == signal.SIGINT else StopRequested(number)

    _install_handler(ask, STOP_SIGNALS)


def ignore_further_stop_signals() -> None:
    """One request is enough: what the program tidies up now is not interrupted, but by Ctrl-C."""
    _install_handler(signal.SIG_IGN, [number for number in STOP_SIGNALS if number != signal.SIGINT])


def _install_handler(handler: SignalHandler, numbers: Iterable[signal.Signals]) -> None:
    if threading.current_thread() is threading.main_thread():  # no other can
        for number in filter(is_handled_signal, numbers):
            signal.signal(number, handler)


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
