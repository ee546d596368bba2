"""Loose JSON: one object per line, one text per object. Strict, with the position of every fault.

Chunks consist of whole lines. Blank lines are not documents, and a byte order mark at the start of a file is ignored.
Malformed lines are those that `parse_text` refuses, and lines too long to hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from io import BufferedReader, BytesIO
from stat import S_ISREG
from typing import NoReturn

from data.compressed import (is_compressed, open_decompressed, read_errors_for, read_until_damage,
                             readline_until_damage, skip_line)
from data.plain_text import (BOM, CHUNK_BYTES, CONVERT_UTF16_HINT, MAX_DOCUMENT_BYTES, UTF16_BOMS, Chunk, DamagedRest,
                             MalformedDocument, count_lines, too_long_document)
from data.storage import parse_error_text

SKIP_BYTES = 1 << 20
MULTILINE_JSON_HINT = "python -m data.webtext read --format json FILE --output DIR makes lines of an object or an array"


def read_line_chunks(path: str | os.PathLike[str], size: int = CHUNK_BYTES, *,
                     limit: int = MAX_DOCUMENT_BYTES) -> Iterator[Chunk]:
    """The lines of a file, in chunks of about `size` bytes; the rest of a line that exceeds `limit` then is skipped."""
    name, offset = os.fspath(path), 0
    with read_errors_for(name), open_decompressed(name) as file:
        status = os.stat(name)
        if is_compressed(name) or not S_ISREG(status.st_mode):
            yield from _read_streamed(name, file, size, limit)
        else:
            while offset < status.st_size:
                end = file.seek(min(offset + size, status.st_size))
                rest_size = skip_line(file, SKIP_BYTES)
                yield (Chunk(name, offset, end - offset, skipped_bytes=rest_size) if rest_size > limit else
                       Chunk(name, offset, end - offset + rest_size))
                offset = end + rest_size


def _read_streamed(name: str, file: BufferedReader, size: int, limit: int) -> Iterator[Chunk]:
    """Chunks of a file that can only be read from its start."""
    offset, damage = 0, None
    while damage is None:
        data, damage = read_until_damage(file, size)
        skipped = 0
        if data and damage is None:
            rest, damage = readline_until_damage(file, limit + 1)
            if len(rest) <= limit:
                data += rest
            else:
                skipped = len(rest)
                while rest and not rest.endswith(b"\n"):
                    rest, damage = readline_until_damage(file, SKIP_BYTES)
                    skipped += len(rest)
        if not data and damage is None:
            break
        at = offset + len(data) + skipped
        fault = DamagedRest(name, count_lines(data), at, str(damage)) if damage else None
        yield Chunk(name, offset, len(data), data, skipped_bytes=skipped, damage=fault)
        offset = at


def parse_lines(chunk: Chunk, data: bytes, key: str,
                limit: int = MAX_DOCUMENT_BYTES) -> Iterator[tuple[bytes, str | MalformedDocument]]:
    """(line without its end, text or reason of failure) for each line of a chunk that is not blank."""
    offset, number = chunk.offset, -1
    whole_lines_end = data.rfind(b"\n") + 1 if chunk.skipped_bytes else len(data)
    beginning = data[whole_lines_end:]
    data = data[:whole_lines_end]
    if offset == 0 and data.startswith(BOM):
        data, offset = data.removeprefix(BOM), len(BOM)
    for number, whole in enumerate(BytesIO(data)):
        if len(whole) > limit:
            yield whole, too_long_document(chunk.path, number, offset, limit)
        elif not whole.isspace():
            line = whole.removesuffix(b"\n")
            try:
                yield line, parse_text(line, key)
            except (ValueError, RecursionError) as error:
                reason = (f"not JSON we can read: {parse_error_text(error)}" if isinstance(error, RecursionError)
                          else str(error))
                if offset == 0 and whole.startswith(UTF16_BOMS):
                    reason = f"not UTF-8 but UTF-16, by its first bytes; {CONVERT_UTF16_HINT}"
                if whole.endswith(b"\n") or not chunk.damage:  # otherwise cut by the damage
                    yield line, MalformedDocument(chunk.path, number, offset, reason)
        offset += len(whole)
    if chunk.skipped_bytes:
        yield beginning, too_long_document(chunk.path, number + 1, offset, limit)
    if chunk.damage:
        yield b"", chunk.damage


def parse_text(line: bytes, key: str) -> str:
    """The text under `key` of one JSON object; ValueError says what is wrong. Refused: bytes that are not UTF-8,
    invalid JSON (including NaN and Infinity), anything but an object, a duplicate key, a missing key, a value that is
    not text, and lone surrogates, which no tokenizer preserves."""
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from error
    try:
        value = _load_json(decoded)
    except json.JSONDecodeError as error:
        hint = ""
        if error.pos >= len(decoded.rstrip()) and decoded.lstrip()[:1] in ("{", "["):
            hint = f" (is it JSON over several lines? {MULTILINE_JSON_HINT})"
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{hint}") from error
    if not isinstance(value, dict):
        hint = f" ({MULTILINE_JSON_HINT})" if isinstance(value, list) else ""
        raise ValueError(f"expected a JSON object, found {json_type_name(value)}{hint}")
    if key not in value:
        raise ValueError(f"no key {key!r}; found {', '.join(map(repr, value)) or 'no keys'} (see --json-key)")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"key {key!r}: expected text, found {json_type_name(text)}")
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key!r}: lone surrogate U+{ord(text[error.start]):04X} "
                         f"at character {error.start + 1}") from error
    return text


def _load_json(line: str) -> object:
    """As DECODER.decode, without its search for surrounding white space, which is rare."""
    try:
        value, end = DECODER.scan_once(line, 0)  # type: ignore[attr-defined]
        if end == len(line):
            return value
    except StopIteration:
        pass
    return DECODER.decode(line)


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"key {first_duplicate_key(pairs)!r} appears twice")
    return value


def first_duplicate_key(pairs: Sequence[tuple[str, object]]) -> str:
    """The first key of an object that appears more than once; there must be one."""
    names = [name for name, _ in pairs]
    return next(name for name in names if names.count(name) > 1)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
"""Shared: `json.loads` with hooks would create a decoder per line."""


def json_type_name(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
