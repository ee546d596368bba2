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

from data.webtext.document import Fault
from data.webtext.legacy import UNKNOWN, decode_as
from data.webtext.prescan import declared, known, marked, named

NO_CHARSET, NOT_TEXT, REFUSED = "no character set", "not text", "refused character set"

UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
SNIFFED = 1445
"""Bytes in which one that is in no text says that the whole is none, as browsers look at what has no type."""
_BINARY = re.compile(b"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_RUNS = re.compile(b"[\x80-\xff]+")
_BEYOND_ASCII = re.compile("[^\0-\x7f\ufffd]")
WESTERN = 2
"""Bytes outside ASCII that follow each other, on average and at most, in languages that windows-1252 is for."""


def label(text: str) -> str:
    """The name of the encoding that a label means on the web; ValueError where it means none."""
    encoding = named(text)
    if encoding is None or encoding.name == "replacement":
        raise ValueError(text)
    return str(encoding.name)


def decode_page(page: bytes, charset: str | None, mend: bool) -> tuple[str, tuple[str, ...]]:
    """The text, and what was repaired. `charset`: of the server; `mend`: guess where there is nothing to go by."""
    if page.startswith(UTF32):
        raise Fault(REFUSED, "begins like UTF-32, which no browser reads; convert it to UTF-8 (iconv)")
    mark = marked(page)
    encoding = mark[0] if mark else known(charset) if charset else declared(page)
    if encoding is None:
        return _guessed(page, mend)
    if encoding.name == "replacement":
        raise Fault(REFUSED, "its character set is one that no browser reads (HZ, ISO-2022-CN or ISO-2022-KR); convert "
                    "it to UTF-8 (iconv), or say what it is in truth (--charset)")
    text, malformed = decode_as(page[mark[1]:] if mark else page, encoding)
    return text, (_not(encoding),) if malformed else ()


def _not(encoding: Encoding) -> str:
    return "not UTF-8" if encoding.name == "utf-8" else f"not {encoding.name}"


def _guessed(page: bytes, mend: bool) -> tuple[str, tuple[str, ...]]:
    """A page that says nothing: UTF-8 if most of it is, else windows-1252 if that is likely."""
    utf8 = known("utf-8")
    text, malformed = decode_as(page, utf8)
    if not malformed:
        return text, ()
    if binary := _BINARY.search(page[:SNIFFED]):
        raise Fault(NOT_TEXT, f"expected a page, found byte 0x{binary[0][0]:02x} at {binary.start()}: not text")
    if text.count(UNKNOWN) <= len(_BEYOND_ASCII.findall(text)):  # damaged, or cut off in a character
        return text, (_not(utf8),)
    runs = _RUNS.findall(page)
    if not mend and sum(map(len, runs)) > WESTERN * len(runs):
        raise Fault(NO_CHARSET, "names no character set, is not UTF-8, and does not look like windows-1252; say what "
                    "it is (--charset), or leave it out (--on-error skip)")
    return decode_as(page, known("windows-1252"))[0], (NO_CHARSET,)
