"""The text of an HTML file, whatever its character set, as a browser would read it.

In this order: a byte order mark; what the server said (`--charset`); what the page says in its first bytes or its head
(`prescan.py`); UTF-8, if it is that; else windows-1252. What does not fit the character set becomes U+FFFD, as it does
on the screen, and is counted: a bad byte loses no page. Faults are: a page that names no character set and looks like
none (words that are all outside ASCII are not in windows-1252, though a browser would show them so), one that is not
text at all, and one in a character set that no browser reads.
"""

from __future__ import annotations

import re

from webencodings import Encoding

from data.webtext.document import DocumentError
from data.webtext.legacy import REPLACEMENT, decode_as
from data.webtext.prescan import declared_encoding, encoding_of_bom, encoding_of_label, known_encoding

NO_CHARSET, NOT_TEXT, REFUSED_CHARSET = "no character set", "not text", "refused character set"

UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
SNIFFED_BYTES = 1445
"""Bytes in which one that is in no text says that the whole is none, as browsers look at what has no type."""
_BINARY = re.compile(b"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_RUNS = re.compile(b"[\x80-\xff]+")
_BEYOND_ASCII = re.compile("[^\0-\x7f\ufffd]")
MAX_WESTERN_RUN = 2
"""Bytes outside ASCII that follow each other, on average and at most, in languages that windows-1252 is for."""


def encoding_name(text: str) -> str:
    """The name of the encoding that a label means on the web; ValueError where it means none."""
    encoding = encoding_of_label(text)
    if encoding is None or encoding.name == "replacement":
        raise ValueError(text)
    return str(encoding.name)


def decode_page(page: bytes, charset: str | None, repair: bool) -> tuple[str, tuple[str, ...]]:
    """The text, and what was repaired. `charset`: of the server; `mend`: guess where there is nothing to go by."""
    if page.startswith(UTF32):
        raise DocumentError(REFUSED_CHARSET, "begins like UTF-32, which no browser reads; convert it to UTF-8 (iconv)")
    bom = encoding_of_bom(page)
    encoding = bom[0] if bom else known_encoding(charset) if charset else declared_encoding(page)
    if encoding is None:
        return _decode_undeclared(page, repair)
    if encoding.name == "replacement":
        raise DocumentError(
            REFUSED_CHARSET, "its character set is one that no browser reads (HZ, ISO-2022-CN or ISO-2022-KR); convert "
            "it to UTF-8 (iconv), or say what it is in truth (--charset)")
    text, malformed = decode_as(page[bom[1]:] if bom else page, encoding)
    return text, (_not_in_encoding(encoding),) if malformed else ()


def _not_in_encoding(encoding: Encoding) -> str:
    return "not UTF-8" if encoding.name == "utf-8" else f"not {encoding.name}"


def _decode_undeclared(page: bytes, repair: bool) -> tuple[str, tuple[str, ...]]:
    """A page that says nothing: UTF-8 if most of it is, else windows-1252 if that is likely."""
    utf8 = known_encoding("utf-8")
    text, malformed = decode_as(page, utf8)
    if not malformed:
        return text, ()
    if binary := _BINARY.search(page[:SNIFFED_BYTES]):
        raise DocumentError(NOT_TEXT, f"expected a page, found byte 0x{binary[0][0]:02x} at {binary.start()}: not text")
    if text.count(REPLACEMENT) <= len(_BEYOND_ASCII.findall(text)):  # damaged, or cut off in a character
        return text, (_not_in_encoding(utf8),)
    runs = _RUNS.findall(page)
    if not repair and sum(map(len, runs)) > MAX_WESTERN_RUN * len(runs):
        raise DocumentError(
            NO_CHARSET, "names no character set, is not UTF-8, and does not look like windows-1252; say what "
            "it is (--charset), or leave it out (--on-error skip)")
    return decode_as(page, known_encoding("windows-1252"))[0], (NO_CHARSET,)
