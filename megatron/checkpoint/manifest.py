"""The manifest: one JSON file, written last, that says what a checkpoint is. No torch.

Vocabulary
    tag     the name of a checkpoint: a folder under the save root, `global_step<N>` or a name of the user's choice
    tensor  one logical tensor, named by kind ("weight", "exp_avg", ...) and parameter name
    piece   consecutive elements of one tensor-parallel rank's flattened local tensor; stored under `key` in `file`

The last field is the crc32 of every byte before it, and each other file of the tag is listed with size and crc32, so
one flipped bit anywhere in a tag is found. A manifest that parses is whole: its pieces cover every tensor exactly once.
The partition is kept as plain numbers (not mpu's record), so that verifying needs neither mpu nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from data.storage import crc32
from megatron.checkpoint.cut import Sharding
from megatron.checkpoint.strict import Record, parse_json, read_bytes
from megatron.errors import CheckpointError

FORMAT = 2
"""What is written. Format 1 lacks `saved_at`, and is read as well."""
MANIFEST = "manifest.json"
LATEST = "latest"
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_STEP_TAG = re.compile(r"global_step([0-9]{1,18})")
_CHECKSUM = b',"crc32":"'


def safe_name(name: str, what: str) -> str:
    """`name`, which may become a path: no separator, no leading dot, nothing a file system reads otherwise."""
    if not is_safe_name(name):
        raise CheckpointError(f"{what} {name!r:.80} is not a plain name: letters, digits, '_', '-' and inner '.' only")
    return name


def is_safe_name(name: str) -> bool:
    return _SAFE_NAME.fullmatch(name) is not None and name not in (LATEST, MANIFEST)


def step_tag(iteration: int) -> str:
    return f"global_step{iteration}"


def step_of(tag: str) -> int | None:
    """N of `global_step<N>`; None for a tag of the user's own."""
    match = _STEP_TAG.fullmatch(tag)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class FileEntry:
    """What a file of the tag must be, to the byte."""

    size: int
    crc32: str
    """8 hexadecimal digits, as data.storage.crc32_file writes them."""


@dataclass(frozen=True, order=True)
class PieceEntry:
    """`count` elements from `offset` of the flattened local tensor of `tp_rank`."""

    tp_rank: int
    offset: int
    count: int
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor: the cut it was written under, and its pieces."""

    kind: str
    name: str
    dtype: str
    sharding: Sharding
    pieces: tuple[PieceEntry, ...]

    @property
    def where(self) -> str:
        return f"{self.kind} {self.name!r}"

    def check_whole(self) -> None:
        """The cut exists, and the pieces, in order, cover every element of every rank's local tensor once."""
        self.sharding.check()
        numel, ranks = prod(self.sharding.local_shape), self.sharding.tp_size
        rank = offset = 0
        for piece in self.pieces:
            if (piece.tp_rank, piece.offset) != (rank, offset) or not 0 < piece.count <= numel - offset:
                raise CheckpointError(f"{self.where}: expected a piece at element {offset} of {numel} of "
                                      f"tensor-parallel rank {rank} of {ranks}, found {piece}")
            rank, offset = divmod(rank * numel + offset + piece.count, numel)
        if numel and rank != ranks:
            raise CheckpointError(f"{self.where}: there is nothing at element {offset} of {numel} of tensor-parallel "
                                  f"rank {rank} of {ranks}")


@dataclass(frozen=True)
class Manifest:
    """One checkpoint: who wrote it, under which config and layout, in which files, holding which tensors."""

    run_id: str
    tag: str
    iteration: int
    layout: Mapping[str, Any]
    config: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    saved_at: int = 0
    """Time of the commit in microseconds since 1970, later than that of any tag committed before under the same root;
    0 in format 1, which does not record it."""

    def to_bytes(self) -> bytes:
        body = {"format": FORMAT, **asdict(self)}
        text = json.dumps(body, separators=(",", ":")).encode()[:-1]
        return text + _seal(text)

    def check(self) -> None:
        """What no single field can promise: tensors named once and whole, their pieces in listed files."""
        seen: set[tuple[str, str]] = set()
        for tensor in self.tensors:
            where = f"tag {self.tag}: {MANIFEST}: {tensor.where}"
            if (tensor.kind, tensor.name) in seen:
                raise CheckpointError(f"{where} is listed twice")
            seen.add((tensor.kind, tensor.name))
            if foreign := [piece.file for piece in tensor.pieces if piece.file not in self.files]:
                raise CheckpointError(f"{where} is in {foreign[0]!r}, which is not listed")
            tensor.check_whole()


