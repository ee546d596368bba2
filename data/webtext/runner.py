"""One stage from inputs to a finished folder: workers, resuming, no half-made results.

Everything is made in `FOLDER/.work/<digest of the key>/` and moved into FOLDER when all of it is there; `stage.json`
comes last. A map stage is resumed shard by shard: a shard counts when its own small record stands beside it. Shard k of
the output is made of unit k of the input, by whichever worker: the files are the same for any number of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from data.parallel import ordered_map
from data.storage import (
    DataError, crc32_file, exclusive, fsync_directory, make_folder, staged_file, write_json_atomic, writing)
from data.webtext.counts import Counts
from data.webtext.document import Document, Drop, Fault, Function
from data.webtext.inputs import STAGE_FILE, WORK, Source, Unit, find, plan, share, shards_of, total_size
from data.webtext.reading import Read, Reading, read_unit
from data.webtext.record import Output, Record, describe, digest, is_whole, make_key, read_record

SHARD_BYTES = 1 << 24


Report = Callable[[Counts], None]
"""A global stage calls it with the counts of what it has just written."""
Run = Callable[[Sequence[Path], Path, Any, int, Report], None]
"""(shards in order, folder for what it writes, options, workers, report)"""


@dataclass(frozen=True)
class MapStage:
    """A stage that looks at one document at a time."""

    name: str
    make: Callable[[Any], Function]
    """A function of a module: workers call it with the options, once each."""
    options: Any
    """A frozen dataclass of plain values."""
    then: Run | None = None
    """A second pass, over all that the first kept; not where this machine has a share of the documents only."""


@dataclass(frozen=True)
class GlobalStage:
    """A stage that looks at all documents."""

    name: str
    run: Run
    options: Any


@dataclass(frozen=True)
class Work:
    """How a stage is run. Only `shard_bytes` and `shard` have a part in what comes out."""

    workers: int = 1
    shard: tuple[int, int] = (0, 1)
    """This machine's number, from 0, of how many."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class Job:
    """One unit of a map stage and the shard it becomes."""

    unit: Unit
    target: Path


def run_map(stage: MapStage, inputs: Sequence[str | Path], output: Path, reading: Reading = Reading(),
            work: Work = Work()) -> Record:
    """Bring a map stage to its end, from wherever it stopped."""
    sources, notes = find(inputs, reading.format)
    units = plan(sources, work.shard_bytes)
    mine = share(len(units), *work.shard)
    used = list(dict.fromkeys(piece.source for k in mine for piece in units[k]))
    parameters = asdict(stage.options) | {"reading": asdict(reading), "shard_bytes": work.shard_bytes}
    key = make_key(stage.name, parameters, fingerprints(used, work.workers), work.shard)
    with building(output, key) as (record, folder):
        if record:
            return record
        parts = finish([Job(units[k], folder / f"part-{k:05d}.jsonl") for k in mine], stage, output, reading, work)
        counts = sum((counts for _, counts in parts), Counts())
        shards = tuple(shard for shard, _ in parts)
        if stage.then and work.shard == (0, 1):
            second = make_folder(folder / "then")
            kept = run_all(stage.then, [folder / shard.name for shard in shards], second, stage, work)
            return publish(Record(key, counts.then(kept), written(second), tuple(notes)), second, output)
        return publish(Record(key, counts, shards, tuple(notes)), folder, output)


def run_global(stage: GlobalStage, inputs: Sequence[str | Path], output: Path, work: Work = Work()) -> Record:
    """Bring a global stage to its end; what it finds of itself in its folder is its own business."""
    sources = [source for path in inputs for source in shards_of(Path(path))]
    key = make_key(stage.name, asdict(stage.options), fingerprints(sources, work.workers), (0, 1))
    with building(output, key) as (record, folder):
        if record:
            return record
        counts = run_all(stage.run, [Path(source.path) for source in sources], folder, stage, work)
        return publish(Record(key, counts, written(folder)), folder, output)


