"""Run one stage from its inputs to a finished folder: units to workers, counts and shards back.

Output shard k comes from input unit k, so files do not depend on the number of workers. A map stage resumes shard by
shard: a shard is finished if its own small record is beside it. A line without a document, or one that crashes a
library, is an error or is counted as a loss (`--on-error`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from data.compressed import find_damage
from data.input_files import check_sha256, checksum_in_threads
from data.parallel import ordered_map
from data.storage import (DataError, change_detector, crc32_file, make_folder, read_json_or_none, staged_file,
                          write_json_atomic)
from data.webtext.documents import (Document, DocumentCounts, DocumentError, DocumentFunction, DroppedDocument,
                                    ReportCounts, machine_share, shard_name)
from data.webtext.readers import UNREADABLE, ReadResult, WebReadOptions, read_unit
from data.webtext.source_files import SourceFile, WorkUnit, find_source_files, plan_units, shards_of_stage, unit_bytes
from data.webtext.stage_folder import (SINGLE_MACHINE, OutputShard, StageRecord, check_output_is_apart,
                                       describe_shards_in, open_stage_folder, publish_stage, stage_key)

SHARD_BYTES = 1 << 24


@dataclass(frozen=True)
class GlobalStage:
    """A stage that needs all documents. If its options have a field `part`, it can write a share of the shards."""

    name: str
    run: Callable[[Sequence[Path], Path, Any, int, ReportCounts], None]
    """(shards in order, output folder, options, workers, report) -> None."""
    options: Any
    prepare_share: Callable[[Sequence[Path], Path, Any, int, int, int], None] | None = None
    """(shards, folder, options, workers, i, n): work that several machines can share before `run`."""


@dataclass(frozen=True)
class MapStage:
    """A stage that processes documents one by one."""

    name: str
    make_function: Callable[[Any], DocumentFunction]
    """A module-level function; each worker calls it once with the options."""
    options: Any
    """A frozen dataclass of plain values."""
    files: tuple[str, ...] = ()
    """Other files that the result depends on."""
    second_pass: GlobalStage | None = None
    """A second pass over all kept documents; not run if this machine has only a share."""


@dataclass(frozen=True)
class StageRunOptions:
    """How a stage is run. Only `shard_bytes` and `shard` affect the output."""

    workers: int = 1
    shard: tuple[int, int] = SINGLE_MACHINE
    """(number of this machine from 0, number of machines)."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class ShardJob:
    """One unit of a map stage and its output shard."""

    unit: WorkUnit
    target: Path


@dataclass(frozen=True)
class ShardResult:
    shard: OutputShard
    counts: DocumentCounts
    notes: tuple[str, ...] = ()
    """Files that could not be read to the end."""


def run_map_stage(stage: MapStage, inputs: Sequence[str | Path], output: Path,
                  read_options: WebReadOptions = WebReadOptions(),
                  run_options: StageRunOptions = StageRunOptions()) -> StageRecord:
    """Run a map stage, continuing where it stopped."""
    sources, notes = find_source_files(inputs, read_options.format)
    check_output_is_apart([*inputs, *(source.path for source in sources), *stage.files], output)
    units = plan_units(sources, run_options.shard_bytes)
    own_units = machine_share(len(units), *run_options.shard)
    used = list(dict.fromkeys(piece.source for k in own_units for piece in units[k]))
    second_pass = stage.second_pass if run_options.shard == SINGLE_MACHINE else None
    parameters = asdict(stage.options) | {"reading": asdict(read_options), "shard_bytes": run_options.shard_bytes,
                                          "then": second_pass and {second_pass.name: asdict(second_pass.options)},
                                          "files": file_checksums(stage.files)}
    check_unchanged = change_detector(source.path for source in used)
    key = stage_key(stage.name, parameters, source_fingerprints(used, run_options.workers), run_options.shard)
    with open_stage_folder(output, key) as (record, folder):
        if record:
            return record
        parts = run_jobs([ShardJob(units[k], folder / shard_name(k)) for k in own_units], stage, read_options,
                         run_options)
        check_unchanged()
        counts, shards = sum((part.counts for part in parts), DocumentCounts()), tuple(part.shard for part in parts)
        notes += [note for part in parts for note in part.notes]
        if second_pass:
            first, folder = folder, make_folder(folder / "then")
            counts = counts.followed_by(
                run_global_pass(second_pass, [first / shard.name for shard in shards], folder, run_options))
            shards = describe_shards_in(folder)
        return publish_stage(StageRecord(key, counts, shards, tuple(notes)), folder, output)


def run_global_stage(stage: GlobalStage, inputs: Sequence[str | Path], output: Path,
                     run_options: StageRunOptions = StageRunOptions()) -> StageRecord | None:
    """Run a global stage, which may reuse its own files. Returns None if only this machine's share is prepared: the
    same command without --shard does the rest."""
    sources = [source for path in inputs for source in shards_of_stage(Path(path))]
    shards = [Path(source.path) for source in sources]
    check_output_is_apart(inputs, output)
    preparing = stage.prepare_share if run_options.shard != SINGLE_MACHINE else None
    parameters = asdict(stage.options)
    if "part" in parameters:
        del parameters["part"]  # the key holds the share separately, so that `merge` can compare parameters
        stage = replace(stage, options=replace(stage.options, part=run_options.shard))
    elif run_options.shard != SINGLE_MACHINE and not preparing:
        raise DataError(f"{stage.name} --shard: this stage cannot be shared between machines; leave it out")
    key = stage_key(stage.name, parameters, source_fingerprints(sources, run_options.workers),
                    SINGLE_MACHINE if preparing else run_options.shard)
    if preparing:
        with open_stage_folder(output, key) as (record, folder):
            pass  # no lock: other machines prepare their shares at the same time
        if not record:
            check_shard_content([sources[k] for k in machine_share(len(sources), *run_options.shard)],
                                run_options.workers)
            preparing(shards, folder, stage.options, run_options.workers, *run_options.shard)
        return record
    with open_stage_folder(output, key) as (record, folder):
        if record:
            return record
        check_unchanged = change_detector(shards)
        check_shard_content(sources, run_options.workers)
        counts = run_global_pass(stage, shards, folder, run_options)
        check_unchanged()
        return publish_stage(StageRecord(key, counts, describe_shards_in(folder)), folder, output)