def read_manifest(folder: Path) -> Manifest:
    where = f"tag {folder.name}: {MANIFEST}"
    return from_bytes(read_bytes(folder / MANIFEST, where), where)


def from_bytes(data: bytes, where: str = MANIFEST) -> Manifest:
    """The manifest in `data`, or a CheckpointError naming what is wrong with it."""
    text, mark, rest = data.rpartition(_CHECKSUM)
    if mark + rest != _seal(text):
        raise CheckpointError(f"{where}: damaged: its {len(data)} bytes do not match its own checksum")
    record = Record(parse_json(text + b"}", where), where)
    if (version := record.count("format")) not in (1, FORMAT):
        raise CheckpointError(f"{where}: format {version}, this program reads formats 1 and {FORMAT}")
    manifest = Manifest(run_id=record.take("run_id", str), tag=safe_name(record.take("tag", str), f"{where}: tag"),
                        iteration=record.count("iteration"), layout=record.take("layout", dict),
                        config=record.take("config", dict), files=_files(record.take("files", dict), where),
                        tensors=tuple(tensor_from_json(value, where) for value in record.take("tensors", list)),
                        saved_at=record.count("saved_at") if version > 1 else 0)
    record.done()
    manifest.check()
    return manifest


def _seal(text: bytes) -> bytes:
    """The end of a manifest whose other bytes are `text`."""
    return _CHECKSUM + b'%08x"}\n' % crc32(text)


def seal_of(folder: Path) -> str | None:
    """The checksum that the manifest in `folder` ends with, which identifies one save; None without a manifest."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            file.seek(-len(_seal(b"")), os.SEEK_END)
            return file.read()[len(_CHECKSUM):-3].decode("ascii", "replace")
    except OSError:
        return None


def saved_at_of(folder: Path) -> int:
    """`saved_at` of the manifest in `folder`, from its last bytes: a large one takes seconds to parse. 0 where there is
    none to be read."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 100))
            found = re.search(rb'"saved_at":([0-9]{1,18}),"crc32":"[0-9a-f]{8}"}\n\Z', file.read())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _files(values: dict[str, object], where: str) -> dict[str, FileEntry]:
    return {safe_name(name, f"{where}: file"): _file(Record(value, f"{where}: files[{name}]"))
            for name, value in values.items()}


def _file(record: Record) -> FileEntry:
    entry = FileEntry(record.count("size"), record.take("crc32", str))
    record.done()
    return entry


def tensor_from_json(value: object, where: str) -> TensorEntry:
    record = Record(value, f"{where}: tensors[]")
    kind, name = record.take("kind", str), record.take("name", str)
    record.where = f"{where}: {kind} {name!r}"
    sharding = _sharding(Record(record.take("sharding", dict), f"{record.where}: sharding"))
    pieces = tuple(_piece(Record(piece, f"{record.where}: pieces[]")) for piece in record.take("pieces", list))
    entry = TensorEntry(kind, name, record.take("dtype", str), sharding, pieces)
    record.done()
    return entry


def _sharding(record: Record) -> Sharding:
    sharding = Sharding(record.counts("local_shape"), record.optional_count("dim"), record.count("stride"),
                        record.optional_count("size"), record.count("tp_size"))
    record.done()
    return sharding


def _piece(record: Record) -> PieceEntry:
    entry = PieceEntry(record.count("tp_rank"), record.count("offset"), record.count("count"),
                       record.take("file", str), record.take("key", str))
    record.done()
    return entry


def gather_tensors(parts: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """The whole tensors of which the ranks hold `parts`: equal but for their pieces, or the ranks disagree."""
    whole: dict[tuple[str, str], list[TensorEntry]] = {}
    for part in parts:
        whole.setdefault((part.kind, part.name), []).append(part)
    return tuple(_join(same) for _, same in sorted(whole.items()))


def _join(parts: list[TensorEntry]) -> TensorEntry:
    first, *others = (replace(part, pieces=()) for part in parts)
    for other in others:
        if other != first:
            raise CheckpointError(f"{first.where}: ranks disagree: {first.dtype} {first.sharding} and "
                                  f"{other.dtype} {other.sharding}")
    return replace(first, pieces=tuple(sorted(piece for part in parts for piece in part.pieces)))
