"""Compressed files and what can happen to them; and what is left of one, found slowly."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

zstd = pytest.importorskip("backports.zstd")

CHECKSUM = {zstd.CompressionParameter.checksum_flag: 1}  # as the command `zstd` writes it; the library does not unasked
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0), ".xz": lzma.compress,
    ".zst": lambda data: bytes(zstd.compress(data, options=CHECKSUM))}
BEGIN: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31), ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".zst": zstd.ZstdDecompressor}
PADDING = {".gz": 1, ".xz": 4, ".zst": 0}
"""Zeros after a stream come in multiples of this."""


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1:]


def accidents(whole: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """What may become of a compressed file; `other` is a second one, for a file of several streams."""
    yield from (("empty", b""), ("only its first bytes", whole[:5]), ("cut in the middle", whole[:len(whole) // 2]),
                ("cut by one byte", whole[:-1]), ("flipped in the middle", flipped(whole, len(whole) // 2)),
                ("flipped header", flipped(whole, 2)), ("junk after it", whole + b"junk after the stream"),
                ("a byte after it", whole + b"\x01"), ("a second one cut", whole + other[:len(other) // 2]),
                ("a second one flipped", whole + flipped(other, len(other) // 2) + other),
                ("a second one without its header", whole + other[6:]), ("no such format", b'{"text": "plain"}\n' * 99))
    yield from ((f"checksum flipped, {place} bytes before its end", flipped(whole, len(whole) - place))
                for place in (1, 3, 4, 5, 8, 26))


def text_before_damage(content: bytes, ending: str) -> tuple[bytes, bool]:
    """All that the decompressor gives, one byte after the other; and whether it refused the rest."""
    found, at, step = bytearray(), 0, PADDING[ending]
    try:
        while True:
            stream = BEGIN[ending]()
            while not stream.eof:
                if at == len(content):
                    return bytes(found), True
                data, at = content[at:at + 1], at + 1
                while data is not None:
                    part = stream.decompress(data, 1)
                    found += part
                    left = getattr(stream, "unconsumed_tail", b"")
                    data = None if stream.eof or not (part or left) else left
            zeros = len(content) - at - len(content[at:].lstrip(b"\0")) if step else 0
            at += zeros
            if step and zeros % step:
                return bytes(found), True
            if at == len(content):
                return bytes(found), False
    except (zlib.error, lzma.LZMAError, zstd.ZstdError):
        return bytes(found), True
