"""The elements of a JSON array in a stream, as bytes, one at a time: no element is parsed, none but one is held."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BufferedReader, BytesIO

from data.webtext.document import DocumentError

ARRAY_READ_BYTES = 1 << 18
_OUTSIDE_STRING = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'["\\]')
_JSON_SPACE = b" \t\r\n"
_UTF8_BOM = b"\xef\xbb\xbf"


def array_elements(file: BufferedReader | BytesIO, limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """(offset, size, bytes) of each element; no bytes where there are more than `limit`.

    Looks at brackets, commas and quotes only; whether an element is JSON is for its reader to say. A `Fault` where the
    array does not open or close, or where something follows it.
    """
    parts = _array_parts(file, limit)
    _, size, before, opening = next(parts)
    if opening != b"[" or before is None or before.removeprefix(_UTF8_BOM).strip(_JSON_SPACE):
        raise DocumentError("not JSON", "not JSON: expected an array")
    found = False
    for offset, size, part, mark in parts:
        if mark == b"":
            raise DocumentError("not JSON", "not JSON: the array is not closed")
        content = None if part is None else part.strip(_JSON_SPACE)
        if content != b"" or mark == b"," or found:  # `[]` has no element, `[1,]` has a bad one
            found = True
            yield offset, size, None if content is None or len(content) > limit else content
        if mark == b"]":
            break
    _, size, after, mark = next(parts)
    if mark or after is None or after.strip(_JSON_SPACE):
        raise DocumentError("not JSON", "not JSON: something follows the array")


def _array_parts(file: BufferedReader | BytesIO, limit: int) -> Iterator[tuple[int, int, bytes | None, bytes]]:
    """(offset, size with mark, bytes before the mark, mark) for each `[`, `,`, `]` of the outermost level, then b""."""
    offset, held, forgotten = 0, bytearray(), 0  # of the current part: where it begins, what is held of it, what is not
    at, depth, inside = 0, 0, False
    while True:
        found = (_INSIDE_STRING if inside else _OUTSIDE_STRING).search(held, at)
        if found is None:
            at = max(at, len(held))
            if len(held) > limit:
                forgotten, at = forgotten + len(held), at - len(held)
                held.clear()
            if more := file.read1(ARRAY_READ_BYTES):  # `read` forgets what comes before damage
                held += more
                continue
            yield offset, forgotten + len(held), None if forgotten else bytes(held), b""
            return
        mark, at = found[0], found.end()
        if inside:
            inside = mark != b'"'
            at += inside  # what follows a backslash ends nothing
            continue
        inside = mark == b'"'
        before, depth = depth, depth + (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
        if (before, depth, mark) in ((0, 1, b"["), (1, 1, b","), (1, 0, b"]")):
            yield offset, forgotten + at, None if forgotten else bytes(held[:found.start()]), mark
            offset, forgotten = offset + forgotten + at, 0
            del held[:at]
            at = 0
