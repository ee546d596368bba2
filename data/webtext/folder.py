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

from data.recorded import PLACE, STAGE_FILE, WORK, check_shards
from data.storage import DataError, UsageError, exclusive, fsync_directory, fsync_file, make_folder, writing
from data.webtext.record import Output, Record, describe, digest, is_whole, merge, read_json, read_record

LOG, LOGGED_BY = "dropped.jsonl", "dedup"
"""A file that is no shard, and the stage that writes it."""
CLEARED = "cleared.json"
"""In `.work`: the record of a stage that is being removed."""


@contextmanager
def building(output: Path, key: Mapping[str, Any]) -> Iterator[tuple[Record | None, Path]]:
    """The record of a stage that is done, or else the folder to make it in, while no other process does.

    What an earlier stage with another key left here goes; what is not a stage's is not touched.
    """
    make_folder(output)
    folder = output / WORK / digest(key)
    with exclusive(output / ".lock"):
        record = read_record(output)
        if record and record.key == key and is_whole(output, record):
            shutil.rmtree(output / WORK, ignore_errors=True)  # killed between the record and this
            yield record, folder
            return
        if not folder.is_dir():
            with writing(output):
                clear(output)
        make_folder(folder)
        yield None, folder


def check_apart(inputs: Iterable[str | Path], output: Path) -> None:
    """What is made in a folder replaces what is there, and lies among what is read from a folder around it."""
    place = Path(os.path.realpath(output))
    for given in inputs:
        path = Path(os.path.realpath(given))
        if not path.is_dir():
            within = path.relative_to(place).parts if place in path.parents else ()
            is_input = bool(within) and (within[0] == WORK or PLACE.fullmatch("/".join(within)) is not None
                                         or within in ((STAGE_FILE,), (LOG,)))
            how = "holds" if is_input else ""
        else:
            how = ("is" if path == place else "lies in" if path in place.parents else
                   "holds" if place in path.parents else "")
        if how:
            raise UsageError(f"--output {output}: {how} {given}, which is read; choose a folder beside it")


def clear(output: Path) -> None:
    """Remove a stage: the shards that it lists, and nothing else. `.work` stays to the end: it says whose they are."""
    work, record = output / WORK, output / STAGE_FILE
    if record.exists() and read_record(output) is None:
        raise DataError(f"{record}: not the record of a stage; remove that folder, or choose another --output")
    names = {name for path in (record, *work.rglob(STAGE_FILE), work / CLEARED) for name in _names(path)}
    if any(path.name not in names for path in output.glob("part-*.jsonl")):
        raise DataError(f"{output}: expected a new folder or one of a stage, found shards no stage made; choose "
                        "another --output")
    if not record.exists() and not work.exists():
        return
    make_folder(work)
    if record.exists():
        os.replace(record, work / CLEARED)
        fsync_directory(output)
    for name in names:
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def _names(path: Path) -> set[str]:
    """The files that the record of a stage lists."""
    value = read_json(path)
    try:
        names = {str(output["name"]) for output in value["outputs"]}
        log = {LOG} if value["key"]["stage"] == LOGGED_BY else set()
        return {name for name in names if PLACE.fullmatch(name)} | log
    except (KeyError, TypeError):
        return set()


def publish(record: Record, folder: Path, output: Path) -> Record:
    """Move the shards to where they belong, then write the record. What it lists is ours from here on, also for a
    process that finds only some of it there."""
    begun = _names(folder / STAGE_FILE)
    with writing(output):
        record.write(folder)
        moved = [shard.name for shard in record.outputs] + [log.name for log in folder.glob(LOG)]
        for name in moved:
            if (output / name).exists() and name not in begun:
                raise DataError(f"{output / name}: was not made by this stage, which would replace it; move it "
                                "away, or choose another --output")
        for name in moved:
            if (folder / name).exists():
                make_folder((output / name).parent)
                os.replace(folder / name, output / name)
        if not is_whole(output, record):
            raise DataError(f"{output}: a shard is gone that this stage has just written; run the command again, and "
                            "nothing else in that folder")
        for place in {(output / shard.name).parent for shard in record.outputs}:
            fsync_directory(place)
        record.write(output)
        shutil.rmtree(output / WORK, ignore_errors=True)
    return record


def written(folder: Path) -> tuple[Output, ...]:
    """The shards in a folder and its folders."""
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("**/part-*.jsonl"))
    return tuple(describe(folder, name) for name in names)


def run_merge(folders: Sequence[Path], output: Path) -> Record:
    """One folder of the shares that several machines made. The shards are linked where that is possible."""
    check_apart(folders, output)
    merged = merge(folders)
    shards = {part / shard.name: shard for part in folders for shard in shards_of_share(part)}
    with building(output, merged.key) as (record, folder):
        if record:
            return record
        check_shards({str(path): shard.sha256 for path, shard in shards.items()}, len(os.sched_getaffinity(0)))
        with writing(output):
            for path, shard in shards.items():
                target = folder / shard.name
                make_folder(target.parent)
                target.unlink(missing_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(path, target)
                    fsync_file(target)
        return publish(merged, folder, output)


def shards_of_share(folder: Path) -> tuple[Output, ...]:
    record = read_record(folder)
    return record.outputs if record else ()
