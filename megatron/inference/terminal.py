"""The person at a session: lines with a history, and Ctrl-C, which ends what is being answered. Rank 0's. No torch."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import final

from data.storage import escape_to_one_line
from megatron.launch.signals import own_interrupts

PROMPT = "> "
HOW_TO_LEAVE = "Ctrl-D or `stop` leaves"
LINES_KEPT = 1000


def is_at_hand() -> bool:
    """Somebody types here."""
    return sys.stdin.isatty()


@final
class Terminal:
    """`interrupted` is set by Ctrl-C, unless a line is being asked for."""

    def __init__(self) -> None:
        self.interrupted = False
        self._asking = False
        self._edits = sys.stdin.isatty() and sys.stdout.isatty()
        self._words = sys.stdout if self._edits else sys.stderr  # where the prompt is, so that they keep their order
        self._remember: Callable[[], None] = _history() if self._edits else _nothing

    def __enter__(self) -> Terminal:
        self._former = signal.signal(signal.SIGINT, self._on_interrupt)
        own_interrupts()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._former)

    def ask(self) -> str | None:
        """The next prompt, as it is typed; None: no more."""
        while True:
            self._asking = True
            try:
                line = self._line()
            except KeyboardInterrupt:
                self.say(f"\n{HOW_TO_LEAVE}")
                continue
            except EOFError:
                self.say("")
                return None
            finally:
                self._asking = self.interrupted = False
            if line.strip() == "stop":
                return None
            if line:
                self._remember()
                return line

    def show(self, text: str) -> None:
        """A part of an answer."""
        sys.stdout.write(escape_to_one_line(text, allowed="\n") if self._edits else text)
        sys.stdout.flush()

    def say(self, line: str) -> None:
        print(line, file=self._words, flush=True)

    def _line(self) -> str:
        if self._edits:
            return input(PROMPT)
        self._words.write(PROMPT)
        self._words.flush()
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.rstrip("\n")

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asking:
            raise KeyboardInterrupt
        self.interrupted = True


def _history() -> Callable[[], None]:
    """Lines of former sessions are there, and the returned function keeps the last one for later. Where a file cannot
    be, only this session's are."""
    try:
        import readline
    except ImportError:  # a Python without it
        return _nothing
    file = _state_folder() / "generate_history"
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    readline.set_history_length(LINES_KEPT)

    def remember() -> None:
        with suppress(OSError):
            readline.append_history_file(min(1, readline.get_current_history_length()), file)

    return remember


def _state_folder() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".local", "state")
    return root / "megatron-gpt2-trainer"


def _nothing() -> None:
    """Nobody looks back."""