def run_all(run: Run, shards: Sequence[Path], folder: Path, stage: MapStage | GlobalStage, work: Work) -> Counts:
    """Run a pass over all documents; its counts."""
    counts = Counts()
    size = sum(shard.stat().st_size for shard in shards)
    with bar_of(stage.name, size) as bar:
        def report(part: Counts) -> None:
            nonlocal counts
            counts += part
            bar.update(part.bytes_in)

        run(shards, folder, stage.options, work.workers, report)
    return counts


def bar_of(name: str, size: int) -> tqdm[NoReturn]:
    """A progress bar over bytes, on a terminal only."""
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None)


def written(folder: Path) -> tuple[Output, ...]:
    """The shards in a folder and its folders."""
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("**/part-*.jsonl"))
    return tuple(describe(folder, name) for name in names)


def fingerprints(sources: Sequence[Source], workers: int) -> list[dict[str, Any]]:
    """Name and content of every input; files that are no shards are read for it."""
    unknown = [source.path for source in sources if source.sha256 is None]
    try:
        crcs = dict(zip(unknown, ordered_map(crc32_file, unknown, min(workers, len(unknown) // 64))))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror}") from error
    return [{"name": source.name, "format": source.format, "bytes": source.size,
             "content": source.sha256 or crcs[source.path]} for source in sources]


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


def finish(jobs: Sequence[Job], stage: MapStage, output: Path, reading: Reading, work: Work
           ) -> list[tuple[Output, Counts]]:
    """Shard and counts of every job, made now or before."""
    done = {job.target: part for job in jobs if (part := read_part(job.target, output))}
    left = [job for job in jobs if job.target not in done]
    made = ordered_map(partial(make_part, stage=stage, reading=reading), left, min(work.workers, len(left)))
    with bar_of(stage.name, sum(total_size(job.unit) for job in jobs)) as bar:
        bar.update(sum(total_size(job.unit) for job in jobs if job.target in done))
        for job, part in zip(left, made):
            done[job.target] = part
            bar.update(total_size(job.unit))
    return [done[job.target] for job in jobs]


def make_part(job: Job, stage: MapStage, reading: Reading) -> tuple[Output, Counts]:
    """Run the stage over one unit; the shard first, then the record beside it that says so."""
    function = function_of(stage)
    counts, sha256 = Counts(), hashlib.sha256()
    with staged_file(job.target) as file:
        for record in read_unit(job.unit, reading):
            counts.repaired.update(record.repairs)
            kept = apply(function, record, reading)
            if isinstance(kept, Drop):
                counts.drop(kept.reason, record.size)
            else:
                line = kept.line()
                counts.keep(record.size, len(line))
                sha256.update(line)
                file.write(line)
        size = file.tell()
    shard = Output(job.target.name, counts.documents_kept, size, sha256.hexdigest())
    write_json_atomic(job.target.with_suffix(".json"), {"shard": asdict(shard), "counts": counts.to_json()})
    return shard, counts


def read_part(target: Path, output: Path) -> tuple[Output, Counts] | None:
    """What `make_part` left, if it came to its end."""
    try:
        value = json.loads(target.with_suffix(".json").read_bytes())
    except FileNotFoundError:
        return None
    shard = Output(**value["shard"])
    whole = any(place.is_file() and place.stat().st_size == shard.bytes for place in (target, output / target.name))
    return (shard, Counts.from_json(value["counts"])) if whole else None


@cache
def function_of(stage: MapStage) -> Function:
    """Models and word lists are loaded once in each process."""
    made: Function = stage.make(stage.options)
    return made


def apply(function: Function, record: Read, reading: Reading) -> Document | Drop:
    """The stage's word on one record. A fault of the input or of a library is an error only when strict."""
    if isinstance(record.value, Fault):
        fault = record.value
    else:
        try:
            return function(record.value)
        except DataError:  # of the stage itself: a package is missing, say
            raise
        except Exception as error:  # a library that does not survive the document
            fault = Fault("failed", f"{type(error).__name__}: {error}")
    if reading.on_error == "strict":
        raise DataError(f"{record.where()} {fault}")
    return Drop(fault.reason)
