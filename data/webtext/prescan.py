"""What a page says of its own character set: the byte order mark, `<meta>`, `<?xml encoding=...?>`.

As the HTML standard has it ("determining the character encoding", "prescan a byte stream"): a label means what it means
on the web (`iso-8859-1` is windows-1252, `gb2312` is GBK), and bytes in which a `<meta>` can be read at all are not
UTF-16, whatever it says. The first 1,024 bytes are searched without regard to what is a script or a title; a `<meta>`
after them is found where a browser's parser would meet it, inside the head.
"""

from __future__ import annotations

import codecs
import re

from webencodings import Encoding, lookup

PRESCAN_BYTES = 1024
"""Bytes at the start of a page."""
BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16be"), (b"\xff\xfe", "utf-16le"))
UTF16_STARTS = ((b"<\0", "utf-16le"), (b"\0<", "utf-16be"))
"""Of pages in UTF-16 that have no mark: nothing else begins like this."""
MICROSOFT_CODE_PAGES = {"cp932": "shift_jis", "cp949": "euc-kr", "cp950": "big5"}

_PLAIN = re.compile(r"[A-Za-z0-9]{1,20}(?:[_-][A-Za-z0-9]{1,20}){0,3}")
_XML = re.compile(rb"<\?xml[^>]*?encoding[\0-\x20]*=[\0-\x20]*(?:\"([^\"\0-\x20>]*)\"|'([^'\0-\x20>]*)')")
_TAG = re.compile(rb"<(?:!--|[!?]|/[^a-z]|(/?[a-z][^\t\n\f\r />]*))", re.IGNORECASE)
# A name, and a value after "=": none where the page ends within it.
_ATTRIBUTE = re.compile(rb"""[\t\n\f\r /]*+([^\t\n\f\r />][^\t\n\f\r />=]*+)(?:[\t\n\f\r ]*+=[\t\n\f\r ]*+
                             (?:"([^"]*+)"|'([^']*+)'|([^\t\n\f\r >"'][^\t\n\f\r >]*+)(?=[\t\n\f\r >])|(?=>)))?""",
                        re.VERBOSE)
_EQUALS = re.compile(rb"[\t\n\f\r ]*+=")
_TAG_END = re.compile(rb"[\t\n\f\r /]*+>")
_IN_CONTENT = re.compile(rb"""charset[\t\n\f\r ]*+=[\t\n\f\r ]*+
                              (?:"([^"]*)"|'([^']*)'|([^\t\n\f\r ;"'][^\t\n\f\r ;]*))""", re.IGNORECASE | re.VERBOSE)
_RAW_END = {name: re.compile(rb"</" + name + rb"[\t\n\f\r />]", re.IGNORECASE)
            for name in (b"script", b"style", b"title", b"noscript")}
"""Elements of a head inside which a tag is none."""


def encoding_of_bom(page: bytes) -> tuple[Encoding, int] | None:
    """The encoding that a byte order mark names, and the bytes of the mark."""
    return next(((known_encoding(name), len(mark)) for mark, name in BYTE_ORDER_MARKS if page.startswith(mark)), None)


def declared_encoding(page: bytes) -> Encoding | None:
    """What a page without a mark says in its first bytes, or else in its head; None where that is nothing we know."""
    for start, name in UTF16_STARTS:
        if page.startswith(start):
            return known_encoding(name)
    return _meta_encoding(page[:PRESCAN_BYTES], in_head=False) or _xml_encoding(page[:PRESCAN_BYTES]) or _meta_encoding(
        page, in_head=True)


def encoding_of_label(label: str) -> Encoding | None:
    """The encoding of a label of the web; or of one that Python knows as another name of such a one (`latin-1`)."""
    encoding = lookup(label)
    if encoding is None and _PLAIN.fullmatch(label):
        try:
            codec = codecs.lookup(label).name
        except LookupError:
            return None
        encoding = lookup(MICROSOFT_CODE_PAGES.get(codec, codec.replace("_", "-")))
    return encoding


def known_encoding(name: str) -> Encoding:
    """The encoding of a label that is one."""
    encoding = lookup(name)
    assert encoding is not None, name
    return encoding


def _xml_encoding(page: bytes) -> Encoding | None:
    found = _XML.match(page)
    return _encoding_of_ascii_label(found[1] or found[2] or b"") if found else None


def _meta_encoding(page: bytes, in_head: bool) -> Encoding | None:
    """The first `<meta>` that names an encoding. `in_head`: as a parser finds it, not beyond the head."""
    at = 0
    while tag := _TAG.search(page, at):
        name = (tag[1] or b"").lower()
        if in_head and name in (b"body", b"/head"):
            break
        if not name:
            end = b"-->" if tag[0] == b"<!--" else b">"
            at = page.find(end, tag.end() - 2 if tag[0] == b"<!--" else tag.start() + 2) + len(end)
            if at < len(end):
                break
            continue
        attributes, at = _parse_attributes(page, tag.end())
        if not at:
            break
        if name == b"meta" and (encoding := _encoding_of_meta(attributes)):
            return encoding
        if in_head and name in _RAW_END:
            closed = _RAW_END[name].search(page, at)
            if not closed:
                break
            at = closed.start()
    return None


def _parse_attributes(page: bytes, at: int) -> tuple[dict[bytes, bytes], int]:
    """Those of a tag, and where it ends; 0: the page ends first."""
    found: dict[bytes, bytes] = {}
    while not (end := _TAG_END.match(page, at)):
        attribute = _ATTRIBUTE.match(page, at)
        if not attribute or attribute.lastindex == 1 and _EQUALS.match(page, attribute.end()):
            return found, 0
        found.setdefault(attribute[1].lower(), attribute[2] or attribute[3] or attribute[4] or b"")
        at = attribute.end()
    return found, end.end()


def _encoding_of_meta(attributes: dict[bytes, bytes]) -> Encoding | None:
    """The encoding that the attributes of a `<meta>` name."""
    if b"charset" in attributes:
        return _encoding_of_ascii_label(attributes[b"charset"])
    if attributes.get(b"http-equiv", b"").lower() != b"content-type":
        return None
    content = _IN_CONTENT.search(attributes.get(b"content", b""))
    return _encoding_of_ascii_label(content[1] or content[2] or content[3] or b"") if content else None


def _encoding_of_ascii_label(label: bytes) -> Encoding | None:
    """The encoding of a label that was read as ASCII, where the bytes are as it says."""
    encoding = encoding_of_label(label.decode("latin-1"))
    if encoding is None:
        return None
    return known_encoding({"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}.get(
        encoding.name, encoding.name))
