"""Requests to stop a program: SIGTERM, Ctrl-C, a closed terminal, a batch system (docs/launch.md has the table).

Programs that save nothing exit with one line and code 130 (`exit_on_stop_signal`, `raise_on_stop_signal`). Training
uses a `StopListener`: before the first step a request exits at once; afterwards all ranks agree, save and exit.
Standard library only: called before the slow imports.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from types import FrameType
from typing import Any, NoReturn

# Signals from users, closing terminals and batch systems that would otherwise end a program without an error line.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
                signal.SIGXCPU)
EXIT_STOPPED = 130

SignalHandler = Callable[[int, FrameType | None], Any] | signal.Handlers


class StopRequested(SystemExit):
    """Not an Exception, so that `except Exception` does not swallow it."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(EXIT_STOPPED)
        self.text = text or interruption_text(number)  # text of the error line, printed where the program ends


def interruption_text(number: int) -> str:
    """Without a signal name for Ctrl-C, which the user pressed knowingly."""
    return "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"


def is_handled_signal(number: signal.Signals) -> bool:
    """False for an ignored SIGHUP (`nohup`). SIGINT and SIGQUIT are handled even if ignored (a script's `cmd &`)."""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


def exit_on_stop_signal(before: str = "it began") -> None:
    """Exit with an error line on a stop signal, until another handler is installed, such as that of `run`."""
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore_further_stop_signals()
        with suppress(OSError):
            os.write(2, f"error: {interruption_text(number)} before {before}; start the same command again\n".encode())
        raise StopRequested(number)

    _install_handler(stop, STOP_SIGNALS)


def raise_on_stop_signal() -> None:
    """Raise StopRequested on a stop signal, and KeyboardInterrupt on Ctrl-C; `exit_codes.run` prints the error line."""
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore_further_stop_signals()
        raise StopRequested(number)

    _install_handler(stop, [number for number in STOP_SIGNALS if number != signal.SIGINT])
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_stop_signals_at_exit() -> None:
    """Ignore stop signals once `__main__` has ended: an exception in an atexit callback would print a traceback."""
    def stop_if_running(number: int, frame: FrameType | None) -> None:
        while frame is not None and (frame := frame.f_back) is not None:
            if frame.f_globals.get("__name__") == "__main__":  # __main__ is still running
                raise KeyboardInterrupt if number == signal.SIGINT else StopRequested(number)

    _install_handler(stop_if_running, STOP_SIGNALS)


def ignore_further_stop_signals() -> None:
    """Ignore all stop signals but Ctrl-C, so that cleanup is not interrupted."""
    _install_handler(signal.SIG_IGN, [number for number in STOP_SIGNALS if number != signal.SIGINT])


def _install_handler(handler: SignalHandler, numbers: Iterable[signal.Signals]) -> None:
    if threading.current_thread() is threading.main_thread():  # only the main thread can install handlers
        for number in filter(is_handled_signal, numbers):
            signal.signal(number, handler)


# A rank sends it to its launcher, which then passes Ctrl-C to rank 0 only. Processes ignore it by default.
SIGNAL_INTERRUPTS_OWNED_BY_RANK0 = signal.SIGURG
STOPPING_LINE = b"stopping after this step (Ctrl-C again ends at once, without saving)\n"
BEFORE_FIRST_STEP = "before the first step, so that nothing was lost: start the same command again"
MAIN_THREAD_SECONDS = 1.0  # seconds for the main thread to run the handler in start-up, unless native code blocks it
CLEANUP_SECONDS = 2.5  # seconds for the main thread to clean up after its handler ran
ERASE_LINE = b"\r\x1b[K"

ExitFunction = Callable[[str], object]


class ListenerState(Enum):
    STARTING = auto()  # a stop request ends the program at once
    RUNNING = auto()  # a stop request lets the loop save and finish
    CLOSED = auto()  # the previous handlers are installed again


