"""Text files to documents: JSON lines and plain text, read in chunks, the unit of parallel work.

JSON lines: one object per line, one text per object; strict, with the position of every fault. Blank lines are not
documents. Plain text: a document is a whole file or, with a `Separator`, the text between two separators; CRLF becomes
LF, and long documents are split where that does not change their tokens (before `Tokenizer.safe_split_characters`).
Documents without text are skipped. Both: a byte order mark at the start of a file is dropped.

`hf:NAME:CONFIG/SPLIT` is a dataset. NAME is a folder that `save_to_disk` wrote, a folder of Parquet, JSONL or other
files that `load_dataset` reads, or a dataset of the hub. Rows are streamed, and become lines of JSON with the text
column alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from data.compressed import open_decompressed, read_errors_for
from data.storage import DataError
from data.strict_json import decode_utf8, parse_text

CHUNK_BYTES = 1 << 20

BOM = b"\xef\xbb\xbf"  # the UTF-8 byte order mark; not part of the text at the start of a file

# Non-ASCII white space in UTF-8, and zero-width characters, which some tokenizers treat as white space.
NOT_UNICODE_SPACE = (rb"(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8f\xa8-\xaf])"
                     rb"(?<!\xe2\x81[\x9f-\xa0])(?<!\xe3\x80\x80)(?<!\xef\xbb\xbf)")

TAIL_BYTES = 1 << 12  # bytes at the end of a buffer that are searched first for a place to cut


@dataclass(frozen=True)
class Chunk:
    """A part of a file: whole lines, or bytes of plain text."""

    path: str
    offset: int  # offset in the (decompressed) file
    data: bytes
    lines_before: int = 0  # lines of the file before `data`
    starts_inside_document: bool = False
    ends_inside_document: bool = False
    damage: str | None = None  # message about the rest of the file, which cannot be decompressed


@dataclass(frozen=True)
class MalformedDocument:
    """A document that cannot be used: the offset of its line in the file, and the reason."""

    chunk: Chunk
    offset: int
    reason: str

    def to_error(self) -> DataError:
        """The error with the number of the line."""
        line = self.chunk.lines_before + self.chunk.data.count(b"\n", 0, self.offset - self.chunk.offset) + 1
        return DataError(f"{self.chunk.path}:{line} {self.reason} (the line begins at byte {self.offset})")


def read_line_chunks(path: str | os.PathLike[str], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The lines of a file, in chunks of about `size` bytes."""
    name, offset, lines = os.fspath(path), 0, 0
    with read_errors_for(name), open_decompressed(name, until_damage=True) as file:
        while file.damage is None:
            data = file.read(size)
            data += file.readline() if data else b""
            if not data and file.damage is None:
                return
            lines_before, lines = lines, lines + data.count(b"\n")
            yield Chunk(name, offset, data, lines_before, damage=damage_message(name, file.damage, lines))
            offset += len(data)


def damage_message(path: str, damage: OSError | None, lines_before: int) -> str | None:
    return None if damage is None else f"{path}: cannot read: {damage}; it is in line {lines_before + 1}"