def run_global_pass(stage: GlobalStage, shards: Sequence[Path], folder: Path,
                    run_options: StageRunOptions) -> DocumentCounts:
    """Run a pass over all documents; returns its counts."""
    counts = DocumentCounts()
    with progress_bar(stage.name, sum(shard.stat().st_size for shard in shards)) as bar:
        def report(part: DocumentCounts) -> None:
            nonlocal counts
            counts += part
            bar.update(part.bytes_in)

        stage.run(shards, folder, stage.options, run_options.workers, report)
    return counts


def progress_bar(name: str, size: int) -> tqdm[NoReturn]:
    """A progress bar over bytes, only on a terminal."""
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None)


def source_fingerprints(sources: Sequence[SourceFile], workers: int) -> list[dict[str, Any]]:
    """Name and content digest of every input; reads files that are not shards."""
    unknown = [source for source in sources if source.sha256 is None]
    large = sum(source.size for source in unknown) > SHARD_BYTES  # enough to be worth processes
    crcs = dict(zip(unknown, file_checksums([source.path for source in unknown], workers if large else 1)))
    return [{"name": source.name, "format": source.format, "bytes": source.size,
             "content": source.sha256 or crcs[source]} for source in sources]


def check_shard_content(sources: Sequence[SourceFile], workers: int) -> None:
    """Check the SHA-256 of the shards among `sources`, before work that uses them."""
    check_sha256({source.path: source.sha256 for source in sources if source.sha256 is not None}, workers)


def file_checksums(paths: Sequence[str], workers: int = 1) -> list[str]:
    """CRC-32 of each file."""
    try:
        return list(checksum_in_threads(crc32_file, paths, workers))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror}") from error


def run_jobs(jobs: Sequence[ShardJob], stage: MapStage, read_options: WebReadOptions,
             run_options: StageRunOptions) -> list[ShardResult]:
    """The results of all jobs; finished ones are not repeated."""
    done = {}
    for job in jobs:
        value = read_json_or_none(job.target.with_suffix(".json"))
        if value is not None and job.target.is_file():  # finished earlier, and still in place
            done[job.target] = ShardResult(OutputShard(**value["shard"]), DocumentCounts.from_json(value["counts"]),
                                           tuple(value["notes"]))
    left = [job for job in jobs if job.target not in done]
    check_shard_content([piece.source for job in left for piece in job.unit], run_options.workers)
    new_results = ordered_map(partial(run_job, stage=stage, reading=read_options), left,
                              min(run_options.workers, len(left)))
    with progress_bar(stage.name, sum(unit_bytes(job.unit) for job in jobs)) as bar:
        bar.update(sum(unit_bytes(job.unit) for job in jobs if job.target in done))
        for job, part in zip(left, new_results):
            done[job.target] = part
            bar.update(unit_bytes(job.unit))
    return [done[job.target] for job in jobs]


def run_job(job: ShardJob, stage: MapStage, reading: WebReadOptions) -> ShardResult:
    """Run the stage over one unit; writes the shard first, then its record."""
    function = load_stage_function(stage, tuple(file_checksums(stage.files)))
    counts, sha256, notes = DocumentCounts(), hashlib.sha256(), list[str]()
    with staged_file(job.target) as file:
        for record in read_unit(job.unit, reading):
            counts.repaired.update(record.repairs)
            outcome = apply_to_document(function, record, reading)
            if isinstance(record.value, DocumentError) and record.value.reason == UNREADABLE:
                notes.append(f"{record.file_range.source.name}: {record.value}")
            if isinstance(outcome, DroppedDocument):
                counts.add_dropped(outcome.reason, record.size)
            else:
                line = outcome.to_line()
                counts.add_kept(record.size, len(line))
                sha256.update(line)
                file.write(line)
        size = file.tell()
    shard = OutputShard(job.target.name, counts.documents_kept, size, sha256.hexdigest())
    write_json_atomic(job.target.with_suffix(".json"),
                      {"shard": asdict(shard), "counts": counts.to_json(), "notes": notes})
    return ShardResult(shard, counts, tuple(notes))


@cache
def load_stage_function(stage: MapStage, files: tuple[str, ...]) -> DocumentFunction:
    """Models and word lists are loaded once per process, and again if `files` (checksums) changes."""
    function: DocumentFunction = stage.make_function(stage.options)
    return function


def apply_to_document(function: DocumentFunction, record: ReadResult,
                      read_options: WebReadOptions) -> Document | DroppedDocument:
    """Apply the stage to one record. Faults of the input or a library raise only with --on-error strict."""
    if isinstance(record.value, DocumentError):
        fault = record.value
    else:
        try:
            return function(record.value)
        except DataError:  # of the stage itself, such as a missing package
            raise
        except Exception as error:  # a library failed on this document
            fault = DocumentError("failed", f"{type(error).__name__}: {error}")
    if read_options.on_error == "strict":
        path = record.file_range.source.path
        if fault.reason != UNREADABLE and (damage := find_damage(path)):  # perhaps the cause of the fault
            raise DataError(f"{path}: cannot read: {damage}; before that, {record.location()} {fault}")
        raise DataError(f"{record.location()} {fault}")
    return DroppedDocument(fault.reason)
