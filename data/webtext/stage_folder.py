"""The output folder of a stage and its `stage.json`: complete, or resumable by the same command.

Everything is built in `FOLDER/.work/<digest of the key>/` and moved when complete; `stage.json` is written last. The
*key* holds all that the output depends on: stage, parameters, input content, machine share. A folder whose record has
the same key is done. Another command removes only the files that a record lists.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.input_files import SHARD_PATH_PATTERN, STAGE_FILE, WORK_FOLDER, check_sha256
from data.storage import (READ_BYTES, DataError, UsageError, fsync_directory, fsync_file, make_folder,
                          read_json_or_none, wait_for_lock, write_errors_for, write_json_atomic)
from data.webtext.documents import DocumentCounts

SINGLE_MACHINE = (0, 1)
REVISION = 3
"""Increment it when the same inputs and parameters would give another output."""
DROP_LOG, DROP_LOG_STAGE = "dropped.jsonl", "dedup"
"""A file that is not a shard, and the stage that writes it."""
CLEARED_RECORD = "cleared.json"
"""In `.work`: the record of a stage whose removal is in progress."""


@dataclass(frozen=True)
class OutputShard:
    name: str
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StageRecord:
    """What a stage has written; in the work folder of a stage also what it has written of one shard."""

    key: Mapping[str, Any]
    counts: DocumentCounts
    outputs: tuple[OutputShard, ...]
    notes: tuple[str, ...] = ()
    """What was left out, and files that could not be read to the end."""

    @property
    def stage(self) -> str:
        return str(self.key["stage"])

    def write(self, path: Path) -> None:
        write_json_atomic(path, {"key": self.key, "counts": self.counts.to_json(), "notes": self.notes,
                                 "outputs": [asdict(output) for output in self.outputs]})

    def is_complete_in(self, folder: Path) -> bool:
        """Whether every shard exists with its size."""
        return all((folder / output.name).is_file() and (folder / output.name).stat().st_size == output.bytes
                   for output in self.outputs)


def read_stage_record(path: Path) -> StageRecord | None:
    """The record in a file; None if it is missing or invalid."""
    value = read_json_or_none(path)
    try:
        return StageRecord(value["key"], DocumentCounts.from_json(value["counts"]),
                           tuple(OutputShard(**output) for output in value["outputs"]), tuple(value["notes"]))
    except (KeyError, TypeError):
        return None


def stage_key(stage: str, parameters: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]],
              shard: tuple[int, int] = SINGLE_MACHINE) -> dict[str, Any]:
    """The key, normalized through JSON, so that equal keys compare equal."""
    key = {"stage": stage, "revision": REVISION, "parameters": parameters, "shard": list(shard), "inputs": inputs}
    return dict(json.loads(json.dumps(key)))


@contextmanager
def open_stage_folder(output: Path, key: Mapping[str, Any]) -> Iterator[tuple[StageRecord | None, Path]]:
    """Lock the folder; yield (record of the finished stage, or None, work folder). Removes an earlier stage with
    another key; other files are not touched."""
    make_folder(output)
    folder = output / WORK_FOLDER / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    with wait_for_lock(output / ".lock"):
        record = read_stage_record(output / STAGE_FILE)
        if record and record.key == key and record.is_complete_in(output):
            shutil.rmtree(output / WORK_FOLDER, ignore_errors=True)  # left by a kill after the record was written
            yield record, folder
            return
        if not folder.is_dir():
            with write_errors_for(output):
                remove_stage(output)
        make_folder(folder)
        yield None, folder


def check_output_is_apart(inputs: Iterable[str | Path], output: Path) -> None:
    """Raise if an output folder overlaps an input: outputs replace files, and would be read as input."""
    place = Path(os.path.realpath(output))
    for given in inputs:
        path = Path(os.path.realpath(given))
        if not path.is_dir():
            within = path.relative_to(place).parts if place in path.parents else ()
            is_input = within and (within[0] == WORK_FOLDER or SHARD_PATH_PATTERN.fullmatch("/".join(within))
                                   or within in ((STAGE_FILE,), (DROP_LOG,)))
            relation = "holds" if is_input else ""
        else:
            relation = ("is" if path == place else "lies in" if path in place.parents else
                        "holds" if place in path.parents else "")
        if relation:
            raise UsageError(f"--output {output}: {relation} {given}, which is read; choose a folder beside it")


def remove_stage(output: Path) -> None:
    """Delete the shards that a stage lists and nothing else. `.work` is removed last, since it records the owner."""
    work, record = output / WORK_FOLDER, output / STAGE_FILE
    if record.exists() and read_stage_record(record) is None:
        raise DataError(f"{record}: not the record of a stage; remove that folder, or choose another --output")
    names = {name for path in (record, *work.rglob(STAGE_FILE), work / CLEARED_RECORD)
             for name in _recorded_files(path)}
    if any(path.name not in names for path in output.glob("part-*.jsonl")):
        raise DataError(f"{output}: expected a new folder or one of a stage, found shards no stage made; choose "
                        "another --output")
    if record.exists():
        make_folder(work)
        os.replace(record, work / CLEARED_RECORD)
        fsync_directory(output)
    for name in names:
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def _recorded_files(path: Path) -> set[str]:
    """The files that a stage's record lists, within its folder."""
    record = read_stage_record(path)
    if record is None:
        return set()
    log = {DROP_LOG} if record.stage == DROP_LOG_STAGE else set()
    return {output.name for output in record.outputs if SHARD_PATH_PATTERN.fullmatch(output.name)} | log


