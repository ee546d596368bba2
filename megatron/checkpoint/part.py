"""The part of a manifest that one rank writes, `rank<k>.json`: its files with size and checksum, and its own state.

A rank that verifies a checkpoint reads its share of them, and a rank that loads one those of the ranks that wrote what
it needs. No torch.

A checksum says that a file is whole, not that it belongs here. So from format 4 on the header of a file of tensors,
`shared.json` and the parts hold the *origin* of what is in them; `config.json` repeats what the manifest says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from data.storage import crc32
from megatron.checkpoint.lineage import SaveRecord, lineage_in, lineage_to_json
from megatron.checkpoint.manifest import FORMAT, MANIFEST, FileEntry, Manifest, files_from_json
from megatron.checkpoint.strict import Record, read_bytes, seal, unseal
from megatron.errors import CheckpointError

CONFIG = "config.json"
SHARED_STATE = "shared.json"
SHARED = (SHARED_STATE, CONFIG)
"""Files that rank 0 writes beside its own."""


@dataclass(frozen=True)
class Origin:
    """Save, and rank in it. The save's name ends with a digest of the manifest; run, tag and step are for people."""

    save_id: str
    rank: int
    run_id: str
    tag: str
    iteration: int

    def as_metadata(self) -> dict[str, str]:
        """In the header of a safetensors file, which holds texts."""
        return {name: str(value) for name, value in asdict(self).items()}


def origin_of(manifest: Manifest, rank: int) -> Origin:
    return Origin(manifest.save_id, rank, manifest.run_id, manifest.tag, manifest.iteration)


def check_origin(found: object, expected: Origin, where: str) -> None:
    """`found` is the origin that a file has, as a dict or as metadata."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: does not say which checkpoint it is of")
    for field in fields(Origin):
        said, right = found.get(field.name), getattr(expected, field.name)
        if type(said) not in (str, type(right)) or str(said) != str(right):
            raise CheckpointError(f"{where}: is of another checkpoint: {field.name} expected {right}, found "
                                  f"{str(said):.80}")
    if strange := set(found) - {field.name for field in fields(Origin)}:
        raise CheckpointError(f"{where}: unknown field {min(map(str, strange))!r} in its origin")


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    origin: Origin
    files: Mapping[str, FileEntry]
    """This file is not among them: it ends with its own checksum."""
    state: Any
    """The rank's own state, encoded (state.py)."""
    lineage: Mapping[str, Any] | None = None
    """Rank 0: that of the manifest again, for the case that the manifest is damaged."""

    @property
    def tensor_files(self) -> list[str]:
        return [name for name in self.files if name not in SHARED]

    def to_bytes(self) -> bytes:
        files = {name: entry.as_dict() for name, entry in self.files.items()}
        said = {"format": FORMAT, "origin": asdict(self.origin), "files": files, "state": self.state}
        return seal(said if self.lineage is None else {**said, "lineage": self.lineage})


def part_name(rank: int) -> str:
    return f"rank{rank}.json"


def tensor_file_name(rank: int, index: int) -> str:
    return f"rank{rank}-{index}.safetensors" if index else f"rank{rank}.safetensors"


def writer_of(name: str) -> int | None:
    """The rank that writes a file of this name; None for a name that no rank uses."""
    match = re.fullmatch(r"rank(0|[1-9][0-9]{0,8})(\.json|(-[1-9][0-9]{0,8})?\.safetensors)", name)
    return int(match[1]) if match else 0 if name in SHARED else None


def read_part(folder: Path, manifest: Manifest, rank: int) -> tuple[Part, FileEntry]:
    """The part of one rank, which must belong to this manifest, and what its file is."""
    name = part_name(rank)
    where = f"tag {manifest.tag}: file {name}"
    if not (folder / name).is_file():
        raise CheckpointError(f"tag {manifest.tag}: shard file {name} (rank {rank} of {manifest.ranks}) missing")
    data = read_bytes(folder / name, where)
    record = Record(unseal(data, where), where)
    if (version := record.count("format")) != manifest.format:
        raise CheckpointError(f"{where}: format {version}, expected {manifest.format}")
    origin = origin_of(manifest, rank)
    if manifest.has_origins:
        check_origin(record.take("origin", dict), origin, where)
    elif (found := (record.take("save_id", str), record.count("rank"))) != (origin.save_id, rank):
        raise CheckpointError(f"{where}: expected rank {rank} of save {origin.save_id}, found rank {found[1]} of "
                              f"save {found[0]:.40}: it is of another checkpoint")
    lineage = record.take("lineage", dict) if rank == 0 and manifest.format > 4 else None
    if lineage not in (None, lineage_to_json(manifest.branch, manifest.history)):
        raise CheckpointError(f"{where}: its lineage is not the one that {MANIFEST} states")
    part = Part(origin, files_from_json(record.take("files", dict), where), record.fields.pop("state", None), lineage)
    record.done()
    if strange := [file for file in part.files if file == name or writer_of(file) != rank]:
        raise CheckpointError(f"{where}: lists {strange[0]!r}, which rank {rank} does not write")
    return part, FileEntry(len(data), f"{crc32(data):08x}")


def record_in_part(folder: Path) -> SaveRecord | None:
    """What the part of rank 0 says of the save, where the manifest is damaged; None where it says nothing. The
    commit number is not stored here: every other tag counts as earlier."""
    where = part_name(0)
    try:
        record = Record(unseal(read_bytes(folder / where, where), where), where)
        origin = Record(record.take("origin", dict), where)
        branch, history = lineage_in(Record(record.take("lineage", dict), where)) if "lineage" in record.fields \
            else ("", ())
        return SaveRecord(origin.take("tag", str), origin.count("iteration"), origin.take("run_id", str),
                          saved_at=10**18, branch=branch, history=history)
    except CheckpointError:
        return None
