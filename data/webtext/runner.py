"""Run one stage from its inputs to a finished folder: units to workers, counts and shards back.

Output shard k comes from input unit k, so files do not depend on the number of workers. Everything is built in
`FOLDER/.work/<digest of the key>/` and moved when complete; `stage.json` is written last. The *key* holds all that the
output depends on: stage, parameters, input content, machine share. A folder whose record has the same key is done; the
same command resumes an incomplete one, a map stage shard by shard (a shard is finished if its own small record is
beside it). Another command removes only the files that a record lists. A line without a document, or one that crashes a
library, is an error or is counted as a loss (`--on-error`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from data.input_files import SHARD_PATH_PATTERN, STAGE_FILE, WORK_FOLDER, check_sha256
from data.storage import (READ_BYTES, DataError, UsageError, change_detector, crc32_file, file_stamp, fsync_directory,
                          fsync_file, is_url, make_folder, read_json_or_none, wait_for_lock,
                          write_errors_for, write_json_atomic)
from data.webtext.documents import (KEPT, Document, DocumentCounts, DocumentError, DocumentFunction, DroppedDocument,
                                    Samples, ShardWriter, machine_share, shard_name)
from data.webtext.engines import ENGINES, Engine
from data.webtext.readers import (UNREADABLE, SourceFile, WebReadOptions, WorkUnit, find_source_files,
                                  plan_units, read_unit, shards_of_stage, unit_bytes)

SINGLE_MACHINE = (0, 1)
REVISION = 4  # increment it when the same inputs and parameters would give another output
DROP_LOG, DROP_LOG_STAGE = "dropped.jsonl", "dedup"  # a file that is not a shard, and the stage that writes it
DROPPED_FILES = "dropped-[0-9]*.*.gz"  # of `ShardWriter`


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
    notes: tuple[str, ...] = ()  # what was left out, and files that could not be read to the end

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
    """Lock the folder; yield (record of the finished stage, or None, work folder). Removes the shards that the record
    of an earlier stage with another key lists, and nothing else."""
    make_folder(output)
    work, record_file = output / WORK_FOLDER, output / STAGE_FILE
    folder = work / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    with wait_for_lock(output / ".lock"):
        record = read_stage_record(record_file)
        if record and record.key == key and record.is_complete_in(output):
            shutil.rmtree(work, ignore_errors=True)  # left by a kill after the record was written
            yield record, folder
            return
        if not folder.is_dir():
            if record is None and record_file.exists():
                raise DataError(f"{record_file}: not the record of a stage; remove that folder, or choose another "
                                "--output")
            names = {name for path in (record_file, *work.rglob(STAGE_FILE))
                     for name in _recorded_files(path, output)}
            if any(path.name not in names for path in output.glob("part-*.jsonl")):
                raise DataError(f"{output}: expected a new folder or one of a stage, found shards no stage made; "
                                "choose another --output")
            with write_errors_for(output):
                for name in names:
                    (output / name).unlink(missing_ok=True)
                record_file.unlink(missing_ok=True)  # after the shards, since it records their owner
                shutil.rmtree(work, ignore_errors=True)
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


def _recorded_files(path: Path, folder: Path) -> set[str]:
    """The files of a stage in `folder`, by its record at `path`."""
    record = read_stage_record(path)
    if record is None:
        return set()
    log = {DROP_LOG} if record.stage == DROP_LOG_STAGE else set()
    log |= {dropped.name for dropped in folder.glob(DROPPED_FILES)}
    return {output.name for output in record.outputs if SHARD_PATH_PATTERN.fullmatch(output.name)} | log


def publish_stage(record: StageRecord, folder: Path, output: Path) -> StageRecord:
    """Move the shards into place, then write the record; its copy in the work folder marks moved ones as ours."""
    moved_before = _recorded_files(folder / STAGE_FILE, output)
    with write_errors_for(output):
        record.write(folder / STAGE_FILE)
        dropped = [*folder.glob(DROP_LOG), *folder.glob(DROPPED_FILES)]
        moved = [shard.name for shard in record.outputs] + [log.name for log in dropped]
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


def describe_shards_in(folder: Path, engine: Engine) -> tuple[OutputShard, ...]:
    """The shards in a folder and its subfolders."""
    paths = sorted(map(str, folder.glob("**/part-*.jsonl")))
    return tuple(replace(shard, name=str(Path(path).relative_to(folder)))
                 for path, shard in zip(paths, engine.scan(describe_shard, paths)))


def describe_shard(path: str) -> OutputShard:
    sha256, size, documents = hashlib.sha256(), 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            sha256.update(chunk)
            size += len(chunk)
            documents += chunk.count(b"\n")
    return OutputShard(path, documents, size, sha256.hexdigest())


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
        check_sha256({str(path): shard.sha256 for path, shard in shards.items()})
        with write_errors_for(output):
            dropped = [path for _, folder in shares for path in folder.glob(DROPPED_FILES)]
            for path, name in [*((path, shard.name) for path, shard in shards.items()),
                               *((path, path.name) for path in dropped)]:
                target = work / name
                make_folder(target.parent)
                target.unlink(missing_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(path, target)
                    fsync_file(target)
        return publish_stage(merged, work, output)


SHARD_BYTES = 1 << 24


@dataclass(frozen=True)
class GlobalStage:
    """A stage that needs all documents."""

    name: str
    # (shards in order, output folder, engine, **parameters) -> counts of each part of the output, once it is written.
    run: Callable[..., Iterator[DocumentCounts]]
    parameters: Mapping[str, Any]  # JSON values


@dataclass(frozen=True, eq=False)
class MapStage:
    """A stage that processes documents one by one."""

    name: str
    # A module-level function; each worker calls it once with the parameters.
    make_function: Callable[..., DocumentFunction]
    parameters: Mapping[str, Any]  # JSON values
    files: tuple[str, ...] = ()  # other files that the result depends on
    # A second pass over all kept documents; not run if this machine has only a share.
    second_pass: GlobalStage | None = None


@dataclass(frozen=True)
class StageRunOptions:
    """How a stage is run. Only `shard_bytes` and `shard` affect the output, that of a map stage."""

    workers: int = 1
    shard: tuple[int, int] = SINGLE_MACHINE  # (number of this machine from 0, number of machines)
    shard_bytes: int = SHARD_BYTES
    engine: str = "local"

    def engine_for(self, output: Path) -> Engine:
        return ENGINES[self.engine](self.workers, output / WORK_FOLDER / "engine")


def make_read_function() -> DocumentFunction:
    """`read` only does what every stage does first."""
    return lambda document: document


def run_stage(stage: MapStage | GlobalStage, inputs: Sequence[str | Path], output: Path,
              read_options: WebReadOptions = WebReadOptions(),
              run_options: StageRunOptions = StageRunOptions()) -> StageRecord:
    """Run a stage, continuing where it stopped."""
    if isinstance(stage, MapStage):
        return run_map_stage(stage, inputs, output, read_options, run_options)
    return run_global_stage(stage, inputs, output, run_options)


def run_map_stage(stage: MapStage, inputs: Sequence[str | Path], output: Path,
                  read_options: WebReadOptions = WebReadOptions(),
                  run_options: StageRunOptions = StageRunOptions()) -> StageRecord:
    sources, notes = find_source_files(inputs, read_options.format)
    check_output_is_apart([*inputs, *(source.path for source in sources), *stage.files], output)
    engine = run_options.engine_for(output)
    units = plan_units(sources, run_options.shard_bytes)
    own_units = machine_share(len(units), *run_options.shard)
    used = list(dict.fromkeys(replace(source, start=0, stop=None) for k in own_units for source in units[k]))
    second_pass = stage.second_pass if run_options.shard == SINGLE_MACHINE else None
    then = second_pass and {second_pass.name: {**second_pass.parameters, "part": SINGLE_MACHINE}}
    parameters = {**stage.parameters, "reading": asdict(read_options), "shard_bytes": run_options.shard_bytes,
                  "then": then, "files": list(engine.scan(crc32_file, stage.files))}
    check_unchanged = change_detector(source.path for source in used)
    key = stage_key(stage.name, parameters, source_fingerprints(used, engine), run_options.shard)
    with open_stage_folder(output, key) as (record, folder):
        if record:
            return record
        parts = run_jobs([(units[k], folder / shard_name(k)) for k in own_units], stage, read_options, engine)
        check_unchanged()
        counts = sum((part.counts for part in parts), DocumentCounts())
        shards = tuple(part.outputs[0] for part in parts)
        notes += [note for part in parts for note in part.notes]
        if second_pass:
            first, folder = folder, make_folder(folder / "then")
            later = run_global_pass(second_pass, [first / shard.name for shard in shards], folder, engine)
            counts = replace(counts, documents_kept=later.documents_kept, bytes_kept=later.bytes_kept,
                             dropped=counts.dropped + later.dropped,
                             dropped_bytes=counts.dropped_bytes + later.dropped_bytes, sizes=later.sizes,
                             samples=Samples({**(counts + later).samples, KEPT: later.samples.get(KEPT, {})}))
            shards = describe_shards_in(folder, engine)
            for dropped in first.glob(DROPPED_FILES):
                os.replace(dropped, folder / dropped.name)
        return publish_stage(StageRecord(key, counts, shards, tuple(notes)), folder, output)


def run_global_stage(stage: GlobalStage, inputs: Sequence[str | Path], output: Path,
                     run_options: StageRunOptions = StageRunOptions()) -> StageRecord:
    sources = [source for path in inputs for source in shards_of_stage(Path(path))]
    shards = [Path(source.path) for source in sources]
    check_output_is_apart(inputs, output)
    engine = run_options.engine_for(output)
    key = stage_key(stage.name, stage.parameters, source_fingerprints(sources, engine))
    with open_stage_folder(output, key) as (record, folder):
        if record:
            return record
        check_unchanged = change_detector(shards)
        check_sha256({source.path: source.sha256 for source in sources}, engine.scan)
        counts = run_global_pass(stage, shards, folder, engine)
        check_unchanged()
        return publish_stage(StageRecord(key, counts, describe_shards_in(folder, engine)), folder, output)


def run_global_pass(stage: GlobalStage, shards: Sequence[Path], folder: Path, engine: Engine) -> DocumentCounts:
    """Run a pass over all documents; returns its counts."""
    counts = DocumentCounts()
    with progress_bar(stage.name, sum(shard.stat().st_size for shard in shards)) as bar:
        for part in stage.run(shards, folder, engine, **stage.parameters):
            counts += part
            bar.update(part.bytes_in)
    return counts


def progress_bar(name: str, size: int) -> tqdm[NoReturn]:
    """A progress bar over bytes, only on a terminal."""
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None)


def content_digest(path: str) -> str:
    """The CRC-32 of a file; of an object what its store says of its content."""
    return str(file_stamp(path)) if is_url(path) else crc32_file(path)


def source_fingerprints(sources: Sequence[SourceFile], engine: Engine) -> list[dict[str, Any]]:
    """Name and content digest of every input; reads files that are not shards."""
    unknown = [source for source in sources if source.sha256 is None]
    crcs = dict(zip(unknown, engine.scan(content_digest, [source.path for source in unknown])))
    return [{"name": source.name, "format": source.format, "bytes": source.size,
             "content": source.sha256 or crcs[source]} for source in sources]


def run_jobs(jobs: Sequence[tuple[WorkUnit, Path]], stage: MapStage, read_options: WebReadOptions,
             engine: Engine) -> list[StageRecord]:
    """The records of all shards; finished ones are not made again."""
    done = {target: record for _, target in jobs
            if target.is_file() and (record := read_stage_record(target.with_suffix(".json")))}
    left = [(unit, target) for unit, target in jobs if target not in done]
    check_sha256({source.path: source.sha256 for unit, _ in left for source in unit}, engine.scan)
    new_records = engine.map(partial(run_job, stage=stage, reading=read_options), left)
    with progress_bar(stage.name, sum(unit_bytes(unit) for unit, _ in jobs)) as bar:
        bar.update(sum(unit_bytes(unit) for unit, target in jobs if target in done))
        for (unit, target), record in zip(left, new_records):
            done[target] = record
            bar.update(unit_bytes(unit))
    return [done[target] for _, target in jobs]


def run_job(job: tuple[WorkUnit, Path], stage: MapStage, reading: WebReadOptions) -> StageRecord:
    """Run the stage over one unit, given with its output shard; writes the shard first, then its record. Faults of the
    input or a library are errors only with --on-error strict."""
    unit, target = job
    function = load_stage_function(stage)
    sha256, notes = hashlib.sha256(), list[str]()
    with ShardWriter(target, stage.name) as out:
        for result in read_unit(unit, reading):
            out.counts.repaired.update(result.repairs)
            outcome: Document | DroppedDocument | DocumentError = result.value
            if result.drop_reason:
                outcome = DroppedDocument(result.drop_reason)
            elif isinstance(outcome, Document):
                try:
                    outcome = function(outcome)
                except DataError:  # of the stage itself, such as a missing package
                    raise
                except Exception as error:  # a library failed on this document
                    outcome = DocumentError("failed", f"{type(error).__name__}: {error}")
            if isinstance(outcome, DocumentError):
                if reading.on_error == "strict":
                    raise DataError(f"{result.location()} {outcome}")
                if outcome.reason == UNREADABLE:
                    notes.append(f"{result.source.name}: {outcome}")
            if isinstance(outcome, Document):
                line = outcome.to_line()
                out.keep(result.size, line)
                sha256.update(line)
            else:
                # A line without a document is represented by what is wrong with it.
                dropped = result.value if isinstance(result.value, Document) else Document(str(result.value))
                out.drop(outcome.reason, result.size, dropped.to_line())
    counts = out.counts
    shard = OutputShard(target.name, counts.documents_kept, counts.bytes_kept, sha256.hexdigest())
    record = StageRecord({}, counts, (shard,), tuple(notes))
    record.write(target.with_suffix(".json"))
    return record


@cache
def load_stage_function(stage: MapStage) -> DocumentFunction:
    """Models and word lists are loaded once per process and run of a stage."""
    return stage.make_function(**stage.parameters)
