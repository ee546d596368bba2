"""JSON records read strictly: every field is expected, typed and used, or the error names it and its file.

A *sealed* record is one whose last field is the crc32 of every byte before it. With a key it is signed as well, before
that, and parts list a sha256 of each file beside its crc32: manifest -> parts -> files, without the key nothing can be
changed or exchanged. A reader without a key reads signed checkpoints like any others.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from data.storage import crc32, told
from megatron.errors import CheckpointError, ConfigError

T = TypeVar("T")

CHECKSUM = b',"crc32":"'
LONGEST = 256 << 20
"""Bytes of a file of JSON: the longest that was ever written, a manifest of format 2 of many ranks, has half of it. A
longer one, sparse or not, is not read into memory."""


SHORTEST_KEY = 16
"""Bytes of a key: fewer could be guessed."""
LONGEST_KEY = 1 << 16
FLAG = "--checkpoint-key"

_SIGNED = re.compile(rb',"hmac":"([0-9a-f]{64})"\Z')
MOST = 10**15
"""Steps, samples, elements, bytes: no count is as large."""


@contextmanager
def sense_of(where: str) -> Iterator[None]:
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
        raise CheckpointError(f"{where}: not JSON ({told(error)})") from error
    return value


def read_bytes(path: Path, where: str) -> bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(LONGEST + 1) if size <= LONGEST else b""
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error
    if max(size, len(data)) > LONGEST:
        raise CheckpointError(f"{where}: has {max(size, len(data))} bytes, and no file of its kind more than {LONGEST}")
    return data


@dataclass(frozen=True)
class Key:
    """The secret of those who may write checkpoints."""

    secret: bytes = field(repr=False)

    def sign(self, text: bytes | memoryview) -> bytes:
        """What follows `text` in a signed record."""
        return b',"hmac":"%s"' % self._sum(text)

    def check(self, text: memoryview, where: str) -> None:
        """`text` is a record up to its checksum: it must end with its signature."""
        signed = _SIGNED.search(bytes(text[-80:]))
        if signed is None:
            raise CheckpointError(f"{where}: is not signed, and {FLAG} takes only what is; leave the flag out if you "
                                  "trust it")
        if not hmac.compare_digest(signed[1], self._sum(text[:-len(signed[0])])):
            raise CheckpointError(f"{where}: its signature is not of the key of {FLAG}: it is of somebody else, or was "
                                  "changed")

    @property
    def mark(self) -> str:
        """What two keys differ in, and what says nothing about either."""
        return self._sum(b"the mark of a key")[:16].decode()

    def _sum(self, text: bytes | memoryview) -> bytes:
        return hmac.new(self.secret, text, sha256).hexdigest().encode()


def read_key(path: str | Path | None, flag: str = FLAG) -> Key | None:
    """The key in a file, whose line ends do not count; None without a file."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            secret = file.read(LONGEST_KEY + 1).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror})") from error
    if not SHORTEST_KEY <= len(secret) <= LONGEST_KEY:
        raise ConfigError(f"{flag} {path}: a key has {SHORTEST_KEY} to {LONGEST_KEY} bytes, this file has "
                          f"{len(secret)}; make one with `openssl rand -hex 32`")
    return Key(secret)


def seal(fields: Mapping[str, Any], key: Key | None = None) -> bytes:
    """The record as JSON, sealed, and signed where there is a key."""
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    if key is not None:
        text += key.sign(text)
    return readable(text + ending(text))


def readable(data: bytes) -> bytes:
    """`data`, which a reader will take: what is too long for that is refused when it is saved."""
    if len(data) > LONGEST:
        raise CheckpointError(f"a state of {len(data)} bytes of JSON is not saved, as no more than {LONGEST} would be "
                              "read; hold large values in tensors")
    return data


def unseal(data: bytes, where: str, key: Key | None = None) -> object:
    """The record in `data`, without its seal, which must be good, and the signature, which counts if there is a key."""
    text = memoryview(data)[:max(data.rfind(CHECKSUM), 0)]
    if data[len(text):] != ending(text):
        raise CheckpointError(f"{where}: damaged: its {len(data)} bytes do not match its own checksum")
    if key is not None:
        key.check(text, where)
    try:
        record = parse_json(str(text, "utf-8") + "}", where)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from error
    if isinstance(record, dict):
        record.pop("hmac", None)
    return record


def says_signed(data: bytes) -> bool:
    """A sealed record has a signature, whether it is good or not."""
    return _SIGNED.search(data[:max(data.rfind(CHECKSUM), 0)][-80:]) is not None


def ending(text: bytes | memoryview) -> bytes:
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

    def count(self, name: str, most: int = MOST) -> int:
        """A non-negative integer."""
        value = self.take(name, int)
        if value < 0:
            raise CheckpointError(f"{self.where}: field {name!r} must not be negative, found {value}")
        if value >= most:
            raise CheckpointError(f"{self.where}: field {name!r} is {value:.3e}, which nothing here can be"
                                  if value < 1e300 else f"{self.where}: field {name!r} is beyond all bounds")
        return value

    def number(self, name: str, above: float = float("-inf")) -> float:
        """A finite number."""
        value = self.fields.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise CheckpointError(f"{self.where}: field {name!r} must be a finite number"
                                  f"{'' if above == float('-inf') else f' above {above:g}'}, found {value!r:.80}")
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
