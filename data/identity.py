"""What ties the files of a corpus together: a number that `PREFIX.json` holds and that follows from the other two.

It is computed and not drawn, so the same text gives the same three files wherever they are made. The index goes into it
whole, of the tokens what is at `PLACES` places: it is compared whenever a corpus is opened. Files of two corpora never
agree in it; one byte that was damaged between the places is for the checksum to find (`data.verify`).
"""

from __future__ import annotations

from data.held import StableFile
from data.storage import READ_BYTES, crc32

SAMPLED_PLACES = 32
SAMPLED_BYTES = 1 << 12


def corpus_identity(index: StableFile, tokens: StableFile) -> str:
    """Eight hexadecimal digits of the index, and eight of the tokens."""
    crc = 0
    for at in range(0, index.size, READ_BYTES):
        crc = crc32(index.read(at, min(READ_BYTES, index.size - at), "u1").data, crc)
    return f"{crc:08x}{sampled_crc32(tokens):08x}"


def sampled_crc32(file: StableFile) -> int:
    """Of pieces at equal distances, the first at the beginning and the last at the end."""
    length = min(SAMPLED_BYTES, file.size)
    crc = crc32(file.size.to_bytes(8, "little"))
    for at in sorted({(file.size - length) * place // (SAMPLED_PLACES - 1) for place in range(SAMPLED_PLACES)}):
        crc = crc32(file.read(at, length, "u1").data, crc)
    return crc
