"""JSON records read strictly: every field is expected, typed and used, or the error names it and its file.

A *sealed* record is one whose last field is the crc32 of every byte before it. Older versions could sign one: a field
`hmac` before that, which is not looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from data.storage import crc32, parse_error_text
from megatron.errors import CheckpointError, ConfigError

T = TypeVar("T")

CHECKSUM_FIELD = b',"crc32":"'
MAX_JSON_BYTES = 256 << 20
"""Bytes of a file of JSON: the longest that was ever written, a manifest of format 2 of many ranks, has half of it. A
longer one, sparse or not, is not read into memory."""
MAX_COUNT = 10**15
"""Steps, samples, elements, bytes: no count is as large."""


@contextmanager
def reraise_as_corrupt(where: str) -> Iterator[None]:
    """Whatever the block, which talks to no other rank, makes of values from a checkpoint: an error of it is theirs."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{where}: cannot be used ({type(error).__name__}: {error!s:.200})") from error


def parse_json(data: bytes | str, where: str) -> object:
    """The JSON value in `data`; whatever else the bytes are (a pickle, say), they are only ever parsed as text."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON ({parse_error_text(error)})") from error
    return value


def read_bytes(path: Path, where: str) -> bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(MAX_JSON_BYTES + 1) if size <= MAX_JSON_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error
    if max(size, len(data)) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{where}: has {max(size, len(data))} bytes, and no file of its kind more than {MAX_JSON_BYTES}")
    return data


def seal_record(fields: Mapping[str, Any]) -> bytes:
    """The record as JSON, sealed."""
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return check_json_size(text + checksum_ending(text))


def check_json_size(data: bytes) -> bytes:
    """`data`, which a reader will take: what is too long for that is refused when it is saved."""
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"a state of {len(data)} bytes of JSON is not saved, as no more than {MAX_JSON_BYTES} would be "
            "read; hold large values in tensors")
    return data


def unseal_record(data: bytes, where: str) -> object:
    """The record in `data`, without its seal, which must be good, and without the signature of an older version."""
    text = memoryview(data)[:max(data.rfind(CHECKSUM_FIELD), 0)]
    if data[len(text):] != checksum_ending(text):
        raise CheckpointError(f"{where}: damaged: its {len(data)} bytes do not match its own checksum")
    try:
        record = parse_json(str(text, "utf-8") + "}", where)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from error
    if isinstance(record, dict):
        record.pop("hmac", None)
    return record


def checksum_ending(text: bytes | memoryview) -> bytes:
    """The end of a sealed record whose other bytes are `text`."""
    return CHECKSUM_FIELD + b'%08x"}\n' % crc32(text)


class StrictRecord:
    """One JSON object under reading: take each field once by type, then `done()`."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(value).__name__}")
        self.fields = dict(value)
        self.where = where

    def take_field(self, name: str, kind: type[T]) -> T:
        if name not in self.fields:
            raise CheckpointError(f"{self.where}: field {name!r} is missing")
        value = self.fields.pop(name)
        # bool is an int to Python, not to us.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: field {name!r} must be {kind.__name__}, found {value!r:.80}")
        return value

    def take_count(self, name: str, most: int = MAX_COUNT) -> int:
        """A non-negative integer."""
        value = self.take_field(name, int)
        if value < 0:
            raise CheckpointError(f"{self.where}: field {name!r} must not be negative, found {value}")
        if value >= most:
            raise CheckpointError(f"{self.where}: field {name!r} is {value:.3e}, which nothing here can be"
                                  if value < 1e300 else f"{self.where}: field {name!r} is beyond all bounds")
        return value

    def take_number(self, name: str, above: float = float("-inf")) -> float:
        """A finite number."""
        value = self.fields.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise CheckpointError(f"{self.where}: field {name!r} must be a finite number"
                                  f"{'' if above == float('-inf') else f' above {above:g}'}, found {value!r:.80}")
        return value

    def take_optional_count(self, name: str) -> int | None:
        if name in self.fields and self.fields[name] is None:
            del self.fields[name]
            return None
        return self.take_count(name)

    def take_counts(self, name: str) -> tuple[int, ...]:
        """A list of non-negative integers."""
        values = self.take_field(name, list)
        return tuple(StrictRecord({name: value}, self.where).take_count(name) for value in values)

    def check_all_taken(self) -> None:
        if self.fields:
            raise CheckpointError(f"{self.where}: unknown field {sorted(self.fields)[0]!r}")
