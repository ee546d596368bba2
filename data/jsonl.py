"""Loose JSON: one object per line, one text per object. Strict reading, with the place of every fault.

A *chunk* is a run of whole lines of one file, read together; the unit of parallel work. Files may be gzipped (`.gz`).
Blank lines are not documents. What counts as malformed is listed in `parse_text`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from data.storage import DataError

CHUNK_BYTES = 1 << 20
SUFFIXES = (".jsonl", ".jsonl.gz")
"""Of the files that are read when a folder is named."""


@dataclass(frozen=True)
class Chunk:
    """Some lines of a file."""

    path: str
    first_line: int
    """Number of the first line, from 1."""
    offset: int
    """Bytes before it in the file (the text of the file, where it is compressed)."""
    data: bytes


def find_files(inputs: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files that are meant: a folder stands for those in it, in the order of their names."""
    files: list[str] = []
    for path in inputs:
        name = os.fspath(path)
        if not os.path.isdir(name):
            files.append(name)
            continue
        inside = sorted(str(file) for file in Path(name).iterdir() if file.name.endswith(SUFFIXES))
        if not inside:
            raise DataError(f"{name}: this folder holds no file that ends in {' or '.join(SUFFIXES)}")
        files += inside
    return files


def read_chunks(path: str | os.PathLike[str], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The lines of a file in order, about `size` bytes (and at least one line) at a time."""
    name = os.fspath(path)
    try:
        with _open(name) as file:
            number, offset = 1, 0
            while data := file.read(size):
                data += file.readline()
                yield Chunk(name, number, offset, data)
                number, offset = number + data.count(b"\n"), offset + len(data)
    except (OSError, EOFError, zlib.error) as error:  # a gzip stream that is damaged or cut off is among them
        raise DataError(f"{name}: cannot read: {getattr(error, 'strerror', None) or error}") from error


def _open(name: str) -> IO[bytes]:
    return gzip.open(name) if name.endswith(".gz") else open(name, "rb")  # type: ignore[return-value]


def lines_of(chunk: Chunk, key: str) -> Iterator[tuple[bytes, str | DataError]]:
    """Each line that is not blank, without its end, and its text or why it has none (`file:line reason`)."""
    start = chunk.offset
    for number, line in enumerate(chunk.data.split(b"\n"), start=chunk.first_line):
        if line and not line.isspace():
            try:
                yield line, parse_text(line, key)
            except (ValueError, RecursionError) as error:
                yield line, DataError(f"{chunk.path}:{number} {error} (the line begins at byte {start})")
        start += len(line) + 1


def parse_text(line: bytes, key: str) -> str:
    """The text under `key` of one JSON object. ValueError says what is wrong with the line.

    Refused: bytes that are not UTF-8, what is not JSON (NaN and Infinity included), anything but an object, a key that
    stands twice, a missing key, a value that is not text, and text with lone surrogates, which no tokenizer keeps.
    """
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from error
    try:
        value = DECODER.decode(decoded)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {_kind(value)}")
    if key not in value:
        raise ValueError(f"no key {key!r}; found {', '.join(map(repr, value)) or 'no keys'} (see --json-key)")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"key {key!r}: expected text, found {_kind(text)}")
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key!r}: lone surrogate U+{ord(text[error.start]):04X} "
                         f"at character {error.start + 1}") from error
    return text


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse_constant)
"""`json.loads` with these hooks would make one for every line."""


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
