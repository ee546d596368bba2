"""Loose JSON: one object per line, one text per object. Strict reading, with the place of every fault.

A *chunk* is a run of whole lines of one file; the unit of parallel work. Files may be gzipped (`.gz`).
Blank lines are not documents. What counts as malformed is listed in `parse_text`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import IO, NoReturn

import numpy as np

from data.storage import DataError

CHUNK_BYTES = 1 << 20
SUFFIXES = (".jsonl", ".jsonl.gz")
"""Of the files that are read when a folder is named."""


@dataclass(frozen=True)
class Chunk:
    """Some lines of a file, or where they stand in it: then they are read by who takes the chunk."""

    path: str
    offset: int
    """Bytes before it in the file (in the text of the file, where it is compressed)."""
    size: int
    data: bytes | None = None
    """The lines, where the file is compressed or a pipe, and can only be read from its start."""

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with _reading(self.path), open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.path}: cannot read: the file became shorter meanwhile")
        return data


@dataclass(frozen=True)
class Malformed:
    """A line that holds no text, and why."""

    path: str
    number: int
    """Lines before it in its chunk."""
    offset: int
    reason: str

    def error(self, before: int) -> DataError:
        """For a chunk that begins after so many lines."""
        return DataError(f"{self.path}:{before + self.number + 1} {self.reason} "
                         f"(the line begins at byte {self.offset})")


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
    name, offset = os.fspath(path), 0
    with _reading(name), _open(name) as file:
        status = os.fstat(file.fileno())
        if name.endswith(".gz") or not S_ISREG(status.st_mode):
            while data := file.read(size):
                data += file.readline()
                yield Chunk(name, offset, len(data), data)
                offset += len(data)
        else:
            while offset < status.st_size:
                file.seek(min(offset + size, status.st_size))
                file.readline()
                yield Chunk(name, offset, file.tell() - offset)
                offset = file.tell()


def _open(name: str) -> IO[bytes]:
    return gzip.open(name) if name.endswith(".gz") else open(name, "rb")  # type: ignore[return-value]


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # a gzip stream that is damaged or cut off is among them
        raise DataError(f"{name}: cannot read: {getattr(error, 'strerror', None) or error}") from error


def lines_of(chunk: Chunk, data: bytes, key: str) -> Iterator[tuple[bytes, str | Malformed]]:
    """Each line of a chunk that was read which is not blank, without its end, and its text or why it has none."""
    offset = chunk.offset
    for number, whole in enumerate(BytesIO(data)):
        if not whole.isspace():
            line = whole.removesuffix(b"\n")
            try:
                yield line, parse_text(line, key)
            except (ValueError, RecursionError) as error:
                yield line, Malformed(chunk.path, number, offset, str(error))
        offset += len(whole)


def count_lines(data: bytes) -> int:
    """`data.count(b"\\n")`, which looks at one byte after the other."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


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
        value = _json(decoded)
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


def _json(line: str) -> object:
    """DECODER.decode, which looks for white space first; nearly no line has any at its ends."""
    try:
        value, end = DECODER.scan_once(line, 0)  # type: ignore[attr-defined]
        if end == len(line):
            return value
    except StopIteration:
        pass
    return DECODER.decode(line)


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