class StopListener:
    """Records whether this process was asked to stop, and by which signal first. True once it was. Also holds the clock
    of --exit-duration-in-mins, which includes start-up."""

    def __init__(self, message: bytes = STOPPING_LINE, *, startup_reason: str = "") -> None:
        """`message` answers Ctrl-C. With `startup_reason`, a request before `mark_started` ends the program at once."""
        self._message, self._startup_reason = message, startup_reason
        self._state = ListenerState.STARTING if startup_reason else ListenerState.RUNNING
        self.signal: signal.Signals | None = None
        # Set by the training loop: no further step, as a rank was asked to stop or the time is up.
        self.is_stopping = False
        self._interrupts = 0
        self._started_at = time.monotonic()
        self._wakeup_pipe: int | None = None
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def is_stop_pending(self) -> bool:
        """Whether to skip optional work and waits from now on."""
        return self.is_stopping or self.signal is not None

    @property
    def minutes_since_start(self) -> float:
        """Minutes since the program began."""
        return (time.monotonic() - self._started_at) / 60

    def listen(self, exit_function: ExitFunction | None = None, *, dump_stacks: bool = False) -> StopListener:
        """Install the handlers (main thread only). During start-up, `exit_function(reason)` ends a program whose main
        thread does not run the handler. With `dump_stacks`, SIGQUIT also prints every thread's stack."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in filter(is_handled_signal, STOP_SIGNALS):
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        if dump_stacks:
            faulthandler.register(signal.SIGQUIT, chain=True)  # works even if the main thread is blocked
        os.register_at_fork(after_in_child=self._reset_in_child)
        if exit_function is not None and self._state is ListenerState.STARTING:
            ours, self._wakeup_pipe = os.pipe()
            os.set_blocking(self._wakeup_pipe, False)
            signal.set_wakeup_fd(self._wakeup_pipe, warn_on_full_buffer=False)
            threading.Thread(target=self._exit_if_unhandled, args=(ours, exit_function), name="stop",
                             daemon=True).start()
        return self

    @contextmanager
    def listening(self) -> Iterator[StopListener]:
        """Listen inside the context; afterwards the previous handlers are restored."""
        try:
            yield self.listen()
        finally:
            self._state = ListenerState.CLOSED
            for number, handler in self._previous_handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def mark_started(self) -> None:
        """End of start-up: from now on a request lets the loop save and finish."""
        self._state = ListenerState.RUNNING
        self.close()

    def close(self) -> None:
        """Stop the start-up thread. A process may run several programs in turn, so nothing may stay installed."""
        if self._wakeup_pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup_pipe)  # the thread ends
            self._wakeup_pipe = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Our launcher counts interrupts itself, and a batch system may signal both the launcher and its ranks.
        self._interrupts += number == signal.SIGINT and not is_child_of_launcher()
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt
        is_first, self.signal = self.signal is None, self.signal or signal.Signals(number)
        if self._state is ListenerState.STARTING:
            if is_first:
                raise StopRequested(number, self._reason(number))
        elif number == signal.SIGINT and os.isatty(2) and "MEGATRON_LAUNCHER" not in os.environ \
                and os.environ.get("RANK", "0") == "0":  # our launcher replies for its ranks
            write_lines(self._message)

    def _reason(self, number: int) -> str:
        return f"{interruption_text(number)} {self._startup_reason}"

    def _exit_if_unhandled(self, wakeup_pipe: int, exit_function: ExitFunction) -> None:
        """Start-up thread. The C-level signal handler writes the wake-up pipe even while the main thread is blocked."""
        with open(wakeup_pipe, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] in STOP_SIGNALS:
                    time.sleep(MAIN_THREAD_SECONDS)
                    if self.signal is not None:
                        time.sleep(CLEANUP_SECONDS)
                    if self._state is ListenerState.STARTING and self._wakeup_pipe is not None:
                        exit_function(self._reason(number[0]))

    def _reset_in_child(self) -> None:
        """Restore default handlers in a forked child, so that its parent can end it."""
        if self._state is ListenerState.CLOSED:
            return
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)


def own_interrupts() -> None:
    """Tell our launcher, if there is one, to pass Ctrl-C to rank 0 only and to end no rank for it."""
    if is_child_of_launcher():
        os.kill(os.getppid(), SIGNAL_INTERRUPTS_OWNED_BY_RANK0)


def is_child_of_launcher() -> bool:
    """Whether our launcher is the direct parent, not only a variable inherited from an outer process."""
    return os.environ.get("MEGATRON_LAUNCHER") == str(os.getppid())


def write_lines(text: bytes) -> None:
    """Write lines to stderr. On a terminal they replace a progress bar on the current line."""
    write_stderr((ERASE_LINE if text and os.isatty(2) else b"") + text)


def write_stderr(text: bytes) -> None:
    """Write unbuffered; ignores errors, since the reader of stderr may be gone."""
    with suppress(OSError):
        while text:
            text = text[os.write(2, text):]
