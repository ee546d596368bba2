"""Text files to documents: JSON lines and plain text, read in chunks, the unit of parallel work, in bounded memory.

JSON lines: one object per line, one text per object; strict, with the position of every fault. Blank lines are not
documents. Plain text: a document is a whole file or, with a `Separator`, the text between two separators; CRLF becomes
LF, and long documents are split where that does not change their tokens (before `Tokenizer.safe_split_characters`).
Documents without text are skipped. Both: a byte order mark at the start of a file is dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from stat import S_ISREG

import numpy as np

from data.compressed import find_damage, is_compressed, open_decompressed, read_errors_for, skip_line
from data.storage import DataError
from data.strict_json import decode_utf8, parse_text

CHUNK_BYTES = 1 << 20

# Default limit in bytes of a line, or of text without a place to cut. Bounds memory.
MAX_DOCUMENT_BYTES = 1 << 26

UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
CONVERT_UTF16_HINT = "convert the file (iconv -f UTF-16 -t UTF-8)"
BOM = b"\xef\xbb\xbf"  # the UTF-8 byte order mark; not part of the text at the start of a file

# Non-ASCII white space in UTF-8, and zero-width characters, which some tokenizers treat as white space.
NOT_UNICODE_SPACE = (rb"(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8f\xa8-\xaf])"
                     rb"(?<!\xe2\x81[\x9f-\xa0])(?<!\xe3\x80\x80)(?<!\xef\xbb\xbf)")

TAIL_BYTES = 1 << 12  # bytes at the end of a buffer that are searched first for a place to cut


@dataclass(frozen=True)
class MalformedDocument:
    """A document that cannot be used: the line and the reason."""

    path: str
    lines_before: int  # lines before it in its chunk
    offset: int
    reason: str

    def to_error(self, lines_before_chunk: int) -> DataError:
        """The error, for a chunk after `lines_before_chunk` lines; names damaged compression as the cause."""
        line = lines_before_chunk + self.lines_before + 1
        if damage := find_damage(self.path):
            return DataError(f"{self.path}: cannot read: {damage}; before that, line {line} is malformed: "
                             f"{self.reason}")
        return DataError(f"{self.path}:{line} {self.reason} (the line begins at byte {self.offset})")


def too_long_document(path: str, lines_before: int, offset: int, limit: int,
                      what: str = "in this line") -> MalformedDocument:
    return MalformedDocument(path, lines_before, offset, f"more than {limit} bytes {what}, which would have to be held "
                             "in memory; --max-document-bytes of data.preprocess allows more")


class DamagedRest(MalformedDocument):
    """The rest of a file that cannot be decompressed; counts as one document."""

    def to_error(self, lines_before_chunk: int) -> DataError:
        return DataError(
            f"{self.path}: cannot read: {self.reason}; it is in line {lines_before_chunk + self.lines_before + 1}")


@dataclass(frozen=True)
class Chunk:
    """A range of bytes of a file; the bytes themselves only if the file cannot be read at an offset."""

    path: str
    offset: int  # offset in the (decompressed) file
    size: int
    data: bytes | None = None  # the bytes, if the file is compressed or a pipe
    starts_inside_document: bool = False
    ends_inside_document: bool = False
    skipped_bytes: int = 0  # following bytes of its last line, too many to hold
    damage: DamagedRest | None = None  # damage after all that

    @property
    def end(self) -> int:
        """Offset of the next chunk."""
        return self.offset + self.size + self.skipped_bytes

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with read_errors_for(self.path), open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.path}: cannot read: the file became shorter meanwhile")
        return data


def count_lines(data: bytes) -> int:
    r"""As `data.count(b"\\n")`, but vectorized."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))


