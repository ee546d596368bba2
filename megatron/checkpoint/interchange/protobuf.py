"""Protocol buffers read without a schema: field number -> values. What is needed of a SentencePiece model, no more."""

from __future__ import annotations

import struct
from typing import Any

from data.storage import DataError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields_of(data: bytes) -> dict[int, list[Any]]:
    """Integers, floats (32 bits) and bytes (strings and messages alike), in the order of the file."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: Any
        if key & 7 == VARINT:
            value, at = _varint(data, at)
        elif key & 7 == BYTES:
            length, at = _varint(data, at)
            value, at = data[at:at + length], at + length
        elif key & 7 == FIXED32:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        elif key & 7 == FIXED64:
            value, at = data[at:at + 8], at + 8
        else:
            raise DataError(f"not a protocol buffer: wire type {key & 7} at byte {at}")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise DataError("not a protocol buffer: it ends within a number")
