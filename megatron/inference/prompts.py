"""Prompt sources: command line, file, pipe or terminal.

Each prompt knows its location (file and line) for error messages. A pipe is read in a thread, so that generation
starts before its last line. `Terminal` reads lines with a history and turns Ctrl-C into a flag. Does not import
torch.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol, TextIO, final

from data.compressed import open_decompressed, read_errors_for, strip_compression_suffix
from data.storage import DataError, escape_to_one_line
from megatron.config.tree import require
from megatron.distributed.signals import own_interrupts

IDLE_SECONDS = 0.05
"""Seconds without a line after which what has come is begun with."""


class Prompt(NamedTuple):
    text: str
    location: str
    """Its place, for what is said of it."""


class PromptSource(Protocol):
    is_stream: bool
    """More may come at any time, or none for hours."""

    @property
    def known_prompts(self) -> Sequence[Prompt]:
        """Those that are known already, to be looked at before the first is answered."""

    def take(self, limit: int, wait: bool) -> list[Prompt] | None:
        """Up to `limit` of them, none if there is none yet; None: no more will come. With `wait` at least one."""


@final
class StaticPrompts:
    """All are at hand."""

    is_stream = False

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.known_prompts: Sequence[Prompt] = list(prompts)
        self._num_taken = 0

    def take(self, limit: int, wait: bool) -> list[Prompt] | None:
        found = list(self.known_prompts[self._num_taken : self._num_taken + limit])
        self._num_taken += len(found)
        return found or None


@final
class StreamingPrompts:
    """Lines that another program writes, and may wait for an answer to each. They are read beside the texts."""

    is_stream = True
    known_prompts: Sequence[Prompt] = ()

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._queue: queue.Queue[Prompt | BaseException | None] = queue.Queue()
        threading.Thread(target=self._read, args=(prompts,), daemon=True).start()
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
        found: list[Prompt] = []
        while len(found) < limit and not self._is_exhausted:
            try:
                one = self._queue.get(wait, None if not found else IDLE_SECONDS)
            except queue.Empty:
                break
            if isinstance(one, BaseException):
                raise one
            if one is None:
                self._is_exhausted = True
            else:
                found.append(one)
        return None if self._is_exhausted and not found else found


BOM = "\ufeff"


def prompts_from_args(texts: Iterable[str], what: str = "prompt") -> list[Prompt]:
    """Python decodes arguments by the locale; here they are UTF-8, as lines of files and of standard input are."""
    places = (f"{what} {number} of the command line" for number in itertools.count(1))
    return [Prompt(_decode_utf8(os.fsencode(text), where), where) for text, where in zip(texts, places)]


def prompts_from_file(path: str, log: Callable[[str], None]) -> Iterator[Prompt]:
    """Compressed or not, as its name says; of a .jsonl file the texts of its objects."""
    is_json = strip_compression_suffix(path).endswith(".jsonl")
    is_empty = True
    with read_errors_for(path), open_decompressed(path) as file:
        for text, where in _skip_blank_lines(_decode_lines(file, path), path, log):
            is_empty = False
            yield Prompt(_text_from_json(text, where) if is_json else text, where)
    if is_empty:
        raise DataError(f"{path}: the file is empty; expected prompts, one a line")


def prompts_from_stream(stream: TextIO, log: Callable[[str], None]) -> Iterator[Prompt]:
    """Of standard input."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")  # else the line is not known where bytes are no text
    raw = (line.encode("utf-8", "surrogateescape") for line in stream)
    return _skip_blank_lines(_decode_lines(raw, "standard input"), "standard input", log)


def _decode_lines(lines: Iterable[bytes], name: str) -> Iterator[Prompt]:
    for number, raw in enumerate(lines, 1):
        where = f"{name}, line {number}"
        yield Prompt(_decode_utf8(raw, where).removeprefix(BOM if number == 1 else ""), where)


def _decode_utf8(raw: bytes, location: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{location}: not UTF-8 text ({error})") from error


def _skip_blank_lines(lines: Iterable[Prompt], name: str, log: Callable[[str], None]) -> Iterator[Prompt]:
    """A blank line is no prompt; at the end one line says how many there were."""
    blanks = 0
    for line, where in lines:
        if line.strip():
            yield Prompt(line.rstrip("\r\n"), where)
        else:
            blanks += 1
    if blanks:
        log(f"note: {name}: {blanks} blank line{'s' * (blanks > 1)} skipped")


def _text_from_json(line: str, location: str) -> str:
    try:
        found = json.loads(line)
        prompt = found["prompt"] if "prompt" in found else found["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    require(isinstance(prompt, str), f"{location}: expected an object with a text as `prompt` or `text`")
    return _decode_utf8(prompt.encode("utf-8", "surrogatepass"), location)  # half a surrogate pair is no text


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
        # where the prompt is, so that they keep their order
        self._message_stream = sys.stdout if self._has_line_editing else sys.stderr
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
