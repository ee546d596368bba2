"""JSON records read strictly: every field is expected, typed and used, or the error names it and its file.

A *sealed* record is one whose last field is the crc32 of every byte before it.

Not a schema language: a few dozen lines that the manifest needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from data.storage import crc32
from megatron.errors import CheckpointError

T = TypeVar("T")

CHECKSUM = b',"crc32":"'


def parse_json(data: bytes, where: str) -> object:
    """The JSON value in `data`; whatever else the bytes are (a pickle, say), they are only ever parsed as text."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from error
    return value


def read_bytes(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error


def seal(fields: Mapping[str, Any]) -> bytes:
    """The record as JSON, sealed."""
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return text + ending(text)


def unseal(data: bytes, where: str) -> object:
    """The record in `data`, without its seal, which must be good."""
    text, mark, rest = data.rpartition(CHECKSUM)
    if mark + rest != ending(text):
        raise CheckpointError(f"{where}: damaged: its {len(data)} bytes do not match its own checksum")
    return parse_json(text + b"}", where)


def ending(text: bytes) -> bytes:
    """The end of a sealed record whose other bytes are `text`."""
    return CHECKSUM + b'%08x"}\n' % crc32(text)


class Record:
    """One JSON object under reading: take each field once by type, then `done()`."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(value).__name__}")
        self.fields = dict(value)
        self.where = where

    def take(self, name: str, kind: type[T]) -> T:
        if name not in self.fields:
            raise CheckpointError(f"{self.where}: field {name!r} is missing")
        value = self.fields.pop(name)
        # bool is an int to Python, not to us.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: field {name!r} must be {kind.__name__}, found {value!r:.80}")
        return value

    def count(self, name: str) -> int:
        """A non-negative integer."""
        value = self.take(name, int)
        if value < 0:
            raise CheckpointError(f"{self.where}: field {name!r} must not be negative, found {value}")
        return value

    def optional_count(self, name: str) -> int | None:
        if name in self.fields and self.fields[name] is None:
            del self.fields[name]
            return None
        return self.count(name)

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of non-negative integers."""
        values = self.take(name, list)
        return tuple(Record({name: value}, self.where).count(name) for value in values)

    def done(self) -> None:
        if self.fields:
            raise CheckpointError(f"{self.where}: unknown field {sorted(self.fields)[0]!r}")
