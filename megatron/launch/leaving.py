"""Signals that ask a program to end: it says so in one line, removes what it has begun, and leaves with 130.

For programs that make something which can be made again. One that saves when it is asked, or finishes what others wait
for, listens by itself (signals.py); the tools of `data` have their own (data/cli.py). Standard library only:
`exit_on_stop_signal` is called before whatever takes a while to import.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
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
