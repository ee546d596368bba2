"""Where prompts come from: the command line, a file or a pipe, one a line; all at once or one after the other while
texts are made. Each has its place, which an error names. No torch."""

from __future__ import annotations

import io
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TextIO, final

from data.compressed import open_decompressed, read_errors_for, strip_compression_suffix
from data.storage import DataError
from megatron.config.tree import require

SILENCE = 0.05
"""Seconds without a line after which what has come is begun with."""


class Prompt(NamedTuple):
    text: str
    where: str
    """Its place, for what is said of it."""


class Prompts(Protocol):
    lasts: bool
    """More may come at any time, or none for hours."""

    @property
    def ahead(self) -> Sequence[Prompt]:
        """Those that are known already, to be looked at before the first is answered."""

    def take(self, most: int, wait: bool) -> list[Prompt] | None:
        """Up to `most` of them, none if there is none yet; None: no more will come. With `wait` at least one."""


@final
class Given:
    """All are at hand."""

    lasts = False

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.ahead: Sequence[Prompt] = list(prompts)
        self._taken = 0

    def take(self, most: int, wait: bool) -> list[Prompt] | None:
        found = list(self.ahead[self._taken : self._taken + most])
        self._taken += len(found)
        return found or None


@final
class Arriving:
    """Lines that another program writes, and may wait for an answer to each. They are read beside the texts."""

    lasts = True
    ahead: Sequence[Prompt] = ()

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._arrived: queue.Queue[Prompt | BaseException | None] = queue.Queue()
        threading.Thread(target=self._read, args=(prompts,), daemon=True).start()
        self._over = False

    def _read(self, prompts: Iterable[Prompt]) -> None:
        end: BaseException | None = None
        try:
            for prompt in prompts:
                self._arrived.put(prompt)
        except BaseException as error:  # raised where prompts are taken
            end = error
        self._arrived.put(end)

    def take(self, most: int, wait: bool) -> list[Prompt] | None:
        found: list[Prompt] = []
        while len(found) < most and not self._over:
            try:
                one = self._arrived.get(wait, None if not found else SILENCE)
            except queue.Empty:
                break
            if isinstance(one, BaseException):
                raise one
            if one is None:
                self._over = True
            else:
                found.append(one)
        return None if self._over and not found else found


BOM = "\ufeff"


def of_arguments(texts: Iterable[str], what: str = "prompt") -> list[Prompt]:
    """Python decodes arguments by the locale; here they are UTF-8, as lines of files and of standard input are."""
    places = (f"{what} {number} of the command line" for number in itertools.count(1))
    return [Prompt(_utf8(os.fsencode(text), where), where) for text, where in zip(texts, places)]


def of_file(path: str, say: Callable[[str], None]) -> Iterator[Prompt]:
    """Compressed or not, as its name says; of a .jsonl file the texts of its objects."""
    is_json = strip_compression_suffix(path).endswith(".jsonl")
    is_empty = True
    with read_errors_for(path), open_decompressed(path) as file:
        for text, where in _without_blanks(_decoded(file, path), path, say):
            is_empty = False
            yield Prompt(_text_in(text, where) if is_json else text, where)
    if is_empty:
        raise DataError(f"{path}: the file is empty; expected prompts, one a line")


def of_stream(stream: TextIO, say: Callable[[str], None]) -> Iterator[Prompt]:
    """Of standard input."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")  # else the line is not known where bytes are no text
    raw = (line.encode("utf-8", "surrogateescape") for line in stream)
    return _without_blanks(_decoded(raw, "standard input"), "standard input", say)


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[Prompt]:
    for number, raw in enumerate(lines, 1):
        where = f"{name}, line {number}"
        yield Prompt(_utf8(raw, where).removeprefix(BOM if number == 1 else ""), where)


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error})") from error


def _without_blanks(lines: Iterable[Prompt], name: str, say: Callable[[str], None]) -> Iterator[Prompt]:
    """A blank line is no prompt; at the end one line says how many there were."""
    blanks = 0
    for line, where in lines:
        if line.strip():
            yield Prompt(line.rstrip("\r\n"), where)
        else:
            blanks += 1
    if blanks:
        say(f"note: {name}: {blanks} blank line{'s' * (blanks > 1)} skipped")


def _text_in(line: str, where: str) -> str:
    try:
        found = json.loads(line)
        prompt = found["prompt"] if "prompt" in found else found["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    require(isinstance(prompt, str), f"{where}: expected an object with a text as `prompt` or `text`")
    return _utf8(prompt.encode("utf-8", "surrogatepass"), where)  # half a surrogate pair is no text
