"""The HTML standard's "prescan a byte stream to determine its encoding", step by step: the slow, obvious reference."""

from __future__ import annotations

from webencodings import lookup

SPACES = b"\t\n\f\r "


class EndOfPage(Exception):
    """The steps ask for a byte beyond the last."""


def byte(page: bytes, at: int) -> int:
    if at >= len(page):
        raise EndOfPage
    return page[at]


def prescan(page: bytes) -> str | None:
    """The name of the encoding, without its XML declaration."""
    try:
        return _loop(page)
    except EndOfPage:
        return None


def _loop(page: bytes) -> str | None:
    at = 0
    while at < len(page):
        rest = page[at:at + 6].lower()
        if rest.startswith(b"<!--"):
            end = page.find(b"-->", at + 2)
            if end < 0:
                raise EndOfPage
            at = end + 2
        elif rest[:5] == b"<meta" and rest[5:] and rest[5:] in b"\t\n\f\r /":
            found, at = _meta(page, at + 5)
            if found:
                return found
        elif rest[:1] == b"<" and (rest[1:2].isalpha() or rest[1:2] == b"/" and rest[2:3].isalpha()):
            while byte(page, at) not in b"\t\n\f\r />"[:5] + b">":
                at += 1
            name: bytes | None = b""
            while name is not None:
                name, _, at = _attribute(page, at)
        elif rest[:2] in (b"<!", b"</", b"<?"):
            while byte(page, at) != ord(">"):
                at += 1
        at += 1
    return None


def _meta(page: bytes, at: int) -> tuple[str | None, int]:
    seen: set[bytes] = set()
    got_pragma, need_pragma, charset, failed = False, None, None, False
    while True:
        name, value, at = _attribute(page, at)
        if name is None:
            break
        if name in seen:
            continue
        seen.add(name)
        if name == b"http-equiv" and value == b"content-type":
            got_pragma = True
        elif name == b"content":
            label = _from_content(value)
            encoding = lookup(label.decode("latin-1")) if label is not None else None
            if encoding and charset is None and not failed:
                charset, need_pragma = encoding.name, True
        elif name == b"charset":
            encoding = lookup(value.decode("latin-1"))
            charset, failed, need_pragma = encoding.name if encoding else None, encoding is None, False
    if need_pragma is None or need_pragma and not got_pragma or charset is None:
        return None, at
    return {"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}.get(charset, charset), at


def _from_content(value: bytes) -> bytes | None:
    at = 0
    while True:
        at = value.find(b"charset", at)
        if at < 0:
            return None
        at += len(b"charset")
        while value[at:at + 1] and value[at] in SPACES:
            at += 1
        if value[at:at + 1] == b"=":
            break
    at += 1
    while value[at:at + 1] and value[at] in SPACES:
        at += 1
    quote = value[at:at + 1]
    if quote in (b'"', b"'"):
        end = value.find(quote, at + 1)
        return None if end < 0 else value[at + 1:end]
    end = at
    while end < len(value) and value[end] not in SPACES + b";":
        end += 1
    return value[at:end] if end > at else None


def _attribute(page: bytes, at: int) -> tuple[bytes | None, bytes, int]:
    """Name (None: there is no more), value, position."""
    while byte(page, at) in SPACES + b"/":
        at += 1
    if byte(page, at) == ord(">"):
        return None, b"", at
    name, value = b"", b""
    while True:
        here = byte(page, at)
        if here == ord("=") and name:
            at += 1
            break
        if here in SPACES:
            while byte(page, at) in SPACES:
                at += 1
            if byte(page, at) != ord("="):
                return name, value, at
            at += 1
            break
        if here in b"/>":
            return name, value, at
        name += bytes([here]).lower()
        at += 1
    while byte(page, at) in SPACES:
        at += 1
    here = byte(page, at)
    if here in b"\"'":
        end = page.find(bytes([here]), at + 1)
        if end < 0:
            raise EndOfPage
        return name, page[at + 1:end].lower(), end + 1
    while byte(page, at) not in SPACES + b">":
        value += page[at:at + 1].lower()
        at += 1
    return name, value, at
