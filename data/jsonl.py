"""Loose JSON: one object per line, one text per object. Strict reading, with the place of every fault.

Chunks are runs of whole lines. Blank lines are not documents, and a byte order mark at the start of a file is no part
of the first. What counts as malformed is listed in `parse_text`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from io import BytesIO
from stat import S_ISREG
from typing import NoReturn

from data.chunks import BOM, CHUNK_BYTES, Chunk, Malformed
from data.compressed import is_compressed, opened, reading


def read_chunks(path: str | os.PathLike[str], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The lines of a file in order, about `size` bytes (and at least one line) at a time."""
    name, offset = os.fspath(path), 0
    with reading(name), opened(name) as file:
        status = os.stat(name)
        if is_compressed(name) or not S_ISREG(status.st_mode):
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


def lines_of(chunk: Chunk, data: bytes, key: str) -> Iterator[tuple[bytes, str | Malformed]]:
    """Each line of a chunk that was read which is not blank, without its end, and its text or why it has none."""
    offset = chunk.offset
    if offset == 0 and data.startswith(BOM):
        data, offset = data.removeprefix(BOM), len(BOM)
    for number, whole in enumerate(BytesIO(data)):
        if not whole.isspace():
            line = whole.removesuffix(b"\n")
            try:
                yield line, parse_text(line, key)
            except (ValueError, RecursionError) as error:
                yield line, Malformed(chunk.path, number, offset, str(error))
        offset += len(whole)


def parse_text(line: bytes, key: str) -> str:
    """The text under `key` of one JSON object. ValueError says what is wrong with the line.

    Refused: bytes that are not UTF-8, what is not JSON (NaN and Infinity included), anything but an object, a key that
    appears twice, a missing key, a value that is not text, and text with lone surrogates, which no tokenizer keeps.
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
        raise ValueError(f"key {twice!r} appears twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse_constant)
"""`json.loads` with these hooks would make one for every line."""


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
