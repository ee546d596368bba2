"""Strict parsing of checkpoint files: JSON records and safetensors headers. No torch.

A `StrictRecord` expects every field, with its type; a missing or unknown one is a CheckpointError that names it. A
*sealed* record ends with the crc32 of all bytes before. A safetensors file is 8 bytes of length, a JSON header, and the
tensors without gaps to the end of the file; any other header is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from math import prod
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from data.storage import crc32, parse_error_text
from megatron.errors import CheckpointError, ConfigError

T = TypeVar("T")

CHECKSUM_FIELD = b',"crc32":"'
MAX_COUNT = 10**15  # upper bound of steps, samples, elements and bytes


@contextmanager
def reraise_as_corrupt(where: str) -> Iterator[None]:
    """Turn errors of a block that uses values from a checkpoint into CheckpointErrors. The block must not communicate.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{where}: cannot be used ({type(error).__name__}: {error!s:.200})") from error


@contextmanager
def explain_read_errors(where: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror or error})") from error


def parse_json(data: bytes | str, where: str) -> object:
    """Parse a JSON value. Anything else, such as a pickle, is never executed."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON ({parse_error_text(error)})") from error
    return value


def read_bytes(path: Path, where: str) -> bytes:
    with explain_read_errors(where):
        return path.read_bytes()


def seal_record(fields: Mapping[str, Any]) -> bytes:
    """The record as JSON with its checksum."""
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return text + checksum_ending(text)


def unseal_record(data: bytes, where: str) -> object:
    """The record in `data`, after checking its checksum."""
    text = memoryview(data)[:max(data.rfind(CHECKSUM_FIELD), 0)]
    if data[len(text):] != checksum_ending(text):
        raise CheckpointError(f"{where}: damaged: its {len(data)} bytes do not match its own checksum")
    try:
        return parse_json(str(text, "utf-8") + "}", where)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from error


def checksum_ending(text: bytes | memoryview) -> bytes:
    """The bytes that end a sealed record, for the preceding bytes `text`."""
    return CHECKSUM_FIELD + b'%08x"}\n' % crc32(text)


class StrictRecord:
    """Reads one JSON object strictly: take each field once with its type, then `check_all_taken()`."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(value).__name__}")
        self.fields = dict(value)
        self.where = where

    def take_field(self, name: str, kind: type[T]) -> T:
        if name not in self.fields:
            raise CheckpointError(f"{self.where}: field {name!r} is missing")
        value = self.fields.pop(name)
        # bool is a subclass of int
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: field {name!r} must be {kind.__name__}, found {value!r:.80}")
        return value

    def take_count(self, name: str, most: int = MAX_COUNT) -> int:
        """A non-negative integer."""
        value = self.take_field(name, int)
        if value < 0:
            raise CheckpointError(f"{self.where}: field {name!r} must not be negative, found {value}")
        if value >= most:
            raise CheckpointError(f"{self.where}: field {name!r} must be below {most}, found {value!r:.40}")
        return value

    def take_number(self, name: str, above: float = float("-inf")) -> float:
        """A finite number."""
        value = self.fields.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise CheckpointError(f"{self.where}: field {name!r} must be a finite number"
                                  f"{'' if above == float('-inf') else f' above {above:g}'}, found {value!r:.80}")
        return value

    def take_counts(self, name: str) -> tuple[int, ...]:
        """A list of non-negative integers."""
        values = self.take_field(name, list)
        return tuple(StrictRecord({name: value}, self.where).take_count(name) for value in values)

    def take_all(self, kind: Callable[..., T]) -> T:
        """A dataclass of all fields, each taken by its annotation. A field with a default may be missing; an unknown
        one is refused, since it would be ignored."""
        values: dict[str, Any] = {}
        for item in fields(cast(Any, kind)):
            if item.name not in self.fields and item.default is not MISSING:
                continue
            if item.type == "str":
                values[item.name] = self.take_field(item.name, str)
            elif item.type == "tuple[int, ...]":
                values[item.name] = self.take_counts(item.name)
            elif str(item.type).endswith("| None") and self.fields.get(item.name, 0) is None:
                values[item.name] = self.fields.pop(item.name)
            else:
                values[item.name] = (self.take_count if "int" in str(item.type) else self.take_number)(item.name)
        self.check_all_taken()
        return kind(**values)

    def check_all_taken(self) -> None:
        if self.fields:
            raise CheckpointError(f"{self.where}: unknown field {sorted(self.fields)[0]!r}")


DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
"""Bits per element of each supported dtype."""
METADATA_KEY = "__metadata__"


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = {}) -> bytes:
    """The header of a safetensors file with these tensors (key -> dtype, shape), in this order."""
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * DTYPE_BITS[dtype] // 8
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def read_header(file: IO[bytes], where: str) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """(tensors, metadata) from the checked header of a safetensors file opened at its beginning."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{where}: header of {length} bytes in a file of {size}")
    record = StrictRecord(parse_json(file.read(length), where), where)
    metadata = record.take_field(METADATA_KEY, dict) if METADATA_KEY in record.fields else {}
    locations: dict[str, TensorLocation] = {}
    for key in list(record.fields):
        entry = StrictRecord(record.take_field(key, dict), f"{where}: {key!r:.80}")
        dtype, shape = entry.take_field("dtype", str), entry.take_counts("shape")
        offsets = entry.take_counts("data_offsets")
        entry.check_all_taken()
        nbytes = prod(shape) * DTYPE_BITS.get(dtype, 0) // 8
        if dtype not in DTYPE_BITS or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            raise CheckpointError(f"{entry.where}: {dtype:.20} {str(list(shape)):.80} does not fit "
                                  f"{str(list(offsets)):.80}")
        locations[key] = TensorLocation(dtype, shape, 8 + length + offsets[0])
    end = 8 + length
    for key, place in sorted(locations.items(), key=lambda entry: (entry[1].start, entry[1].nbytes)):
        if place.start != end:
            what = "overlaps" if place.start < end else "leaves a gap after"
            raise CheckpointError(f"{where}: {key!r:.80} at byte {place.start} {what} what ends at {end}")
        end += place.nbytes
    if end != size:
        raise CheckpointError(f"{where}: its tensors end at byte {end}, the file has {size}")
    return locations, metadata
