"""The folder of a stage: made whole, or not at all.

Everything is made in `FOLDER/.work/<digest of the key>/` and moved into FOLDER when all of it is there; `stage.json`
comes last. A process killed at any moment leaves a folder from which the same command goes on, and which another
command clears: of the files that a record of ours lists, and of no others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.recorded import SHARD_PATH_PATTERN, STAGE_FILE, WORK_FOLDER, check_sha256
from data.storage import (DataError, UsageError, fsync_directory, fsync_file, make_folder, wait_for_lock,
                          write_errors_for)
from data.webtext.record import (OutputShard, StageRecord, describe_shard, key_digest, merge_records, read_json_or_none,
                                 read_stage_record, shards_are_complete)

DROP_LOG, DROP_LOG_STAGE = "dropped.jsonl", "dedup"
"""A file that is no shard, and the stage that writes it."""
CLEARED_RECORD = "cleared.json"
"""In `.work`: the record of a stage that is being removed."""


@contextmanager
def open_stage_folder(output: Path, key: Mapping[str, Any]) -> Iterator[tuple[StageRecord | None, Path]]:
    """The record of a stage that is done, or else the folder to make it in, while no other process does.

    What an earlier stage with another key left here goes; what is not a stage's is not touched.
    """
    make_folder(output)
    folder = output / WORK_FOLDER / key_digest(key)
    with wait_for_lock(output / ".lock"):
        record = read_stage_record(output)
        if record and record.key == key and shards_are_complete(output, record):
            shutil.rmtree(output / WORK_FOLDER, ignore_errors=True)  # killed between the record and this
            yield record, folder
            return
        if not folder.is_dir():
            with write_errors_for(output):
                remove_stage(output)
        make_folder(folder)
        yield None, folder


def check_output_is_apart(inputs: Iterable[str | Path], output: Path) -> None:
    """What is made in a folder replaces what is there, and lies among what is read from a folder around it."""
    place = Path(os.path.realpath(output))
    for given in inputs:
        path = Path(os.path.realpath(given))
        if not path.is_dir():
            within = path.relative_to(place).parts if place in path.parents else ()
            is_input = bool(within) and (within[0] == WORK_FOLDER or SHARD_PATH_PATTERN.fullmatch("/".join(within))
                                         is not None or within in ((STAGE_FILE, ), (DROP_LOG, )))
            relation = "holds" if is_input else ""
        else:
            relation = ("is" if path == place else "lies in" if path in place.parents else
                        "holds" if place in path.parents else "")
        if relation:
            raise UsageError(f"--output {output}: {relation} {given}, which is read; choose a folder beside it")


def remove_stage(output: Path) -> None:
    """Remove a stage: the shards that it lists, and nothing else. `.work` stays to the end: it says whose they are."""
    work, record = output / WORK_FOLDER, output / STAGE_FILE
    if record.exists() and read_stage_record(output) is None:
        raise DataError(f"{record}: not the record of a stage; remove that folder, or choose another --output")
    names = {
        name
        for path in (record, *work.rglob(STAGE_FILE), work / CLEARED_RECORD)
        for name in _recorded_files(path)
    }
    if any(path.name not in names for path in output.glob("part-*.jsonl")):
        raise DataError(f"{output}: expected a new folder or one of a stage, found shards no stage made; choose "
                        "another --output")
    if not record.exists() and not work.exists():
        return
    make_folder(work)
    if record.exists():
        os.replace(record, work / CLEARED_RECORD)
        fsync_directory(output)
    for name in names:
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def _recorded_files(path: Path) -> set[str]:
    """The files that the record of a stage lists."""
    value = read_json_or_none(path)
    try:
        names = {str(output["name"]) for output in value["outputs"]}
        log = {DROP_LOG} if value["key"]["stage"] == DROP_LOG_STAGE else set()
        return {name for name in names if SHARD_PATH_PATTERN.fullmatch(name)} | log
    except (KeyError, TypeError):
        return set()


def publish_stage(record: StageRecord, folder: Path, output: Path) -> StageRecord:
    """Move the shards to where they belong, then write the record. What it lists is ours from here on, also for a
    process that finds only some of it there."""
    moved_before = _recorded_files(folder / STAGE_FILE)
    with write_errors_for(output):
        record.write(folder)
        moved = [shard.name for shard in record.outputs] + [log.name for log in folder.glob(DROP_LOG)]
        for name in moved:
            if (output / name).exists() and name not in moved_before:
                raise DataError(f"{output / name}: was not made by this stage, which would replace it; move it "
                                "away, or choose another --output")
        for name in moved:
            if (folder / name).exists():
                make_folder((output / name).parent)
                os.replace(folder / name, output / name)
        if not shards_are_complete(output, record):
            raise DataError(f"{output}: a shard is gone that this stage has just written; run the command again, and "
                            "nothing else in that folder")
        for place in {(output / shard.name).parent for shard in record.outputs}:
            fsync_directory(place)
        record.write(output)
        shutil.rmtree(output / WORK_FOLDER, ignore_errors=True)
    return record


def describe_shards_in(folder: Path) -> tuple[OutputShard, ...]:
    """The shards in a folder and its folders."""
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("**/part-*.jsonl"))
    return tuple(describe_shard(folder, name) for name in names)


def merge_shares(folders: Sequence[Path], output: Path) -> StageRecord:
    """One folder of the shares that several machines made. The shards are linked where that is possible."""
    check_output_is_apart(folders, output)
    merged = merge_records(folders)
    shards = {part / shard.name: shard for part in folders for shard in shards_of_record(part)}
    with open_stage_folder(output, merged.key) as (record, folder):
        if record:
            return record
        check_sha256({str(path): shard.sha256 for path, shard in shards.items()}, len(os.sched_getaffinity(0)))
        with write_errors_for(output):
            for path, shard in shards.items():
                target = folder / shard.name
                make_folder(target.parent)
                target.unlink(missing_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(path, target)
                    fsync_file(target)
        return publish_stage(merged, folder, output)


def shards_of_record(folder: Path) -> tuple[OutputShard, ...]:
    record = read_stage_record(folder)
    return record.outputs if record else ()
