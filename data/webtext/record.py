"""`stage.json`: what a stage was made from, what it did, what is in its folder. Written last.

The *key* of a stage is everything its output depends on: its name and parameters, the content of its inputs, which
share of them this machine processed. A folder whose record has the same key is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.recorded import STAGE_FILE
from data.storage import READ_BYTES, DataError, write_json_atomic
from data.webtext.counts import DocumentCounts

SINGLE_MACHINE = (0, 1)
REVISION = 3
"""Raised whenever the same inputs and parameters would give another output."""


@dataclass(frozen=True)
class OutputShard:
    """One shard."""

    name: str
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StageRecord:
    """A finished stage."""

    key: Mapping[str, Any]
    counts: DocumentCounts
    outputs: tuple[OutputShard, ...]
    notes: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        return str(self.key["stage"])

    def write(self, folder: Path) -> None:
        write_json_atomic(folder / STAGE_FILE, {
            "key": self.key, "counts": self.counts.to_json(), "notes": self.notes,
            "outputs": [asdict(output) for output in self.outputs]})


def stage_key(stage: str, parameters: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]],
              shard: tuple[int, int] = SINGLE_MACHINE) -> dict[str, Any]:
    """As it comes back from JSON, so that equal keys compare equal."""
    key = {"stage": stage, "revision": REVISION, "parameters": parameters, "shard": list(shard), "inputs": inputs}
    return dict(json.loads(json.dumps(key)))


def read_json_or_none(path: Path) -> Any:
    """The value in a file; None where there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def key_digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def read_stage_record(folder: Path) -> StageRecord | None:
    """The record of a folder; None where there is none, or none that can be read."""
    value = read_json_or_none(folder / STAGE_FILE)
    try:
        return StageRecord(value["key"], DocumentCounts.from_json(value["counts"]),
                           tuple(OutputShard(**output) for output in value["outputs"]), tuple(value["notes"]))
    except (KeyError, TypeError):
        return None


def shards_are_complete(folder: Path, record: StageRecord) -> bool:
    """Whether every shard is there in its size."""
    return all((folder / output.name).is_file() and (folder / output.name).stat().st_size == output.bytes
               for output in record.outputs)


def merge_records(folders: Sequence[Path]) -> StageRecord:
    """The record of the whole from those of its shares: the one that a run on a single machine would have left."""
    records = []
    for folder in folders:
        record = read_stage_record(folder)
        if record is None or not shards_are_complete(folder, record):
            raise DataError(f"{folder}: expected the folder of a stage that is complete; run its command again first")
        records.append(record)
    records.sort(key=lambda record: list(record.key["shard"]))
    found = [record.key["shard"] for record in records]
    if found != [[k, len(records)] for k in range(len(records))]:
        raise DataError(f"merge: expected each share of {len(records)} once, found "
                        f"{', '.join(f'{i}/{n}' for i, n in found)}")
    names = [output.name for record in records for output in record.outputs]
    if twice := {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set():
        raise DataError(f"merge: two shares have a shard {min(twice)}; run their commands again")
    first = records[0].key
    for record in records[1:]:
        for name in ("stage", "revision", "parameters"):
            if record.key[name] != first[name]:
                raise DataError(f"merge: the shares differ in {name}: {first[name]} and {record.key[name]}")
    inputs = {json.dumps(source): source for record in records for source in record.key["inputs"]}
    key = stage_key(str(first["stage"]), first["parameters"], list(inputs.values()))
    return StageRecord(key, sum((record.counts for record in records), DocumentCounts()),
                       tuple(output for record in records for output in record.outputs),
                       tuple(dict.fromkeys(note for record in records for note in record.notes)))


def describe_shard(folder: Path, name: str) -> OutputShard:
    """A shard that someone else wrote."""
    sha256, size, documents = hashlib.sha256(), 0, 0
    with open(folder / name, "rb") as file:
        while chunk := file.read(READ_BYTES):
            sha256.update(chunk)
            size += len(chunk)
            documents += chunk.count(b"\n")
    return OutputShard(name, documents, size, sha256.hexdigest())
