"""Bytes in any encoding of the web -> text: Python's decoders, and what the Encoding Standard has beyond them.

Compared with the tables of the standard over every byte and every pair of bytes, Python's decoders lack: bytes 0x80 to
0x9f that a code page leaves free (control characters on the web), the euro sign of GBK, three letters of windows-1255
and KOI8-U, and the rows of NEC and IBM in EUC-JP and ISO-2022-JP, which Shift_JIS has. A malformed sequence becomes one
U+FFFD, and takes no ASCII character after it along. (Left as they are: some two hundred characters of Hong Kong's
extension to Big5.)
"""

from __future__ import annotations

import codecs
from functools import cache

from webencodings import Encoding

REPLACEMENT = "\ufffd"
UNICODE_ENCODINGS = ("utf-8", "utf-16le", "utf-16be")
PYTHON_CODECS = {"gbk": "gb18030", "gb18030": "gb18030", "big5": "big5hkscs", "shift_jis": "cp932", "euc-kr": "cp949",
                 "euc-jp": "euc_jp", "iso-2022-jp": "iso2022_jp_ext"}
"""Encodings of several bytes a character, and Python's decoders of them. (GBK pages are read as GB 18030.)"""
EXTRA_LETTERS = {"koi8-u": {0xAE: "\u045e", 0xBE: "\u040e"}, "windows-1255": {0xCA: "\u05ba"}}
_TO_FULL_WIDTH = str.maketrans("\u301c\u2016\u2212\xa2\xa3\xac", "\uff5e\u2225\uff0d\uffe0\uffe1\uffe2")
_TO_REPLACEMENT = str.maketrans(dict.fromkeys("\uf8f0\uf8f1\uf8f2\uf8f3", ord(REPLACEMENT)))
TRANSLATED = {
    "gb18030": str.maketrans("\ue7c7\ue5e5", "\u1e3f\u3000"), "cp932": _TO_REPLACEMENT, "euc_jp": _TO_FULL_WIDTH,
    "iso2022_jp_ext": _TO_FULL_WIDTH
}
"""By decoder: characters that the standard maps to others."""
ERROR_HANDLER = "megatron.webtext"


def decode_as(raw: bytes, encoding: Encoding) -> tuple[str, bool]:
    """The text, and whether any of it was malformed. Encodings that browsers refuse (`replacement`) have no text."""
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
    """The characters of an encoding of single bytes."""
    own = EXTRA_LETTERS.get(encoding.name, {})
    return "".join(own.get(byte) or _character(encoding, byte) for byte in range(256))


def _character(encoding: Encoding, byte: int) -> str:
    try:
        return str(encoding.codec_info.decode(bytes([byte]), "strict")[0])
    except UnicodeDecodeError:
        return chr(byte) if 0x80 <= byte < 0xA0 else REPLACEMENT


def _handle_decode_error(error: UnicodeError) -> tuple[str, int]:
    """What browsers make of the bytes at which a decoder of Python's stops, and where they go on."""
    assert isinstance(error, UnicodeDecodeError)
    raw, start = error.object, error.start
    pair = raw[start:start + 2]
    if error.encoding == "gb18030" and pair[:1] == b"\x80":
        return "\u20ac", start + 1
    if error.encoding in ("euc_jp", "iso2022_jp_ext") and (text := _decode_as_shift_jis(pair)):
        return text, start + 2
    if error.encoding == "iso2022_jp_ext":  # a character ends before the next escape
        escape = raw.find(b"\x1b", start + 1, error.end)
        return REPLACEMENT, escape if escape > 0 else error.end
    taken = 2 if len(pair) == 2 and 0x81 <= pair[0] <= 0xfe and pair[1] >= 0x80 else 1
    return REPLACEMENT, max(error.end, start + taken)


def _decode_as_shift_jis(pair: bytes) -> str:
    """The character of two bytes of EUC-JP or ISO-2022-JP, which have the rows of Shift_JIS in another place."""
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
