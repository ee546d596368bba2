"""Prompt sources: command line, file, pipe or terminal.

Each prompt knows its location (file and line) for error messages. A pipe is read in a thread, so that generation
starts before its last line. `Terminal` reads lines with a history and turns Ctrl-C into a flag. Does not import
torch.
"""

from __future__ import annotations

import io
import itertools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TextIO

from data.compressed import open_decompressed, read_errors_for, strip_compression_suffix
from data.storage import DataError, escape_to_one_line
from data.strict_json import parse_text
from megatron.distributed.signals import own_interrupts

IDLE_SECONDS = 0.05  # after this time without another line, a stream hands out the prompts that it has


class Prompt(NamedTuple):
    text: str
    location: str  # file and line, for messages


class PromptSource:
    """Prompts that are known before the first is answered, or a stream: the lines of another program, which may wait
    for each answer. A thread reads those."""

    def __init__(self, prompts: Iterable[Prompt], is_stream: bool = False) -> None:
        self.is_stream = is_stream  # the next prompt may take hours
        self.known_prompts: list[Prompt] = [] if is_stream else list(prompts)
        self._queue: queue.Queue[Prompt | BaseException | None] = queue.Queue()
        if is_stream:
            threading.Thread(target=self._read, args=(prompts,), daemon=True).start()
        else:
            self._read(self.known_prompts)
        self._is_exhausted = False

    def _read(self, prompts: Iterable[Prompt]) -> None:
        end: BaseException | None = None
        try:
            for prompt in prompts:
                self._queue.put(prompt)
        except BaseException as error:  # raised where prompts are taken
            end = error
        self._queue.put(end)

    def take(self, limit: int, wait: bool) -> list[Prompt] | None:
        """Up to `limit` prompts, with `wait` at least one; None: the source is exhausted."""
        taken: list[Prompt] = []
        while len(taken) < limit and not self._is_exhausted:
            try:
                one = self._queue.get(wait, None if not taken else IDLE_SECONDS)
            except queue.Empty:
                break
            if isinstance(one, BaseException):
                raise one
            if one is None:
                self._is_exhausted = True
            else:
                taken.append(one)
        return None if self._is_exhausted and not taken else taken


BOM = "\ufeff"


def prompts_from_args(texts: Iterable[str], what: str = "prompt") -> list[Prompt]:
    """Arguments are UTF-8 as files are, while Python decodes them by the locale."""
    places = (f"{what} {number} of the command line" for number in itertools.count(1))
    return [Prompt(decode_utf8(os.fsencode(text), where), where) for text, where in zip(texts, places)]


def prompts_from_file(path: str, log: Callable[[str], None]) -> Iterator[Prompt]:
    """One prompt a line, or an object a line in a .jsonl file; compressed according to the suffix."""
    is_json, is_empty = strip_compression_suffix(path).endswith(".jsonl"), True
    for text, where in _prompts_of_lines(read_lines(path), path, log):
        is_empty = False
        yield Prompt(text_from_json(text, where, "prompt", "text") if is_json else text, where)
    if is_empty:
        raise DataError(f"{path}: the file is empty; expected prompts, one a line")


def prompts_from_stream(stream: TextIO, log: Callable[[str], None]) -> Iterator[Prompt]:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")  # so that the error of decode_utf8 names the line
    name, lines = "standard input", (line.encode("utf-8", "surrogateescape") for line in stream)
    return _prompts_of_lines(decode_lines(lines, name), name, log)


def _prompts_of_lines(lines: Iterable[tuple[str, str]], name: str, log: Callable[[str], None]) -> Iterator[Prompt]:
    """The lines that are not blank; logs the number of blank ones at the end."""
    blanks = 0
    for line, where in lines:
        if line.strip():
            yield Prompt(line.rstrip("\r\n"), where)
        else:
            blanks += 1
    if blanks:
        log(f"note: {name}: {blanks} blank line{'s' * (blanks > 1)} skipped")


def read_lines(path: str) -> Iterator[tuple[str, str]]:
    """(line, its location) of a file, which may be compressed."""
    with read_errors_for(path), open_decompressed(path) as file:
        yield from decode_lines(file, path)


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    """(line, its location), without a byte order mark."""
    for number, raw in enumerate(lines, 1):
        location = f"{name}, line {number}"
        yield decode_utf8(raw, location).removeprefix(BOM if number == 1 else ""), location


def decode_utf8(raw: bytes, location: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 text ({error})") from error


def text_from_json(line: str, location: str, *keys: str) -> str:
    try:
        return parse_text(line, *keys)
    except ValueError as error:
        raise DataError(f"{location}: {error}") from error


PROMPT_MARK = "> "
EXIT_HINT = "Ctrl-D or `stop` leaves"
HISTORY_LINES = 1000


class Terminal:
    """`interrupted` is set by Ctrl-C, except while a line is read."""

    def __init__(self) -> None:
        self.interrupted = False
        self._is_reading_line = False
        self._has_line_editing = sys.stdin.isatty() and sys.stdout.isatty()
        # the stream of the prompt, so that messages keep their order
        self._message_stream = sys.stdout if self._has_line_editing else sys.stderr
        self._save_line: Callable[[], None] = _load_history() if self._has_line_editing else lambda: None

    def __enter__(self) -> Terminal:
        self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        own_interrupts()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def read_prompt(self) -> str | None:
        """The next line; None at the end of the session."""
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
    """Loads the history of earlier sessions; returns a function that appends the last line to it. Without a writable
    file the history is that of this session."""
    try:
        import readline
    except ImportError:  # a Python without readline
        return lambda: None
    given = os.environ.get("XDG_STATE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".local", "state")
    file = root / "megatron-gpt2-trainer" / "generate_history"
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)

    def save_line() -> None:
        with suppress(OSError):
            readline.append_history_file(min(1, readline.get_current_history_length()), file)

    return save_line
