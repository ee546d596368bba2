"""Decode HTML of any character set as browsers do (HTML and Encoding Standards).

In order: byte order mark; `--charset`; `<meta>` or `<?xml encoding>` in the first 1,024 bytes or the head; UTF-8 if
valid; else windows-1252. Malformed bytes become U+FFFD and are counted. Python's decoders are extended by what the
Encoding Standard has beyond them. A `DocumentError` is raised for pages that are not text, use a charset that no
browser reads, or name none and look like none.
"""

from __future__ import annotations

import codecs
import re
from functools import cache

from webencodings import Encoding, lookup

from data.webtext.documents import DocumentError

REPLACEMENT = "\ufffd"
UNICODE_ENCODINGS = ("utf-8", "utf-16le", "utf-16be")
PYTHON_CODECS = {"gbk": "gb18030", "gb18030": "gb18030", "big5": "big5hkscs", "shift_jis": "cp932", "euc-kr": "cp949",
                 "euc-jp": "euc_jp", "iso-2022-jp": "iso2022_jp_ext"}
"""Multi-byte encodings -> Python codecs. (GBK pages are read as GB 18030.)"""
EXTRA_LETTERS = {"koi8-u": {0xAE: "\u045e", 0xBE: "\u040e"}, "windows-1255": {0xCA: "\u05ba"}}
_TO_FULL_WIDTH = str.maketrans("\u301c\u2016\u2212\xa2\xa3\xac", "\uff5e\u2225\uff0d\uffe0\uffe1\uffe2")
_TO_REPLACEMENT = str.maketrans(dict.fromkeys("\uf8f0\uf8f1\uf8f2\uf8f3", ord(REPLACEMENT)))
TRANSLATED = {"gb18030": str.maketrans("\ue7c7\ue5e5", "\u1e3f\u3000"), "cp932": _TO_REPLACEMENT,
              "euc_jp": _TO_FULL_WIDTH, "iso2022_jp_ext": _TO_FULL_WIDTH}
"""Codec -> characters that the standard maps differently."""
ERROR_HANDLER = "megatron.webtext"

NO_CHARSET, NOT_TEXT, REFUSED_CHARSET = "no character set", "not text", "refused character set"