def read_line_chunks(path: str | os.PathLike[str], size: int = CHUNK_BYTES, *,
                     limit: int = MAX_DOCUMENT_BYTES) -> Iterator[Chunk]:
    """The lines of a file, in chunks of about `size` bytes; the rest of a line that exceeds `limit` then is skipped."""
    name, offset = os.fspath(path), 0
    with read_errors_for(name), open_decompressed(name, until_damage=True) as file:
        status = os.stat(name)
        if not is_compressed(name) and S_ISREG(status.st_mode):
            while offset < status.st_size:
                end = file.seek(min(offset + size, status.st_size))
                rest_size = skip_line(file)
                yield (Chunk(name, offset, end - offset, skipped_bytes=rest_size) if rest_size > limit else
                       Chunk(name, offset, end - offset + rest_size))
                offset = end + rest_size
            return
        while file.damage is None:  # a file that can only be read from its start: chunks hold their bytes
            data, skipped = file.read(size), 0
            rest = file.readline(limit + 1) if data else b""
            if len(rest) <= limit:
                data += rest
            else:
                skipped = len(rest) + (0 if rest.endswith(b"\n") else skip_line(file))
            if not data and file.damage is None:
                return
            end = offset + len(data) + skipped
            fault = DamagedRest(name, count_lines(data), end, str(file.damage)) if file.damage else None
            yield Chunk(name, offset, len(data), data, skipped_bytes=skipped, damage=fault)
            offset = end


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
                yield line, parse_text(decode_utf8(line), key, hint=" (see --json-key)")
            except ValueError as error:
                reason = str(error)
                if offset == 0 and whole.startswith(UTF16_BOMS):
                    reason = f"not UTF-8 but UTF-16, by its first bytes; {CONVERT_UTF16_HINT}"
                if whole.endswith(b"\n") or not chunk.damage:  # otherwise cut by the damage
                    yield line, MalformedDocument(chunk.path, number, offset, reason)
        offset += len(whole)
    if chunk.skipped_bytes:
        yield beginning, too_long_document(chunk.path, number + 1, offset, limit)
    if chunk.damage:
        yield b"", chunk.damage


@dataclass(frozen=True)
class Separator:
    """What ends a document within a file. `parse` reads the command line value."""

    pattern: re.Pattern[bytes]
    final_pattern: re.Pattern[bytes]  # the same, without matches that more text could extend
    max_match_bytes: int  # longest match in bytes that a cut before white space could split

    @staticmethod
    def parse(word: str | None) -> Separator | None:
        r"""`blank-line`, or a text in which `\n`, `\t` and `\\` stand for themselves; None: files are documents."""
        if not word:
            return None
        if word == "blank-line":  # all white space, which is never cut
            blank = rb"\r?\n(?:[ \t]*\r?\n)+"
            return Separator(re.compile(blank), re.compile(blank + rb"(?=[ \t]*[^ \t\r\n])"), 1)
        typed = re.sub(r"\\([nt\\])", lambda escape: {"n": "\n", "t": "\t", "\\": "\\"}[escape[1]], word)
        text = typed.encode("utf-8", "surrogateescape")  # keeps bytes that the locale cannot decode
        pattern = re.compile(rb"\r?\n".join(map(re.escape, text.split(b"\n"))))
        return Separator(pattern, pattern, len(text) + text.count(b"\n"))


