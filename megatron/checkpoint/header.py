"""The header of a safetensors file: what is in it, and where. No torch.

8 bytes of little-endian length, a JSON object (dtype, shape and byte range of each key), then the tensors, one after
the other, without a gap and to the end of the file. A header that says anything else is refused before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any

from megatron.checkpoint.strict import StrictRecord, parse_json
from megatron.errors import CheckpointError

DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
"""Of one element of each type that a checkpoint holds."""
METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100 << 20
"""Bytes of a header, as in other readers of such files."""


@dataclass(frozen=True)
class TensorLocation:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class SafetensorsHeader:
    tensors: Mapping[str, TensorLocation]
    metadata: Mapping[str, str]


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] = {}) -> bytes:
    """The beginning of a file that holds these tensors, dtype and shape by key, in this order."""
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * DTYPE_BITS[dtype] // 8
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def read_header(file: IO[bytes], where: str) -> SafetensorsHeader:
    """Of a file at its beginning."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{where}: header of {length} bytes in a file of {size}")
    record = StrictRecord(parse_json(file.read(length), where), where)
    metadata = record.take_field(METADATA_KEY, dict) if METADATA_KEY in record.fields else {}
    begin = 8 + length
    locations = {key: _tensor_location(record, key, begin) for key in list(record.fields)}
    end, before = begin, "the header"
    for key, place in sorted(locations.items(), key=lambda entry: (entry[1].start, entry[1].nbytes)):
        if place.start != end:
            what = "overlaps" if place.start < end else "leaves a gap after"
            raise CheckpointError(f"{where}: {key!r:.80} at byte {place.start} {what} {before}, which ends at {end}")
        end, before = place.start + place.nbytes, f"{key!r:.80}"
    if end != size:
        raise CheckpointError(f"{where}: its tensors end at byte {end}, the file has {size}")
    return SafetensorsHeader(locations, metadata)


def _tensor_location(header: StrictRecord, key: str, begin: int) -> TensorLocation:
    entry = StrictRecord(header.take_field(key, dict), f"{header.where}: {key!r:.80}")
    place = TensorLocation(entry.take_field("dtype", str), entry.take_counts("shape"), begin)
    offsets = entry.take_counts("data_offsets")
    entry.check_all_taken()
    if place.dtype not in DTYPE_BITS or len(offsets) != 2 or offsets[1] - offsets[0] != place.nbytes:
        raise CheckpointError(f"{entry.where}: {place.dtype:.20} {str(list(place.shape)):.80} does not fit "
                              f"{str(list(offsets)):.80}")
    return TensorLocation(place.dtype, place.shape, begin + offsets[0])
