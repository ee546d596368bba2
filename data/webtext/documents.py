"""One document and its JSON line, the lines of shards, and counts of documents kept and dropped.

A line holds `text`, then `url` and `meta` where present: UTF-8, one "\\n" at the end. `parse_json_line` reads any JSON
object with a text in it; a `DocumentError` says what is wrong. With `repair` it mends invalid UTF-8, lone surrogates,
control characters, duplicate keys and non-JSON numbers, and names each repair. Documents are numbered from 0 through
all shards. Documents in = kept + dropped, always.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from data import strict_json
from data.storage import DataError, staged_file

KEPT = "kept"  # in `DocumentCounts.samples`, beside the reasons
NUM_SAMPLES, SAMPLE_CHARACTERS = 3, 200
DROPPED_COMPRESSION = 1  # gzip's fastest level: texts that few people read
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Document:
    """A text and its origin."""

    text: str
    url: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """The document as a line of a shard."""
        value: dict[str, Any] = {"text": self.text}
        if self.url is not None:
            value["url"] = self.url
        if self.meta:
            value["meta"] = self.meta
        return _ENCODER.encode(value).encode("utf-8") + b"\n"


@dataclass(frozen=True)
class DroppedDocument:
    """A stage drops the document. Reasons are few and fixed, since they are counted."""

    reason: str


DocumentFunction = Callable[[Document], Document | DroppedDocument]  # the function of a map stage


class DocumentError(Exception):
    """A line that holds no document: `reason` is a short category to count, the message has details."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Repairs(list[str]):
    """The faults of a document that were repaired; raises instead if repairs are not allowed."""

    def __init__(self, allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed

    def add(self, reason: str, message: str) -> None:
        if not self.allowed:
            raise DocumentError(reason, message)
        self.append(reason)


def parse_shard_line(line: bytes, location: str) -> Document:
    """Parse a line of a shard; `location` (file and line) begins the error."""
    try:
        return parse_json_line(line)[0]
    except DocumentError as fault:
        raise DataError(f"{location}: {fault}") from fault


def parse_json_line(line: bytes, text_key: str = "text", url_key: str = "url",
                    repair: bool = False) -> tuple[Document, tuple[str, ...]]:
    """(document, names of the repairs made); raises DocumentError. The default keys are those of our shards."""
    repairs = Repairs(repair)
    value = _load_json(decode_utf8(line, repairs), repairs)
    if not isinstance(value, dict):
        raise DocumentError("not an object", f"expected a JSON object, found {strict_json.json_type_name(value)}")
    if _ESCAPED_SURROGATE.search(line):  # only an escape can put one into a string
        value = _repair_surrogates(value, repairs)
    if text_key not in value:
        found = ", ".join(map(repr, value)) or "no keys"
        raise DocumentError("no text", f"no key {text_key!r}; found {found} (see --text-key)")
    text, url = value.pop(text_key), value.pop(url_key, None)
    if not isinstance(text, str):
        raise DocumentError("wrong type", f"key {text_key!r}: expected text, found {strict_json.json_type_name(text)}")
    if not isinstance(url, str | None):
        repairs.add("wrong type", f"key {url_key!r}: expected text, found {strict_json.json_type_name(url)}")
        url = None
    inner = value.get("meta")
    meta = inner if len(value) == 1 and isinstance(inner, dict) else value
    return Document(text, url, meta), tuple(dict.fromkeys(repairs))


def decode_utf8(raw: bytes, repairs: Repairs) -> str:
    """Decode UTF-8; invalid bytes become U+FFFD if repairs are allowed."""
    try:
        return strict_json.decode_utf8(raw)
    except ValueError as error:
        repairs.add("not UTF-8", str(error))
        return raw.decode("utf-8", "replace")


def _load_json(text: str, repairs: Repairs) -> Any:
    """Strict JSON: no duplicate keys, no NaN, no number beyond a double."""
    def parse_number(spelling: str) -> float | None:
        value = float(spelling)
        if math.isfinite(value):
            return value
        repairs.add("not JSON", f"not JSON: {spelling} is not a number of JSON, or too large")
        return None

    def load(strict: bool) -> Any:
        pairs_hook = partial(strict_json.object_of_pairs, report=partial(repairs.add, "duplicate key"))
        return strict_json.parse_json(text, json.JSONDecoder(
            object_pairs_hook=pairs_hook, parse_float=parse_number, parse_constant=parse_number, strict=strict))

    try:
        try:
            return load(strict=True)
        except ValueError as error:
            if not repairs.allowed or not str(error).startswith("not JSON: Invalid control character"):
                raise
            repairs.append("control character")
            return load(strict=False)
    except ValueError as error:
        raise DocumentError("not JSON", str(error)) from error


def _repair_surrogates(value: Any, repairs: Repairs) -> Any:
    """`value` with lone surrogates in strings replaced."""
    if isinstance(value, list):
        return [_repair_surrogates(item, repairs) for item in value]
    if isinstance(value, dict):
        return {_repair_surrogates(key, repairs): _repair_surrogates(item, repairs) for key, item in value.items()}
    if not isinstance(value, str) or not (lone := _SURROGATE.search(value)):
        return value
    repairs.add("lone surrogate",
                f"lone surrogate U+{ord(lone[0]):04X} at character {lone.start() + 1} of a string")
    return _SURROGATE.sub("\ufffd", value)


class Samples(dict[str, dict[str, str]]):
    """Reason, or KEPT -> checksum of a line -> the beginning of its text: of all lines those of the smallest checksums,
    which is a random choice that depends on the documents alone."""

    def __add__(self, other: Samples) -> Samples:
        return Samples({reason: dict(sorted({**self.get(reason, {}), **other.get(reason, {})}.items())[:NUM_SAMPLES])
                        for reason in {**self, **other}})


@dataclass
class DocumentCounts:
    """Counts that add up over documents, shards and machines."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_kept: int = 0
    bytes_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # documents by reason
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    # Documents repaired while reading, by fault; whether kept or dropped later.
    repaired: Counter[str] = field(default_factory=Counter)
    # Kept documents by size: n counts those with at least 2^(n-1) and fewer than 2^n bytes.
    sizes: Counter[int] = field(default_factory=Counter)
    samples: Samples = field(default_factory=Samples)

    def add_kept(self, size_in: int, line: bytes) -> None:
        self.documents_in += 1
        self.bytes_in += size_in
        self.documents_kept += 1
        self.bytes_kept += len(line)
        self.sizes[len(line).bit_length()] += 1
        self._add_sample(KEPT, line)

    def add_dropped(self, reason: str, size_in: int, line: bytes) -> None:
        self.documents_in += 1
        self.bytes_in += size_in
        self.dropped[reason] += 1
        self.dropped_bytes[reason] += size_in
        self._add_sample(reason, line)

    def _add_sample(self, reason: str, line: bytes) -> None:
        checksum, known = f"{crc32(line):08x}", self.samples.get(reason, {})
        if len(known) < NUM_SAMPLES or checksum < max(known):
            document, _ = parse_json_line(line)
            text = " ".join(f"{document.url or ''} {document.text[:4 * SAMPLE_CHARACTERS]}".split())
            text = text[:SAMPLE_CHARACTERS] + "…" * (len(text) > SAMPLE_CHARACTERS)
            self.samples += Samples({reason: {checksum: text}})

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        return DocumentCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def to_json(self) -> dict[str, Any]:
        """Equal counts give equal JSON, in any order of addition."""
        return {
            "in": {"documents": self.documents_in, "bytes": self.bytes_in},
            "kept": {"documents": self.documents_kept, "bytes": self.bytes_kept},
            "dropped": {reason: {"documents": self.dropped[reason], "bytes": self.dropped_bytes[reason]}
                        for reason in sorted(self.dropped)},
            "repaired": {reason: self.repaired[reason] for reason in sorted(self.repaired)},
            "sizes": {str(power): self.sizes[power] for power in sorted(self.sizes)},
            "samples": {reason: self.samples[reason] for reason in sorted(self.samples)},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DocumentCounts:
        """The inverse of `to_json`; KeyError or TypeError for anything else."""
        dropped = value["dropped"]
        return cls(value["in"]["documents"], value["in"]["bytes"], value["kept"]["documents"], value["kept"]["bytes"],
                   Counter({reason: tally["documents"] for reason, tally in dropped.items()}),
                   Counter({reason: tally["bytes"] for reason, tally in dropped.items()}),
                   Counter(value["repaired"]), Counter({int(power): n for power, n in value["sizes"].items()}),
                   Samples(value["samples"]))


class ShardWriter(ExitStack):
    """A shard that is being written, and the counts of its documents. What is dropped goes with its reason to
    `dropped-00000.STAGE.gz` beside it, a name that no reader takes for text. Both appear when the `with` block ends."""

    def __init__(self, target: Path, stage: str) -> None:
        super().__init__()
        self.counts = DocumentCounts()
        self._file = self.enter_context(staged_file(target))
        self._dropped_path = target.with_name(f"{target.stem.replace('part', 'dropped')}.{stage}.gz")
        self._dropped: gzip.GzipFile | None = None

    def keep(self, size_in: int, line: bytes) -> None:
        self.counts.add_kept(size_in, line)
        self._file.write(line)

    def drop(self, reason: str, size_in: int, line: bytes) -> None:
        self.counts.add_dropped(reason, size_in, line)
        if self._dropped is None:
            file = self.enter_context(staged_file(self._dropped_path))
            # without a time, the same documents are the same bytes
            self._dropped = self.enter_context(gzip.GzipFile("", "wb", DROPPED_COMPRESSION, file, mtime=0))
        self._dropped.write(b'{"reason": %b, %b' % (json.dumps(reason).encode(), line[1:]))


def copy_undropped_lines(path: Path, target: Path, stage: str, reasons: Mapping[int, str]) -> DocumentCounts:
    """Copy a shard without the lines (numbers from 0) that `reasons` has; returns the counts."""
    with ShardWriter(target, stage) as shard, open(path, "rb") as lines:
        for number, line in enumerate(lines):
            if number in reasons:
                shard.drop(reasons[number], len(line), line)
            else:
                shard.keep(len(line), line)
    return shard.counts


def shard_name(number: int) -> str:
    return f"part-{number:05d}.jsonl"


def machine_share(count: int, index: int, machines: int) -> range:
    """The consecutive shards, of `count`, that machine `index` (from 0) processes."""
    return range(count * index // machines, count * (index + 1) // machines)
