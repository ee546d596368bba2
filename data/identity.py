"""What ties the files of a corpus together: a number that `PREFIX.json` holds and that follows from the other two.

It is computed and not drawn, so the same text gives the same three files wherever they are made. The index goes into it
whole, of the tokens what is at `PLACES` places: it is compared whenever a corpus is opened. Files of two corpora never
agree in it; one byte that was damaged between the places is for the checksum to find (`data.verify`).
"""

from __future__ import annotations

from data.held import HeldFile
from data.storage import CHUNK, crc32

PLACES = 32
PLACE_BYTES = 1 << 12


def identity(index: HeldFile, tokens: HeldFile) -> str:
    """Eight hexadecimal digits of the index, and eight of the tokens."""
    crc = 0
    for at in range(0, index.size, CHUNK):
        crc = crc32(index.read(at, min(CHUNK, index.size - at), "u1").data, crc)
    return f"{crc:08x}{of_tokens(tokens):08x}"


def of_tokens(file: HeldFile) -> int:
    """Of pieces at equal distances, the first at the beginning and the last at the end."""
    length = min(PLACE_BYTES, file.size)
    crc = crc32(file.size.to_bytes(8, "little"))
    for at in sorted({(file.size - length) * place // (PLACES - 1) for place in range(PLACES)}):
        crc = crc32(file.read(at, length, "u1").data, crc)
    return crc