UTF32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
SNIFFED_BYTES = 1445
"""Bytes searched for binary data, as in browsers' MIME sniffing."""
_BINARY = re.compile(b"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_RUNS = re.compile(b"[\x80-\xff]+")
_BEYOND_ASCII = re.compile("[^\0-\x7f\ufffd]")
MAX_WESTERN_RUN = 2
"""Average length of runs of non-ASCII bytes, at most, in languages that use windows-1252."""

PRESCAN_BYTES = 1024
"""Bytes at the start of a page that are searched first."""
BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xfe\xff", "utf-16be"), (b"\xff\xfe", "utf-16le"))
UTF16_STARTS = ((b"<\0", "utf-16le"), (b"\0<", "utf-16be"))
"""UTF-16 without a mark; no other page begins like this."""
MICROSOFT_CODE_PAGES = {"cp932": "shift_jis", "cp949": "euc-kr", "cp950": "big5"}

_PLAIN = re.compile(r"[A-Za-z0-9]{1,20}(?:[_-][A-Za-z0-9]{1,20}){0,3}")
_XML = re.compile(rb"<\?xml[^>]*?encoding[\0-\x20]*=[\0-\x20]*(?:\"([^\"\0-\x20>]*)\"|'([^'\0-\x20>]*)')")
_TAG = re.compile(rb"<(?:!--|[!?]|/[^a-z]|(/?[a-z][^\t\n\f\r />]*))", re.IGNORECASE)
# A name, and an optional value after "="; no match if the page ends within it.
_ATTRIBUTE = re.compile(rb"""[\t\n\f\r /]*+([^\t\n\f\r />][^\t\n\f\r />=]*+)(?:[\t\n\f\r ]*+=[\t\n\f\r ]*+
                             (?:"([^"]*+)"|'([^']*+)'|([^\t\n\f\r >"'][^\t\n\f\r >]*+)(?=[\t\n\f\r >])|(?=>)))?""",
                        re.VERBOSE)
_EQUALS = re.compile(rb"[\t\n\f\r ]*+=")
_TAG_END = re.compile(rb"[\t\n\f\r /]*+>")
_IN_CONTENT = re.compile(rb"""charset[\t\n\f\r ]*+=[\t\n\f\r ]*+
                              (?:"([^"]*)"|'([^']*)'|([^\t\n\f\r ;"'][^\t\n\f\r ;]*))""", re.IGNORECASE | re.VERBOSE)
_RAW_END = {name: re.compile(rb"</" + name + rb"[\t\n\f\r />]", re.IGNORECASE)
            for name in (b"script", b"style", b"title", b"noscript")}
"""Head elements whose content is not parsed for tags."""


def decode_as(raw: bytes, encoding: Encoding) -> tuple[str, bool]:
    """(text, whether some of it was malformed). Encodings that browsers refuse (`replacement`) have no text."""
    if encoding.name in UNICODE_ENCODINGS:
        try:
            return encoding.codec_info.decode(raw, "strict")[0], False
        except UnicodeDecodeError:
            return encoding.codec_info.decode(raw, "replace")[0], True
    if encoding.name in PYTHON_CODECS:
        codec = PYTHON_CODECS[encoding.name]
        text = raw.decode(codec, ERROR_HANDLER)
        text = text.translate(TRANSLATED[codec]) if codec in TRANSLATED else text
    else:
        text = codecs.charmap_decode(raw, "strict", _character_table(encoding))[0]
    return text, REPLACEMENT in text


@cache
def _character_table(encoding: Encoding) -> str:
    """The 256 characters of a single-byte encoding."""
    def character(byte: int) -> str:
        try:
            return str(encoding.codec_info.decode(bytes([byte]), "strict")[0])
        except UnicodeDecodeError:
            return chr(byte) if 0x80 <= byte < 0xA0 else REPLACEMENT

    own = EXTRA_LETTERS.get(encoding.name, {})
    return "".join(own.get(byte) or character(byte) for byte in range(256))


def _handle_decode_error(error: UnicodeError) -> tuple[str, int]:
    """What browsers produce for bytes at which Python's decoder stops, and where they continue."""
    assert isinstance(error, UnicodeDecodeError)
    raw, start = error.object, error.start
    pair = raw[start:start + 2]
    if error.encoding == "gb18030" and pair[:1] == b"\x80":
        return "\u20ac", start + 1
    if error.encoding in ("euc_jp", "iso2022_jp_ext") and (text := _decode_as_shift_jis(pair)):
        return text, start + 2
    if error.encoding == "iso2022_jp_ext":  # a character ends at the next escape
        escape = raw.find(b"\x1b", start + 1, error.end)
        return REPLACEMENT, escape if escape > 0 else error.end
    taken = 2 if len(pair) == 2 and 0x81 <= pair[0] <= 0xfe and pair[1] >= 0x80 else 1
    return REPLACEMENT, max(error.end, start + taken)


def _decode_as_shift_jis(pair: bytes) -> str:
    """The character of two bytes of EUC-JP or ISO-2022-JP; Shift_JIS has the same ones in other rows."""
    row, cell = (byte & 0x7f for byte in pair.ljust(2, b"\0"))
    if not (0x21 <= row <= 0x7e and 0x21 <= cell <= 0x7e and pair[0] & 0x80 == pair[1] & 0x80):
        return ""
    first = (row - 0x21) // 2 + (0x81 if row < 0x5f else 0xc1)
    second = cell + 0x7e if row % 2 == 0 else cell + (0x1f if cell < 0x60 else 0x20)
    try:
        return bytes([first, second]).decode("cp932")
    except UnicodeDecodeError:
        return ""


codecs.register_error(ERROR_HANDLER, _handle_decode_error)


def declared_encoding(page: bytes) -> Encoding | None:
    """The encoding that a page without a mark declares in its first bytes or head; None if it declares none we know."""
    for start, name in UTF16_STARTS:
        if page.startswith(start):
            return known_encoding(name)
    xml = _XML.match(page[:PRESCAN_BYTES])
    return (_meta_encoding(page[:PRESCAN_BYTES], in_head=False)
            or xml and _encoding_of_ascii_label(xml[1] or xml[2] or b"") or _meta_encoding(page, in_head=True))


def encoding_of_label(label: str) -> Encoding | None:
    """The encoding of a web label, or of another name that Python knows for it (`latin-1`)."""
    encoding = lookup(label)
    if encoding is None and _PLAIN.fullmatch(label):
        try:
            codec = codecs.lookup(label).name
        except LookupError:
            return None
        encoding = lookup(MICROSOFT_CODE_PAGES.get(codec, codec.replace("_", "-")))
    return encoding


def known_encoding(name: str) -> Encoding:
    """The encoding of a valid label."""
    encoding = lookup(name)
    assert encoding is not None, name
    return encoding


def _meta_encoding(page: bytes, in_head: bool) -> Encoding | None:
    """The encoding of the first `<meta>` that names one. `in_head`: search as a parser does, to the end of the head."""
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
        if name == b"meta":
            label = attributes.get(b"charset")
            if label is None and attributes.get(b"http-equiv", b"").lower() == b"content-type":
                content = _IN_CONTENT.search(attributes.get(b"content", b""))
                label = (content[1] or content[2] or content[3]) if content else None
            if label is not None and (encoding := _encoding_of_ascii_label(label)):
                return encoding
        if in_head and name in _RAW_END:
            closed = _RAW_END[name].search(page, at)
            if not closed:
                break
            at = closed.start()
    return None


def _parse_attributes(page: bytes, at: int) -> tuple[dict[bytes, bytes], int]:
    """(attributes of a tag, its end); end 0 if the page ends first."""
    found: dict[bytes, bytes] = {}
    while not (end := _TAG_END.match(page, at)):
        attribute = _ATTRIBUTE.match(page, at)
        if not attribute or attribute.lastindex == 1 and _EQUALS.match(page, attribute.end()):
            return found, 0
        found.setdefault(attribute[1].lower(), attribute[2] or attribute[3] or attribute[4] or b"")
        at = attribute.end()
    return found, end.end()


def _encoding_of_ascii_label(label: bytes) -> Encoding | None:
    """The encoding of a label read as ASCII: UTF-16 is impossible then and means UTF-8."""
    encoding = encoding_of_label(label.decode("latin-1"))
    if encoding is None:
        return None
    return known_encoding({"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}.get(
        encoding.name, encoding.name))


def decode_page(page: bytes, charset: str | None, repair: bool) -> tuple[str, tuple[str, ...]]:
    """(text, repairs). `charset` comes from the server; `repair` guesses if nothing is declared."""
    if page.startswith(UTF32):
        raise DocumentError(REFUSED_CHARSET, "begins like UTF-32, which no browser reads; convert it to UTF-8 (iconv)")
    mark, named = next((bom for bom in BYTE_ORDER_MARKS if page.startswith(bom[0])), (b"", charset))
    encoding = known_encoding(named) if named else declared_encoding(page)
    if encoding is None:
        return _decode_undeclared(page, repair)
    if encoding.name == "replacement":
        raise DocumentError(REFUSED_CHARSET, "its character set is one that no browser reads (HZ, ISO-2022-CN or "
                            "ISO-2022-KR); convert it to UTF-8 (iconv), or say what it is in truth (--charset)")
    text, malformed = decode_as(page.removeprefix(mark), encoding)
    return text, ("not UTF-8" if encoding.name == "utf-8" else f"not {encoding.name}",) if malformed else ()


def _decode_undeclared(page: bytes, repair: bool) -> tuple[str, tuple[str, ...]]:
    """A page without declaration: UTF-8 if most of it is valid, else windows-1252 if plausible."""
    text, malformed = decode_as(page, known_encoding("utf-8"))
    if not malformed:
        return text, ()
    if binary := _BINARY.search(page[:SNIFFED_BYTES]):
        raise DocumentError(NOT_TEXT, f"expected a page, found byte 0x{binary[0][0]:02x} at {binary.start()}: not text")
    if text.count(REPLACEMENT) <= len(_BEYOND_ASCII.findall(text)):  # damaged, or truncated within a character
        return text, ("not UTF-8",)
    runs = _RUNS.findall(page)
    if not repair and sum(map(len, runs)) > MAX_WESTERN_RUN * len(runs):
        raise DocumentError(NO_CHARSET, "names no character set, is not UTF-8, and does not look like windows-1252; "
                            "say what it is (--charset), or leave it out (--on-error skip)")
    return decode_as(page, known_encoding("windows-1252"))[0], (NO_CHARSET,)
