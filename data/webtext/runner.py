"""One stage from its inputs to a finished folder: units to workers, counts and shards back.

Shard k of the output is made of unit k of the input, by whichever worker: the files are the same for any number of
them. A map stage is resumed shard by shard: a shard counts when its own small record is beside it. A line that
holds no document, or that a library does not survive, is an error or a counted loss (`--on-error`), never a surprise.
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
from data.storage import DataError, change_detector, crc32_file, make_folder, staged_file, write_json_atomic
from data.webtext.documents import (Document, DocumentCounts, DocumentError, DocumentFunction, DroppedDocument,
                                    machine_share, shard_name)
from data.webtext.readers import UNREADABLE, ReadResult, WebReadOptions, read_unit
from data.webtext.source_files import SourceFile, WorkUnit, find_source_files, plan_units, shards_of_stage, unit_bytes
from data.webtext.stage_folder import (SINGLE_MACHINE, OutputShard, StageRecord, check_output_is_apart,
                                       describe_shards_in, open_stage_folder, publish_stage, read_json_or_none,
                                       stage_key)

SHARD_BYTES = 1 << 24

ReportCounts = Callable[[DocumentCounts], None]
"""A global stage calls it with the counts of what it has just written."""
GlobalStageFunction = Callable[[Sequence[Path], Path, Any, int, ReportCounts], None]
"""(shards in order, folder for what it writes, options, workers, report)"""


@dataclass(frozen=True)
class GlobalStage:
    """A stage that looks at all documents. Options with a field `part` can be told to write a share of the shards."""

    name: str
    run: GlobalStageFunction
    options: Any
    prepare_share: Callable[[Sequence[Path], Path, Any, int, int, int], None] | None = None
    """(shards, folder, options, workers, i, n): the part of the work that several machines can do before `run`."""


@dataclass(frozen=True)
class MapStage:
    """A stage that looks at one document at a time."""

    name: str
    make_function: Callable[[Any], DocumentFunction]
    """A function of a module: workers call it with the options, once each."""
    options: Any
    """A frozen dataclass of plain values."""
    files: tuple[str, ...] = ()
    """Files besides the documents that the result depends on."""
    second_pass: GlobalStage | None = None
    """A second pass, over all that the first kept; not where this machine has a share of the documents only."""


@dataclass(frozen=True)
class StageRunOptions:
    """How a stage is run. Only `shard_bytes` and `shard` have a part in what comes out."""

    workers: int = 1
    shard: tuple[int, int] = SINGLE_MACHINE
    """This machine's number, from 0, of how many."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class ShardJob:
    """One unit of a map stage and the shard it becomes."""

    unit: WorkUnit
    target: Path


@dataclass(frozen=True)
class ShardResult:
    """What became of a job."""

    shard: OutputShard
    counts: DocumentCounts
    notes: tuple[str, ...] = ()
    """Each file that could not be read to its end."""


def run_map_stage(stage: MapStage, inputs: Sequence[str | Path], output: Path,
                  read_options: WebReadOptions = WebReadOptions(),
                  run_options: StageRunOptions = StageRunOptions()) -> StageRecord:
    """Bring a map stage to its end, from wherever it stopped."""
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
    """Bring a global stage to its end; what it finds of itself in its folder is its own business.

    None: this machine's share is prepared, and the same command without a share does the rest.
    """
    sources = [source for path in inputs for source in shards_of_stage(Path(path))]
    shards = [Path(source.path) for source in sources]
    check_output_is_apart(inputs, output)
    preparing = stage.prepare_share if run_options.shard != SINGLE_MACHINE else None
    parameters = asdict(stage.options)
    if "part" in parameters:
        del parameters["part"]  # the key names the share apart from them, so that `merge` can compare them
        stage = replace(stage, options=replace(stage.options, part=run_options.shard))
    elif run_options.shard != SINGLE_MACHINE and not preparing:
        raise DataError(f"{stage.name} --shard: this stage cannot be shared between machines; leave it out")
    key = stage_key(stage.name, parameters, source_fingerprints(sources, run_options.workers),
                    SINGLE_MACHINE if preparing else run_options.shard)
    if preparing:
        with open_stage_folder(output, key) as (record, folder):
            pass  # other machines prepare their shares at the same time: no lock
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
    """Run a pass over all documents; its counts."""
    counts = DocumentCounts()
    with progress_bar(stage.name, sum(shard.stat().st_size for shard in shards)) as bar:
        def report(part: DocumentCounts) -> None:
            nonlocal counts
            counts += part
            bar.update(part.bytes_in)

        stage.run(shards, folder, stage.options, run_options.workers, report)
    return counts