def publish_stage(record: StageRecord, folder: Path, output: Path) -> StageRecord:
    """Move the shards into place, then write the record; its copy in the work folder marks moved ones as ours."""
    moved_before = _recorded_files(folder / STAGE_FILE)
    with write_errors_for(output):
        record.write(folder / STAGE_FILE)
        moved = [shard.name for shard in record.outputs] + [log.name for log in folder.glob(DROP_LOG)]
        for name in moved:
            if (output / name).exists() and name not in moved_before:
                raise DataError(f"{output / name}: was not made by this stage, which would replace it; move it "
                                "away, or choose another --output")
        for name in moved:
            if (folder / name).exists():
                make_folder((output / name).parent)
                os.replace(folder / name, output / name)
        for place in {(output / shard.name).parent for shard in record.outputs}:
            fsync_directory(place)
        record.write(output / STAGE_FILE)
        shutil.rmtree(output / WORK_FOLDER, ignore_errors=True)
    return record


def describe_shards_in(folder: Path) -> tuple[OutputShard, ...]:
    """The shards in a folder and its subfolders."""
    shards = []
    for name in sorted(str(path.relative_to(folder)) for path in folder.glob("**/part-*.jsonl")):
        sha256, size, documents = hashlib.sha256(), 0, 0
        with open(folder / name, "rb") as file:
            while chunk := file.read(READ_BYTES):
                sha256.update(chunk)
                size += len(chunk)
                documents += chunk.count(b"\n")
        shards.append(OutputShard(name, documents, size, sha256.hexdigest()))
    return tuple(shards)


def merge_shares(folders: Sequence[Path], output: Path) -> StageRecord:
    """Combine the shares of several machines into what a single one would have written; links shards if possible."""
    check_output_is_apart(folders, output)
    shares = []
    for folder in folders:
        record = read_stage_record(folder / STAGE_FILE)
        if record is None or not record.is_complete_in(folder):
            raise DataError(f"{folder}: expected the folder of a stage that is complete; run its command again first")
        shares.append((record, folder))
    shares.sort(key=lambda share: list(share[0].key["shard"]))
    records = [record for record, _ in shares]
    found, first = [record.key["shard"] for record in records], records[0].key
    if found != [[k, len(records)] for k in range(len(records))]:
        raise DataError(f"merge: expected each share of {len(records)} once, found "
                        f"{', '.join(f'{i}/{n}' for i, n in found)}")
    for record in records:
        for name in ("stage", "revision", "parameters"):
            if record.key[name] != first[name]:
                raise DataError(f"merge: the shares differ in {name}: {first[name]} and {record.key[name]}")
    inputs = {json.dumps(source): source for record in records for source in record.key["inputs"]}
    merged = StageRecord(stage_key(str(first["stage"]), first["parameters"], list(inputs.values())),
                         sum((record.counts for record in records), DocumentCounts()),
                         tuple(shard for record in records for shard in record.outputs),
                         tuple(dict.fromkeys(note for record in records for note in record.notes)))
    with open_stage_folder(output, merged.key) as (done, work):
        if done:
            return done
        shards = {folder / shard.name: shard for record, folder in shares for shard in record.outputs}
        check_sha256({str(path): shard.sha256 for path, shard in shards.items()}, len(os.sched_getaffinity(0)))
        with write_errors_for(output):
            for path, shard in shards.items():
                target = work / shard.name
                make_folder(target.parent)
                target.unlink(missing_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(path, target)
                    fsync_file(target)
        return publish_stage(merged, work, output)
