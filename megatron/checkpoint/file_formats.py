"""Strict parsing of checkpoint files: JSON records and safetensors headers. No torch.

A *sealed* record ends with the crc32 of all bytes before. A safetensors file is 8 bytes of length, a JSON header, and
the tensors without gaps to the end of the file; any other header is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import UnionType
from typing import IO, Any, get_origin

from data.storage import crc32, parse_error_text
from megatron.errors import CheckpointError, ConfigError

CHECKSUM_FIELD = b',"crc32":"'
MAX_COUNT = 10**18  # upper bound of steps, samples, elements, bytes and microseconds since 1970


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


def read_bytes(path: Path, where: str) -> bytes:
    with explain_read_errors(where):
        return path.read_bytes()


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse a JSON value. Anything else, such as a pickle, is never executed."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON ({parse_error_text(error)})") from error


def checksum_ending(text: bytes | memoryview) -> bytes:
    """The bytes that end a sealed record, for the preceding bytes `text`."""
    return CHECKSUM_FIELD + b'%08x"}\n' % crc32(text)


def seal_record(fields: Mapping[str, Any]) -> bytes:
    """The record as JSON with its checksum."""
    text = json.dumps(fields, separators=(",", ":")).encode()[:-1]  # without the last brace
    return text + checksum_ending(text)


def unseal_record(data: bytes, where: str) -> dict[str, Any]:
    """The record in `data`, after checking its checksum."""
    # A view: a manifest can be large, and is copied only once, to decode it.
    text = memoryview(data)[:max(data.rfind(CHECKSUM_FIELD), 0)]
    if data[len(text):] != checksum_ending(text):
        raise CheckpointError(f"{where}: damaged: its {len(data)} bytes do not match its own checksum")
    try:
        # The brace was cut off with the checksum. A JSON text that ends with one is an object.
        record: dict[str, Any] = parse_json(str(text, "utf-8") + "}", where)
        return record
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from error


def check_record(value: Any, where: str, kinds: Mapping[str, Any], optional: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The object `value`, after checking that it has the fields of `kinds`, perhaps some of `optional`, and no others,
    each of its kind (`check_field`)."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected an object, found {type(value).__name__}")
    for name, kind in (*kinds.items(), *((name, kind) for name, kind in optional.items() if name in value)):
        if name not in value:
            raise CheckpointError(f"{where}: field {name!r} is missing")
        check_field(f"{where}: field {name!r}", value[name], kind)
    # An unknown field is refused, since it would be ignored.
    if unknown := value.keys() - kinds.keys() - optional.keys():
        raise CheckpointError(f"{where}: unknown field {min(map(str, unknown))!r}")
    return value


def check_field(field: str, value: Any, kind: Any) -> None:
    """Raise unless `value` is of a kind: a type, `type | None` or `list[type]`. `int` means a count, which is not
    negative; `float` means a finite number, `object` anything."""
    if isinstance(kind, UnionType):
        if value is None:
            return
        kind = kind.__args__[0]
    accepted = get_origin(kind) or kind
    is_accepted = isinstance(value, int | float if kind is float else accepted)
    if isinstance(value, bool):  # a subclass of int
        is_accepted = kind in (bool, object)
    if kind is float and not (is_accepted and float("-inf") < value < float("inf")):
        raise CheckpointError(f"{field} must be a finite number, found {value!r:.80}")
    if not is_accepted:
        raise CheckpointError(f"{field} must be {accepted.__name__}, found {value!r:.80}")
    if kind is int and not 0 <= value < MAX_COUNT:
        limit = "not be negative" if value < 0 else f"be below {MAX_COUNT}"
        raise CheckpointError(f"{field} must {limit}, found {value!r:.40}")
    for child in value if get_origin(kind) is list else ():
        check_field(field, child, kind.__args__[0])


# Bits per element of each supported dtype.
DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
METADATA_KEY = "__metadata__"
HEADER_ENTRY = {"dtype": str, "shape": list[int], "data_offsets": list[int]}


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file


def read_header(file: IO[bytes], where: str) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """(tensors, metadata) from the checked header of a safetensors file opened at its beginning."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{where}: header of {length} bytes in a file of {size}")
    record = parse_json(file.read(length), where)
    check_field(f"{where}: the header", record, dict)
    metadata = record.pop(METADATA_KEY, {})
    check_field(f"{where}: field {METADATA_KEY!r}", metadata, dict)
    places: list[tuple[int, int, str]] = []  # (first byte, bytes, key)
    locations: dict[str, TensorLocation] = {}
    for key, value in record.items():
        entry = check_record(value, f"{where}: {key!r:.80}", HEADER_ENTRY)
        dtype, shape, offsets = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        nbytes = prod(shape) * DTYPE_BITS.get(dtype, 0) // 8
        if dtype not in DTYPE_BITS or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            raise CheckpointError(f"{where}: {key!r:.80}: {dtype:.20} {str(list(shape)):.80} does not fit "
                                  f"{str(offsets):.80}")
        locations[key] = TensorLocation(dtype, shape, 8 + length + offsets[0])
        places.append((locations[key].start, nbytes, key))
    end = 8 + length
    # Empty tensors come first where they share their offset with another one.
    for start, nbytes, key in sorted(places):
        if start != end:
            what = "overlaps" if start < end else "leaves a gap after"
            raise CheckpointError(f"{where}: {key!r:.80} at byte {start} {what} what ends at {end}")
        end += nbytes
    if end != size:
        raise CheckpointError(f"{where}: its tensors end at byte {end}, the file has {size}")
    return locations, metadata
