"""Prompts of a file or a pipe, one a line, each with its place: what is refused is refused by it. No torch."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from data.compressed import opened, reading, without_compression
from data.storage import DataError
from megatron.config.tree import require
from megatron.inference.prompts import Prompt

BOM = "\ufeff"


def of_arguments(texts: Iterable[str], what: str = "prompt") -> list[Prompt]:
    """Python decodes arguments by the locale; here they are UTF-8, as lines of files and of standard input are."""
    places = (f"{what} {number} of the command line" for number in itertools.count(1))
    return [Prompt(_utf8(os.fsencode(text), where), where) for text, where in zip(texts, places)]


def of_file(path: str, say: Callable[[str], None]) -> Iterator[Prompt]:
    """Compressed or not, as its name says; of a .jsonl file the texts of its objects."""
    is_json = without_compression(path).endswith(".jsonl")
    is_empty = True
    with reading(path), opened(path) as file:
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
