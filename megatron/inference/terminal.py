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

PROMPT_MARK = "> "
EXIT_HINT = "Ctrl-D or `stop` leaves"
HISTORY_LINES = 1000


def stdin_is_terminal() -> bool:
    """Somebody types here."""
    return sys.stdin.isatty()


@final
class Terminal:
    """`interrupted` is set by Ctrl-C, unless a line is being asked for."""

    def __init__(self) -> None:
        self.interrupted = False
        self._is_reading_line = False
        self._has_line_editing = sys.stdin.isatty() and sys.stdout.isatty()
        self._message_stream = sys.stdout if self._has_line_editing else sys.stderr  # where the prompt is, so that they keep their order
        self._save_line: Callable[[], None] = _load_history() if self._has_line_editing else _save_nothing

    def __enter__(self) -> Terminal:
        self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        own_interrupts()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def read_prompt(self) -> str | None:
        """The next prompt, as it is typed; None: no more."""
        while True:
            self._is_reading_line = True
            try:
                line = self._read_line()
            except KeyboardInterrupt:
                self.print_message(f"\n{EXIT_HINT}")
                continue
            except EOFError:
                self.print_message("")
                return None
            finally:
                self._is_reading_line = self.interrupted = False
            if line.strip() == "stop":
                return None
            if line:
                self._save_line()
                return line

    def write_answer(self, text: str) -> None:
        """A part of an answer."""
        sys.stdout.write(escape_to_one_line(text, allowed="\n") if self._has_line_editing else text)
        sys.stdout.flush()

    def print_message(self, line: str) -> None:
        print(line, file=self._message_stream, flush=True)

    def _read_line(self) -> str:
        if self._has_line_editing:
            return input(PROMPT_MARK)
        self._message_stream.write(PROMPT_MARK)
        self._message_stream.flush()
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.rstrip("\n")

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_reading_line:
            raise KeyboardInterrupt
        self.interrupted = True


def _load_history() -> Callable[[], None]:
    """Lines of former sessions are there, and the returned function keeps the last one for later. Where a file cannot
    be, only this session's are."""
    try:
        import readline
    except ImportError:  # a Python without it
        return _save_nothing
    file = _state_folder() / "generate_history"
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)

    def save_line() -> None:
        with suppress(OSError):
            readline.append_history_file(min(1, readline.get_current_history_length()), file)

    return save_line


def _state_folder() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".local", "state")
    return root / "megatron-gpt2-trainer"


def _save_nothing() -> None:
    """Nobody looks back."""
