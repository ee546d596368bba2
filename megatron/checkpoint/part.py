"""The part of a manifest that one rank writes, `rank<k>.json`: its files with size and checksum, and its own state.

Nobody reads them all: a rank that verifies a checkpoint reads its share of them, and a rank that loads one those of
the ranks whose files hold what it needs. A part that was copied from another save is known by its origin. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.storage import crc32
from megatron.checkpoint.manifest import FORMAT, FileEntry, Manifest, files_from_json
from megatron.checkpoint.origin import Origin, check_origin, origin_of
from megatron.checkpoint.strict import Record, read_bytes, seal, unseal
from megatron.errors import CheckpointError

CONFIG = "config.json"
SHARED_STATE = "shared.json"
SHARED = (SHARED_STATE, CONFIG)
"""Files that rank 0 writes beside its own."""


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    origin: Origin
    files: Mapping[str, FileEntry]
    """This file is not among them: it ends with its own checksum."""
    state: Any
    """The rank's own state, encoded (state.py)."""

    @property
    def tensor_files(self) -> list[str]:
        return [name for name in self.files if name not in SHARED]

    def to_bytes(self) -> bytes:
        files = {name: entry.as_dict() for name, entry in self.files.items()}
        return seal({"format": FORMAT, "origin": self.origin.as_dict(), "files": files, "state": self.state})


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
    part = Part(origin, files_from_json(record.take("files", dict), where), record.fields.pop("state", None))
    record.done()
    if strange := [file for file in part.files if file == name or writer_of(file) != rank]:
        raise CheckpointError(f"{where}: lists {strange[0]!r}, which rank {rank} does not write")
    return part, FileEntry(len(data), f"{crc32(data):08x}")
