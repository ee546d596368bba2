"""The folder of a stage: made whole, or not at all.

Everything is made in `FOLDER/.work/<digest of the key>/` and moved into FOLDER when all of it is there; `stage.json`
comes last. A process killed at any moment leaves a folder from which the same command goes on, and which another
command clears.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.recorded import STAGE_FILE
from data.storage import DataError, exclusive, fsync_directory, fsync_file, make_folder, writing
from data.webtext.inputs import WORK
from data.webtext.record import Output, Record, describe, digest, is_whole, merge, read_record


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


def clear(output: Path) -> None:
    """Remove a stage, and nothing else. `.work` stays to the end: it says whose the shards are."""
    if not (output / STAGE_FILE).exists() and not (output / WORK).exists():
        if any(output.glob("part-*.jsonl")):
            raise DataError(f"{output}: expected a new folder or one of a stage, found shards no stage made; choose "
                            "another --output")
        return
    make_folder(output / WORK)
    (output / STAGE_FILE).unlink(missing_ok=True)
    for shard in [*output.glob("**/part-*.jsonl"), *output.glob("dropped.jsonl")]:
        shard.unlink()
    shutil.rmtree(output / WORK, ignore_errors=True)


def publish(record: Record, folder: Path, output: Path) -> Record:
    """Move the shards to where they belong (some may be there), then write the record."""
    with writing(output):
        for shard in record.outputs:
            if (folder / shard.name).exists():
                make_folder((output / shard.name).parent)
                os.replace(folder / shard.name, output / shard.name)
        for log in folder.glob("dropped.jsonl"):
            os.replace(log, output / log.name)
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
    merged = merge(folders)
    with building(output, merged.key) as (record, folder):
        if record:
            return record
        with writing(output):
            for part in folders:
                for path in part.glob("**/part-*.jsonl"):
                    target = folder / path.relative_to(part)
                    make_folder(target.parent)
                    target.unlink(missing_ok=True)
                    try:
                        os.link(path, target)
                    except OSError:  # another file system, or one without links
                        shutil.copyfile(path, target)
                        fsync_file(target)
        return publish(merged, folder, output)