def progress_bar(name: str, size: int) -> tqdm[NoReturn]:
    """A progress bar over bytes, on a terminal only."""
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None)


def source_fingerprints(sources: Sequence[SourceFile], workers: int) -> list[dict[str, Any]]:
    """Name and content of every input; files that are not shards are read for it."""
    unknown = [source for source in sources if source.sha256 is None]
    large = sum(source.size for source in unknown) > SHARD_BYTES  # worth starting processes for
    crcs = dict(zip(unknown, file_checksums([source.path for source in unknown], workers if large else 1)))
    return [{"name": source.name, "format": source.format, "bytes": source.size,
             "content": source.sha256 or crcs[source]} for source in sources]


def check_shard_content(sources: Sequence[SourceFile], workers: int) -> None:
    """Whether the shards among them are what the stage before wrote, for which they are read: before there is work to
    do with them, and not for what is done already."""
    check_sha256({source.path: source.sha256 for source in sources if source.sha256 is not None}, workers)


def file_checksums(paths: Sequence[str], workers: int = 1) -> list[str]:
    """Of the content of each file."""
    try:
        return list(checksum_in_threads(crc32_file, paths, workers))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror}") from error


def run_jobs(jobs: Sequence[ShardJob], stage: MapStage, read_options: WebReadOptions,
             run_options: StageRunOptions) -> list[ShardResult]:
    """What became of every job, now or before."""
    done = {job.target: part for job in jobs if (part := read_finished_job(job.target))}
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
    """Run the stage over one unit; the shard first, then the record beside it that says so."""
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
    part = ShardResult(shard, counts, tuple(notes))
    write_json_atomic(job.target.with_suffix(".json"), {
        "shard": asdict(shard), "counts": counts.to_json(), "notes": part.notes})
    return part


def read_finished_job(target: Path) -> ShardResult | None:
    """What `run_job` left, if it came to its end (and was not moved away by a `publish` that did not)."""
    value = read_json_or_none(target.with_suffix(".json"))
    if value is None or not target.is_file():
        return None
    return ShardResult(OutputShard(**value["shard"]), DocumentCounts.from_json(value["counts"]), tuple(value["notes"]))


@cache
def load_stage_function(stage: MapStage, files: tuple[str, ...]) -> DocumentFunction:
    """Models and word lists are loaded once in each process, and again when `files`, their checksums, change."""
    function: DocumentFunction = stage.make_function(stage.options)
    return function


def apply_to_document(function: DocumentFunction, record: ReadResult,
                      read_options: WebReadOptions) -> Document | DroppedDocument:
    """The stage's word on one record. A fault of the input or of a library is an error only when strict."""
    if isinstance(record.value, DocumentError):
        fault = record.value
    else:
        try:
            return function(record.value)
        except DataError:  # of the stage itself: a package is missing, say
            raise
        except Exception as error:  # a library that does not survive the document
            fault = DocumentError("failed", f"{type(error).__name__}: {error}")
    if read_options.on_error == "strict":
        path = record.file_range.source.path
        if fault.reason != UNREADABLE and (damage := find_damage(path)):  # which made nonsense of text, perhaps
            raise DataError(f"{path}: cannot read: {damage}; before that, {record.location()} {fault}")
        raise DataError(f"{record.location()} {fault}")
    return DroppedDocument(fault.reason)
