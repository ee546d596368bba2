"""The part of a manifest that one rank writes, `rank<k>.json`: its files with size and checksum, and its own state.

Nobody reads them all: a rank that verifies a checkpoint reads its share of them, and a rank that loads one those of
the ranks whose files hold what it needs. A part that was copied from another save is known by its `save_id`. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.storage import crc32
from megatron.checkpoint.manifest import FORMAT, FileEntry, Manifest, files_from_json
from megatron.checkpoint.strict import Record, read_bytes, seal, unseal
from megatron.errors import CheckpointError

SHARED = ("shared.json", "config.json")
"""Files that rank 0 writes beside its own."""


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    save_id: str
    rank: int
    files: Mapping[str, FileEntry]
    """This file is not among them: it ends with its own checksum."""
    state: Any
    """The rank's own state, encoded (state.py)."""

    @property
    def tensor_files(self) -> list[str]:
        return [name for name in self.files if name not in SHARED]

    def to_bytes(self) -> bytes:
        files = {name: asdict(entry) for name, entry in self.files.items()}
        return seal({"format": FORMAT, "save_id": self.save_id, "rank": self.rank, "files": files,
                     "state": self.state})


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
    if (version := record.count("format")) != FORMAT:
        raise CheckpointError(f"{where}: format {version}, expected {FORMAT}")
    part = Part(record.take("save_id", str), record.count("rank"), files_from_json(record.take("files", dict), where),
                record.fields.pop("state", None))
    record.done()
    if (part.save_id, part.rank) != (manifest.save_id, rank):
        raise CheckpointError(f"{where}: expected rank {rank} of save {manifest.save_id}, found rank {part.rank} of "
                              f"save {part.save_id:.40}: it is of another checkpoint")
    if strange := [file for file in part.files if file == name or writer_of(file) != rank]:
        raise CheckpointError(f"{where}: lists {strange[0]!r}, which rank {rank} does not write")
    return part, FileEntry(len(data), f"{crc32(data):08x}")