def read_text_chunks(path: str | os.PathLike[str], separator: Separator | None = None, safe_split_characters: str = "",
                     size: int = CHUNK_BYTES, *, limit: int = MAX_DOCUMENT_BYTES) -> Iterator[Chunk]:
    """The documents of a file in order, in chunks of about `size` bytes: whole documents, or parts of a long one. Ends
    with an error chunk at a part of more than `limit` bytes that cannot be cut."""
    name = os.fspath(path)
    offset, buffered, continues = 0, bytearray(), False
    with read_errors_for(name), open_decompressed(name, until_damage=True) as file:
        seekable = not is_compressed(name) and S_ISREG(os.stat(name).st_mode)

        def chunk(length: int, unfinished: bool) -> Chunk:
            data = None if seekable else bytes(buffered[:length])
            return Chunk(name, offset, length, data, continues, unfinished)

        while True:
            # doubling, so that uncut text is searched half as often
            more = file.read(max(size, len(buffered)))
            buffered += more
            if file.damage or not more:
                break
            end, unfinished = _find_cut(buffered, separator, safe_split_characters)
            if end:
                yield chunk(end, unfinished)
                offset, continues = offset + end, unfinished
                del buffered[:end]
            elif safe_split_characters and len(buffered) > limit:
                yield Chunk(name, offset, 0, b"", continues, skipped_bytes=len(buffered))
                return
        if file.damage:  # drops the document that contains the damage
            found = _last_match(separator.pattern, buffered, len(buffered)) if separator else None
            fault = DamagedRest(name, buffered.count(b"\n"), offset + len(buffered), str(file.damage))
            yield replace(chunk(found.end() if found else 0, False), damage=fault)
        elif buffered or continues:
            yield chunk(len(buffered), False)


def _find_cut(data: bytearray, separator: Separator | None, safe_split_characters: str) -> tuple[int, bool]:
    """(where to end a chunk, 0 if nowhere yet; whether that is inside a document)."""
    if separator and (found := _last_match(separator.final_pattern, data, len(data))):
        return found.end(), False
    if not safe_split_characters:
        return 0, False
    # The end of a non-space character that is followed by white space to cut before.
    cut = re.compile(rb"[!-~\x80-\xbf]%b(?=[%b])" % (NOT_UNICODE_SPACE, re.escape(safe_split_characters.encode())))
    # Do not cut inside a separator that extends beyond the data.
    found = _last_match(cut, data, len(data) - (separator.max_match_bytes - 1 if separator else 0))
    return (found.end(), True) if found else (0, False)


def _last_match(pattern: re.Pattern[bytes], data: bytearray, stop: int) -> re.Match[bytes] | None:
    """The last match in `data[:stop]`; the end is searched first."""
    near = TAIL_BYTES
    while True:
        start = max(0, stop - near)
        last = None
        for last in pattern.finditer(data, start, max(0, stop)):
            pass
        if last or start == 0:
            return last
        near *= 8


def parse_texts(chunk: Chunk, data: bytes, separator: Separator | None = None,
                limit: int = MAX_DOCUMENT_BYTES) -> Iterator[str | MalformedDocument]:
    """The documents of a chunk, or its part of one; invalid UTF-8 gives a MalformedDocument."""
    if chunk.skipped_bytes:
        yield too_long_document(chunk.path, 0, chunk.offset, limit, "without white space to cut at")
        return
    start, bounds = 0, []  # of the documents between separators; at least one
    for found in separator.pattern.finditer(data) if separator else ():
        bounds.append((start, found.start()))
        start = found.end()
    if start < len(data) or start == 0:
        bounds.append((start, len(data)))
    if chunk.damage and not chunk.size:  # the document that began earlier is incomplete
        bounds = []
    for number, (start, stop) in enumerate(bounds):
        begins = number > 0 or not chunk.starts_inside_document
        ends = number < len(bounds) - 1 or not chunk.ends_inside_document
        raw = data[start:stop]
        if number == 0 and chunk.offset == 0:
            raw = raw.removeprefix(BOM)
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            at = stop - len(raw) + error.start
            line = data.rfind(b"\n", 0, at) + 1
            reason = f"not UTF-8: byte 0x{data[at]:02x} at column {at - line + 1}; convert the file (iconv -t UTF-8)"
            if chunk.offset == 0 and data.startswith(UTF16_BOMS):
                reason = f"not UTF-8 but UTF-16, by its first bytes; {CONVERT_UTF16_HINT}"
            yield MalformedDocument(chunk.path, data.count(b"\n", 0, at), chunk.offset + line, reason)
            continue
        if separator:
            text = text.lstrip("\n") if begins else text
            text = text.rstrip("\n") if ends else text
        if not begins or (text and not text.isspace()):
            yield text
    if chunk.damage:
        yield chunk.damage