def parse_lines(chunk: Chunk, key: str) -> Iterator[tuple[bytes, str | MalformedDocument]]:
    """(line without its end, text or fault) for each line of a chunk that is not blank."""
    end = chunk.offset
    for raw in BytesIO(chunk.data):
        offset, end = end, end + len(raw)
        line = (raw if offset else raw.removeprefix(BOM)).removesuffix(b"\n")
        if not line or line.isspace():
            continue
        try:
            yield line, parse_text(decode_utf8(line), key, hint=" (see --json-key)")
        except ValueError as error:
            if raw.endswith(b"\n") or not chunk.damage:  # otherwise cut by the damage
                yield line, MalformedDocument(chunk, offset, str(error))


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
                     size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The documents of a file in order, in chunks of about `size` bytes: whole documents, or parts of a long one."""
    name = os.fspath(path)
    offset = lines = 0
    buffered, continues = bytearray(), False
    # The end of a non-space character that is followed by white space to cut before.
    cut = rb"[!-~\x80-\xbf]%b(?=[%b])" % (NOT_UNICODE_SPACE, re.escape(safe_split_characters.encode()))
    with read_errors_for(name), open_decompressed(name, until_damage=True) as file:
        # Reads double, so that uncut text is searched half as often.
        while (more := file.read(max(size, len(buffered)))) and not file.damage:
            buffered += more
            found = _last_match(separator.final_pattern, buffered, len(buffered)) if separator else None
            is_unfinished = found is None
            if found is None and safe_split_characters:
                # Do not cut inside a separator that extends beyond the data.
                stop = len(buffered) - (separator.max_match_bytes - 1 if separator else 0)
                found = _last_match(re.compile(cut), buffered, stop)
            if found:
                end = found.end()
                yield Chunk(name, offset, bytes(buffered[:end]), lines, continues, is_unfinished)
                offset, lines, continues = offset + end, lines + buffered.count(b"\n", 0, end), is_unfinished
                del buffered[:end]
        buffered += more
        end = len(buffered)
        if file.damage:  # drops the document that contains the damage
            found = _last_match(separator.pattern, buffered, len(buffered)) if separator else None
            end = found.end() if found else 0
        if buffered or continues or file.damage:
            yield Chunk(name, offset, bytes(buffered[:end]), lines, continues,
                        damage=damage_message(name, file.damage, lines + buffered.count(b"\n")))


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


def parse_texts(chunk: Chunk, separator: Separator | None = None) -> Iterator[str | MalformedDocument]:
    """The documents of a chunk, or its part of one; invalid UTF-8 gives a MalformedDocument."""
    data = chunk.data
    start, bounds = 0, []  # of the documents between separators; at least one
    for found in separator.pattern.finditer(data) if separator else ():
        bounds.append((start, found.start()))
        start = found.end()
    if start < len(data) or start == 0:
        bounds.append((start, len(data)))
    if chunk.damage and not data:  # the document that began earlier is incomplete
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
            yield MalformedDocument(chunk, chunk.offset + line, reason)
            continue
        if separator:
            text = text.lstrip("\n") if begins else text
            text = text.rstrip("\n") if ends else text
        if not begins or (text and not text.isspace()):
            yield text


# ---- datasets of the Hugging Face `datasets` library -------------------------------------------------------------

DATASET_PREFIX = "hf:"  # of a dataset, whose rows are read as lines of JSON
BATCH_ROWS = 100


def check_datasets_package(source: str) -> None:
    if find_spec("datasets") is None:
        raise DataError(f"{source}: needs the package datasets: pip install datasets (the extra [datasets])")


class HuggingFaceDataset(os.PathLike[str]):
    """One split of a dataset; its path is the source. `fingerprint` changes with the content; the cache is beside
    `local_name`."""

    def __init__(self, source: str) -> None:
        check_datasets_package(source)
        import datasets

        self._source = source
        name, _, part = source.removeprefix(DATASET_PREFIX).partition(":")
        name = os.path.abspath(name) if os.path.isdir(name) else name  # a folder `json` is not the reader `json`
        self.local_name = os.path.abspath(name if os.path.isdir(name) else os.path.basename(name))
        config, _, split = part.partition("/")
        split = split or "train"
        is_saved = os.path.exists(f"{name}/state.json") or os.path.exists(f"{name}/dataset_dict.json")
        try:
            builder = None if is_saved else datasets.load_dataset_builder(name, config or None)
            # load_dataset(streaming=True) returns the same rows, but no fingerprint. Saved rows are memory-mapped.
            splits = builder.as_streaming_dataset() if builder else datasets.load_from_disk(name)
            splits = splits if isinstance(splits, dict) else {"train": splits}
            if split not in splits or (is_saved and config):
                found = ", ".join(f":{config if builder else ''}/{one}" for one in splits)
                raise ValueError(f"expected {found}, found :{part or f'/{split}'} (:CONFIG/SPLIT)")
            self._rows: Any = splits[split]
            self.fingerprint = str(builder.hash if builder else self._rows._fingerprint)
        except Exception as error:  # of many kinds: of the hub, of files, of metadata
            raise DataError(f"{source}: cannot load the dataset: {error or type(error).__name__}") from error

    def __fspath__(self) -> str:
        return self._source

    def read_chunks(self, key: str) -> Iterator[Chunk]:
        """The text column, a line of JSON per row, `BATCH_ROWS` in a chunk."""
        columns = self._rows.column_names
        if columns and key not in columns:
            raise DataError(f"{self._source}: no column {key!r}; found {', '.join(columns)} (see --json-key)")
        offset = lines = 0
        try:
            for batch in self._rows.select_columns([key]).iter(batch_size=BATCH_ROWS):
                data = "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in batch[key]).encode()
                yield Chunk(self._source, offset, data, lines)
                offset, lines = offset + len(data), lines + len(batch[key])
        except Exception as error:
            raise DataError(f"{self._source}: cannot read the dataset: {error or type(error).__name__}") from error
