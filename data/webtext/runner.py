"""Run one stage from its inputs to a finished folder: units to workers, counts and shards back.

Output shard k comes from input unit k, so files do not depend on the number of workers. A map stage resumes shard by
shard: a shard is finished if its own small record is beside it. A line without a document, or one that crashes a
library, is an error or is counted as a loss (`--on-error`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from data.compressed import find_damage
from data.input_files import check_sha256, checksum_in_threads
from data.parallel import ordered_map
from data.storage import DataError, change_detector, crc32_file, make_folder, staged_file
from data.webtext.documents import (Document, DocumentCounts, DocumentError, DocumentFunction, DroppedDocument,
                                    ReportCounts, machine_share, shard_name)
from data.webtext.readers import (UNREADABLE, ReadResult, SourceFile, WebReadOptions, WorkUnit, find_source_files,
                                  plan_units, read_unit, shards_of_stage, unit_bytes)
from data.webtext.stage_folder import (SINGLE_MACHINE, OutputShard, StageRecord, check_output_is_apart,
                                       describe_shards_in, open_stage_folder, publish_stage, read_stage_record,
                                       stage_key)

SHARD_BYTES = 1 << 24
ShardJob = tuple[WorkUnit, Path]
"""One unit of a map stage and its output shard."""


@dataclass(frozen=True)
class GlobalStage:
    """A stage that needs all documents."""

    name: str
    run: Callable[[Sequence[Path], Path, Any, int, ReportCounts, tuple[int, int]], None]
    """(shards in order, output folder, options, workers, report, share of the shards to write) -> None."""
    options: Any
    prepare_share: Callable[[Sequence[Path], Path, Any, int, tuple[int, int]], None] | None = None
    """(shards, folder, options, workers, share): work that several machines can share before one of them runs `run`."""


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
class ReadOptions:
    """No options: `read` only does what every stage does first."""


def make_read_function(options: ReadOptions) -> DocumentFunction:
    return lambda document: document


def run_stage(stage: MapStage | GlobalStage, inputs: Sequence[str | Path], output: Path,
              read_options: WebReadOptions = WebReadOptions(),
              run_options: StageRunOptions = StageRunOptions()) -> StageRecord | None:
    """Run a stage, continuing where it stopped. None if only this machine's share of the work is prepared: the same
    command without --shard does the rest."""
    if isinstance(stage, MapStage):
        return run_map_stage(stage, inputs, output, read_options, run_options)
    return run_global_stage(stage, inputs, output, run_options)


def run_map_stage(stage: MapStage, inputs: Sequence[str | Path], output: Path,
                  read_options: WebReadOptions = WebReadOptions(),
                  run_options: StageRunOptions = StageRunOptions()) -> StageRecord:
    sources, notes = find_source_files(inputs, read_options.format)
    check_output_is_apart([*inputs, *(source.path for source in sources), *stage.files], output)
    units = plan_units(sources, run_options.shard_bytes)
    own_units = machine_share(len(units), *run_options.shard)
    used = list(dict.fromkeys(piece.source for k in own_units for piece in units[k]))
    second_pass = stage.second_pass if run_options.shard == SINGLE_MACHINE else None
    then = second_pass and {second_pass.name: asdict(second_pass.options) | {"part": SINGLE_MACHINE}}
    parameters = asdict(stage.options) | {"reading": asdict(read_options), "shard_bytes": run_options.shard_bytes,
                                          "then": then, "files": file_checksums(stage.files)}
    check_unchanged = change_detector(source.path for source in used)
    key = stage_key(stage.name, parameters, source_fingerprints(used, run_options.workers), run_options.shard)
    with open_stage_folder(output, key) as (record, folder):
        if record:
            return record
        parts = run_jobs([(units[k], folder / shard_name(k)) for k in own_units], stage, read_options, run_options)
        check_unchanged()
        counts = sum((part.counts for part in parts), DocumentCounts())
        shards = tuple(part.outputs[0] for part in parts)
        notes += [note for part in parts for note in part.notes]
        if second_pass:
            first, folder = folder, make_folder(folder / "then")
            counts = counts.followed_by(
                run_global_pass(second_pass, [first / shard.name for shard in shards], folder, run_options))
            shards = describe_shards_in(folder)
        return publish_stage(StageRecord(key, counts, shards, tuple(notes)), folder, output)


def run_global_stage(stage: GlobalStage, inputs: Sequence[str | Path], output: Path,
                     run_options: StageRunOptions = StageRunOptions()) -> StageRecord | None:
    sources = [source for path in inputs for source in shards_of_stage(Path(path))]
    shards = [Path(source.path) for source in sources]
    check_output_is_apart(inputs, output)
    prepare = stage.prepare_share if run_options.shard != SINGLE_MACHINE else None
    key = stage_key(stage.name, asdict(stage.options), source_fingerprints(sources, run_options.workers),
                    SINGLE_MACHINE if prepare else run_options.shard)
    with open_stage_folder(output, key) as (record, folder):
        if record is None and not prepare:
            check_unchanged = change_detector(shards)
            check_shard_content(sources, run_options.workers)
            counts = run_global_pass(stage, shards, folder, run_options)
            check_unchanged()
            return publish_stage(StageRecord(key, counts, describe_shards_in(folder)), folder, output)
    if record is None and prepare:  # without the lock: other machines prepare their shares at the same time
        check_shard_content([sources[k] for k in machine_share(len(sources), *run_options.shard)], run_options.workers)
        prepare(shards, folder, stage.options, run_options.workers, run_options.shard)
    return record


def run_global_pass(stage: GlobalStage, shards: Sequence[Path], folder: Path,
                    run_options: StageRunOptions) -> DocumentCounts:
    """Run a pass over all documents; returns its counts."""
    counts = DocumentCounts()
    with progress_bar(stage.name, sum(shard.stat().st_size for shard in shards)) as bar:
        def report(part: DocumentCounts) -> None:
            nonlocal counts
            counts += part
            bar.update(part.bytes_in)

        stage.run(shards, folder, stage.options, run_options.workers, report, run_options.shard)
    return counts


def progress_bar(name: str, size: int) -> tqdm[NoReturn]:
    """A progress bar over bytes, only on a terminal."""
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None)


def source_fingerprints(sources: Sequence[SourceFile], workers: int) -> list[dict[str, Any]]:
    """Name and content digest of every input; reads files that are not shards."""
    unknown = [source for source in sources if source.sha256 is None]
    crcs = dict(zip(unknown, file_checksums([source.path for source in unknown], workers)))
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
             run_options: StageRunOptions) -> list[StageRecord]:
    """The records of all shards; finished ones are not made again."""
    done = {target: record for _, target in jobs
            if target.is_file() and (record := read_stage_record(target.with_suffix(".json")))}
    left = [(unit, target) for unit, target in jobs if target not in done]
    check_shard_content([piece.source for unit, _ in left for piece in unit], run_options.workers)
    new_records = ordered_map(partial(run_job, stage=stage, reading=read_options), left,
                              min(run_options.workers, len(left)))
    with progress_bar(stage.name, sum(unit_bytes(unit) for unit, _ in jobs)) as bar:
        bar.update(sum(unit_bytes(unit) for unit, target in jobs if target in done))
        for (unit, target), record in zip(left, new_records):
            done[target] = record
            bar.update(unit_bytes(unit))
    return [done[target] for _, target in jobs]


def run_job(job: ShardJob, stage: MapStage, reading: WebReadOptions) -> StageRecord:
    """Run the stage over one unit; writes the shard first, then its record."""
    unit, target = job
    function = load_stage_function(stage, tuple(file_checksums(stage.files)))
    counts, sha256, notes = DocumentCounts(), hashlib.sha256(), list[str]()
    with staged_file(target) as file:
        for result in read_unit(unit, reading):
            counts.repaired.update(result.repairs)
            outcome = apply_to_document(function, result, reading)
            if isinstance(result.value, DocumentError) and result.value.reason == UNREADABLE:
                notes.append(f"{result.file_range.source.name}: {result.value}")
            if isinstance(outcome, DroppedDocument):
                counts.add_dropped(outcome.reason, result.size)
            else:
                line = outcome.to_line()
                counts.add_kept(result.size, len(line))
                sha256.update(line)
                file.write(line)
    shard = OutputShard(target.name, counts.documents_kept, counts.bytes_kept, sha256.hexdigest())
    record = StageRecord({}, counts, (shard,), tuple(notes))
    record.write(target.with_suffix(".json"))
    return record


@cache
def load_stage_function(stage: MapStage, files: tuple[str, ...]) -> DocumentFunction:
    """Models and word lists are loaded once per process, and again if `files` (checksums) changes."""
    function: DocumentFunction = stage.make_function(stage.options)
    return function


def apply_to_document(function: DocumentFunction, result: ReadResult,
                      read_options: WebReadOptions) -> Document | DroppedDocument:
    """Apply the stage to one result. Faults of the input or a library raise only with --on-error strict."""
    fault = result.value
    if isinstance(fault, Document):
        try:
            return function(fault)
        except DataError:  # of the stage itself, such as a missing package
            raise
        except Exception as error:  # a library failed on this document
            fault = DocumentError("failed", f"{type(error).__name__}: {error}")
    if read_options.on_error == "strict":
        path = result.file_range.source.path
        if fault.reason != UNREADABLE and (damage := find_damage(path)):  # perhaps the cause of the fault
            raise DataError(f"{path}: cannot read: {damage}; before that, {result.location()} {fault}")
        raise DataError(f"{result.location()} {fault}")
    return DroppedDocument(fault.reason)
