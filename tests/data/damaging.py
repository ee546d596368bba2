"""What can happen to files, and what is left of one, found slowly: by a decompressor that gets byte after byte, and by
obvious readers of lines, documents and arrays."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from data.webtext.documents import Document

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


def accidents(whole: bytes, other: bytes, ending: str) -> Iterator[tuple[str, bytes]]:
    """What may become of a compressed file; `other` is a second one, for a file of several streams."""
    yield from (("empty", b""), ("only its first bytes", whole[:5]), ("cut in the middle", whole[:len(whole) // 2]),
                ("cut by one byte", whole[:-1]), ("flipped in the middle", flipped(whole, len(whole) // 2)),
                ("flipped header", flipped(whole, 2)), ("junk after it", whole + b"junk after the stream"),
                ("a byte after it", whole + b"\x01"), ("a second one cut", whole + other[:len(other) // 2]),
                ("a second one flipped", whole + flipped(other, len(other) // 2) + other),
                ("a second one without its header", whole + other[6:]), ("no such format", b'{"text": "plain"}\n' * 99))
    yield from ((f"checksum flipped, {place} bytes before its end", flipped(whole, len(whole) - place))
                for place in (1, 3, 4, 5, 8, 26))
    if ending == ".xz":
        yield from (("padding cut", whole + bytes(3)), ("a second one after such", whole + bytes(3) + other))


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


class Pairs(list[tuple[str, Any]]):
    """An object, its keys in their order."""


def sound(value: Any) -> bool:
    """No key twice, no number that JSON cannot say."""
    if isinstance(value, Pairs):
        return len({key for key, _ in value}) == len(value) and all(sound(inner) for _, inner in value)
    if isinstance(value, list):
        return all(map(sound, value))
    return not isinstance(value, float) or math.isfinite(value)


def plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def slow_document(line: bytes) -> Document | None:
    """What a line is to `data.webtext`; None: no document."""
    try:
        pairs = json.JSONDecoder(object_pairs_hook=Pairs).decode(line.decode("utf-8"))
        if not isinstance(pairs, Pairs) or not sound(pairs):
            return None
        value = plain(pairs)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    text, url = value.pop("text", None), value.pop("url", None)
    if not isinstance(text, str) or not (url is None or isinstance(url, str)):
        return None
    return Document(text, url, value)


def slow_text(line: bytes) -> str | None:
    """The text in a line for `data.preprocess`, which looks at no number but NaN and Infinity; None: it has none."""
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=distinct, parse_constant=no_constant)
        text = value["text"]
        text.encode("utf-8")
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError):
        return None
    return str(text) if isinstance(value, dict) else None


def slow_lines(before: bytes, is_damaged: bool, value_of: Callable[[bytes], Any]) -> list[Any]:
    """What each line holds that is not blank. What damage has cut short is a part of the damage."""
    *whole, rest = before.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = [value_of(line) for line in whole if line.strip()]
    last = value_of(rest) if rest.strip() else None
    return found + ([last] if rest.strip() and not (is_damaged and last is None) else [])


def slow_texts(before: bytes, is_damaged: bool, pattern: bytes | None) -> list[str | None]:
    """The documents of a plain text file between matches of `pattern`; None: no UTF-8."""
    pieces = re.split(pattern, before) if pattern else [before]
    if is_damaged:
        pieces.pop()
    found: list[str | None] = []
    for number, piece in enumerate(pieces):
        try:
            text = (piece if number else piece.removeprefix(b"\xef\xbb\xbf")).decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            found.append(None)
            continue
        text = text.strip("\n") if pattern else text
        if text and not text.isspace():
            found.append(text)
    return found


def slow_array(content: bytes) -> list[Document | None] | None:
    """The elements of a JSON array; None: it is none."""
    try:
        whole = json.loads(content.decode("utf-8-sig"), object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return None
    return [slow_document(json.dumps(plain(value)).encode()) if sound(value) else None for value in whole] \
        if isinstance(whole, list) and not isinstance(whole, Pairs) else None
