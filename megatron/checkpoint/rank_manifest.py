"""The manifest of one rank, `rank<k>.json`: its files with size and crc32, and the rank's own state. No torch.

A checksum says that a file is intact, not that it belongs here. From format 4 on every file also states its provenance:
save, rank, run, tag and iteration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from data.storage import crc32
from megatron.checkpoint.file_formats import StrictRecord, read_bytes, seal_record, unseal_record
from megatron.checkpoint.manifest import (FORMAT, MANIFEST, FileEntry, Manifest, lineage_to_json,
                                          parse_file_entries)
from megatron.errors import CheckpointError

CONFIG_FILE = "config.json"
SHARED_STATE_FILE = "shared.json"
RANK_0_FILES = (SHARED_STATE_FILE, CONFIG_FILE)
"""Files that rank 0 writes in addition to its own."""


@dataclass(frozen=True)
class FileProvenance:
    """The save and rank that wrote a file. `save_id` ends with the manifest's digest; run, tag and iteration are for
    people."""

    save_id: str
    rank: int
    run_id: str
    tag: str
    iteration: int

    def as_metadata(self) -> dict[str, str]:
        """As safetensors metadata, which holds strings."""
        return {name: str(value) for name, value in asdict(self).items()}


def provenance_of(manifest: Manifest, rank: int) -> FileProvenance:
    return FileProvenance(manifest.save_id, rank, manifest.run_id, manifest.tag, manifest.iteration)


def check_provenance(stated: object, expected: FileProvenance, where: str) -> None:
    """Raise unless `stated`, a file's provenance as dict or metadata, equals `expected`."""
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{where}: does not say which checkpoint it is of")
    for field in fields(FileProvenance):
        value, right = stated.get(field.name), getattr(expected, field.name)
        if type(value) not in (str, type(right)) or str(value) != str(right):
            raise CheckpointError(f"{where}: is of another checkpoint: {field.name} expected {right}, found "
                                  f"{str(value):.80}")
    if unknown := set(stated) - {field.name for field in fields(FileProvenance)}:
        raise CheckpointError(f"{where}: unknown field {min(map(str, unknown))!r} in its origin")


@dataclass(frozen=True)
class RankManifest:
    """The files and state that one rank wrote."""

    provenance: FileProvenance
    files: Mapping[str, FileEntry]
    """Without this file, which ends with its own checksum."""
    state: Any
    """The rank's own state, encoded (json_state.py)."""
    lineage: Mapping[str, Any] | None = None
    """Rank 0 only: a copy of the manifest's lineage, in case the manifest is damaged."""

    @property
    def tensor_files(self) -> list[str]:
        return [name for name in self.files if name not in RANK_0_FILES]

    def to_bytes(self) -> bytes:
        files = {name: asdict(entry) for name, entry in self.files.items()}
        content = {"format": FORMAT, "origin": asdict(self.provenance), "files": files, "state": self.state}
        return seal_record(content if self.lineage is None else {**content, "lineage": self.lineage})


def rank_manifest_name(rank: int) -> str:
    return f"rank{rank}.json"


def tensor_file_name(rank: int, index: int) -> str:
    return f"rank{rank}-{index}.safetensors" if index else f"rank{rank}.safetensors"


def rank_of_file(name: str) -> int | None:
    """The rank that writes a file of this name; None for a foreign name."""
    match = re.fullmatch(r"rank(0|[1-9][0-9]{0,8})(\.json|(-[1-9][0-9]{0,8})?\.safetensors)", name)
    return int(match[1]) if match else 0 if name in RANK_0_FILES else None


def read_rank_manifest(folder: Path, manifest: Manifest, rank: int) -> tuple[RankManifest, FileEntry]:
    """The manifest of one rank, checked against `manifest`, and the size and checksum of its file."""
    name = rank_manifest_name(rank)
    where = f"tag {manifest.tag}: file {name}"
    if not (folder / name).is_file():
        raise CheckpointError(f"tag {manifest.tag}: shard file {name} (rank {rank} of {manifest.world_size}) missing")
    data = read_bytes(folder / name, where)
    record = StrictRecord(unseal_record(data, where), where)
    if (version := record.take_count("format")) != manifest.format:
        raise CheckpointError(f"{where}: format {version}, expected {manifest.format}")
    provenance = provenance_of(manifest, rank)
    if manifest.has_provenance:
        check_provenance(record.take_field("origin", dict), provenance, where)
    elif (found := (record.take_field("save_id", str), record.take_count("rank"))) != (provenance.save_id, rank):
        raise CheckpointError(f"{where}: expected rank {rank} of save {provenance.save_id}, found rank {found[1]} of "
                              f"save {found[0]:.40}: it is of another checkpoint")
    lineage = record.take_field("lineage", dict) if rank == 0 and manifest.format > 4 else None
    if lineage not in (None, lineage_to_json(manifest.branch, manifest.history)):
        raise CheckpointError(f"{where}: its lineage is not the one that {MANIFEST} states")
    rank_manifest = RankManifest(provenance, parse_file_entries(record.take_field("files", dict), where),
                                 record.fields.pop("state", None), lineage)
    record.check_all_taken()
    if unknown := [file for file in rank_manifest.files if file == name or rank_of_file(file) != rank]:
        raise CheckpointError(f"{where}: lists {unknown[0]!r}, which rank {rank} does not write")
    return rank_manifest, FileEntry(len(data), f"{crc32(data):08x}")
