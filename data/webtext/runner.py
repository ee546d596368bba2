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

from data.compressed import damage_in
from data.parallel import ordered_map
from data.recorded import check_shards, threaded
from data.storage import DataError, crc32_file, make_folder, staged_file, watched, write_json_atomic
from data.webtext.counts import Counts
from data.webtext.document import Document, Drop, Fault, Function
from data.webtext.folder import building, check_apart, publish, written
from data.webtext.inputs import Source, Unit, find, plan, shards_of, total_size
from data.webtext.reading import UNREADABLE, Read, Reading, read_unit
from data.webtext.record import WHOLE, Output, Record, make_key, read_json
from data.webtext.shards import share, shard_name

SHARD_BYTES = 1 << 24

Report = Callable[[Counts], None]
"""A global stage calls it with the counts of what it has just written."""
Run = Callable[[Sequence[Path], Path, Any, int, Report], None]
"""(shards in order, folder for what it writes, options, workers, report)"""


@dataclass(frozen=True)
class GlobalStage:
    """A stage that looks at all documents. Options with a field `part` can be told to write a share of the shards."""

    name: str
    run: Run
    options: Any
    prepare_share: Callable[[Sequence[Path], Path, Any, int, int, int], None] | None = None
    """(shards, folder, options, workers, i, n): the part of the work that several machines can do before `run`."""


@dataclass(frozen=True)
class MapStage:
    """A stage that looks at one document at a time."""

    name: str
    make: Callable[[Any], Function]
    """A function of a module: workers call it with the options, once each."""
    options: Any
    """A frozen dataclass of plain values."""
    files: tuple[str, ...] = ()
    """Files besides the documents that the result depends on."""
    then: GlobalStage | None = None
    """A second pass, over all that the first kept; not where this machine has a share of the documents only."""


@dataclass(frozen=True)
class Work:
    """How a stage is run. Only `shard_bytes` and `shard` have a part in what comes out."""

    workers: int = 1
    shard: tuple[int, int] = WHOLE
    """This machine's number, from 0, of how many."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class Job:
    """One unit of a map stage and the shard it becomes."""

    unit: Unit
    target: Path


@dataclass(frozen=True)
class Part:
    """What became of a job."""

    shard: Output
    counts: Counts
    notes: tuple[str, ...] = ()
    """Each file that could not be read to its end."""


def run_map(stage: MapStage, inputs: Sequence[str | Path], output: Path, reading: Reading = Reading(),
            work: Work = Work()) -> Record:
    """Bring a map stage to its end, from wherever it stopped."""
    sources, notes = find(inputs, reading.format)
    check_apart([*inputs, *(source.path for source in sources), *stage.files], output)
    units = plan(sources, work.shard_bytes)
    mine = share(len(units), *work.shard)
    used = list(dict.fromkeys(piece.source for k in mine for piece in units[k]))
    then = stage.then if work.shard == WHOLE else None
    parameters = asdict(stage.options) | {
        "reading": asdict(reading), "shard_bytes": work.shard_bytes, "then": then and {then.name: asdict(then.options)},
        "files": checksums(stage.files)}
    check_unchanged = watched(source.path for source in used)
    key = make_key(stage.name, parameters, fingerprints(used, work.workers), work.shard)
    with building(output, key) as (record, folder):
        if record:
            return record
        parts = finish([Job(units[k], folder / shard_name(k)) for k in mine], stage, reading, work)
        check_unchanged()
        counts, shards = sum((part.counts for part in parts), Counts()), tuple(part.shard for part in parts)
        notes += [note for part in parts for note in part.notes]
        if then:
            first, folder = folder, make_folder(folder / "then")
            counts = counts.then(run_all(then, [first / shard.name for shard in shards], folder, work))
            shards = written(folder)
        return publish(Record(key, counts, shards, tuple(notes)), folder, output)


def run_global(stage: GlobalStage, inputs: Sequence[str | Path], output: Path, work: Work = Work()) -> Record | None:
    """Bring a global stage to its end; what it finds of itself in its folder is its own business.

    None: this machine's share is prepared, and the same command without a share does the rest.
    """
    sources = [source for path in inputs for source in shards_of(Path(path))]
    shards = [Path(source.path) for source in sources]
    check_apart(inputs, output)
    preparing = stage.prepare_share if work.shard != WHOLE else None
    parameters = asdict(stage.options)
    if "part" in parameters:
        del parameters["part"]  # the key names the share apart from them, so that `merge` can compare them
        stage = replace(stage, options=replace(stage.options, part=work.shard))
    elif work.shard != WHOLE and not preparing:
        raise DataError(f"{stage.name} --shard: this stage cannot be shared between machines; leave it out")
    key = make_key(stage.name, parameters, fingerprints(sources, work.workers), WHOLE if preparing else work.shard)
    if preparing:
        with building(output, key) as (record, folder):
            pass  # other machines prepare their shares at the same time: no lock
        if not record:
            check_content([sources[k] for k in share(len(sources), *work.shard)], work.workers)
            preparing(shards, folder, stage.options, work.workers, *work.shard)
        return record
    with building(output, key) as (record, folder):
        if record:
            return record
        check_unchanged = watched(shards)
        check_content(sources, work.workers)
        counts = run_all(stage, shards, folder, work)
        check_unchanged()
        return publish(Record(key, counts, written(folder)), folder, output)


def run_all(stage: GlobalStage, shards: Sequence[Path], folder: Path, work: Work) -> Counts:
    """Run a pass over all documents; its counts."""
    counts = Counts()
    with bar_of(stage.name, sum(shard.stat().st_size for shard in shards)) as bar:
        def report(part: Counts) -> None:
            nonlocal counts
            counts += part
            bar.update(part.bytes_in)

        stage.run(shards, folder, stage.options, work.workers, report)
    return counts


def bar_of(name: str, size: int) -> tqdm[NoReturn]:
    """A progress bar over bytes, on a terminal only."""
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, file=sys.stderr, leave=False, disable=None)


def fingerprints(sources: Sequence[Source], workers: int) -> list[dict[str, Any]]:
    """Name and content of every input; files that are not shards are read for it."""
    unknown = [source for source in sources if source.sha256 is None]
    large = sum(source.size for source in unknown) > SHARD_BYTES  # worth starting processes for
    crcs = dict(zip(unknown, checksums([source.path for source in unknown], workers if large else 1)))
    return [{"name": source.name, "format": source.format, "bytes": source.size,
             "content": source.sha256 or crcs[source]} for source in sources]


def check_content(sources: Sequence[Source], workers: int) -> None:
    """Whether the shards among them are what the stage before wrote, for which they are read: before there is work to
    do with them, and not for what is done already."""
    check_shards({source.path: source.sha256 for source in sources if source.sha256 is not None}, workers)


def checksums(paths: Sequence[str], workers: int = 1) -> list[str]:
    """Of the content of each file."""
    try:
        return list(threaded(crc32_file, paths, workers))
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror}") from error


def finish(jobs: Sequence[Job], stage: MapStage, reading: Reading, work: Work) -> list[Part]:
    """What became of every job, now or before."""
    done = {job.target: part for job in jobs if (part := read_part(job.target))}
    left = [job for job in jobs if job.target not in done]
    check_content([piece.source for job in left for piece in job.unit], work.workers)
    made = ordered_map(partial(make_part, stage=stage, reading=reading), left, min(work.workers, len(left)))
    with bar_of(stage.name, sum(total_size(job.unit) for job in jobs)) as bar:
        bar.update(sum(total_size(job.unit) for job in jobs if job.target in done))
        for job, part in zip(left, made):
            done[job.target] = part
            bar.update(total_size(job.unit))
    return [done[job.target] for job in jobs]


def make_part(job: Job, stage: MapStage, reading: Reading) -> Part:
    """Run the stage over one unit; the shard first, then the record beside it that says so."""
    function = function_of(stage, tuple(checksums(stage.files)))
    counts, sha256, notes = Counts(), hashlib.sha256(), list[str]()
    with staged_file(job.target) as file:
        for record in read_unit(job.unit, reading):
            counts.repaired.update(record.repairs)
            kept = apply(function, record, reading)
            if isinstance(record.value, Fault) and record.value.reason == UNREADABLE:
                notes.append(f"{record.piece.source.name}: {record.value}")
            if isinstance(kept, Drop):
                counts.drop(kept.reason, record.size)
            else:
                line = kept.line()
                counts.keep(record.size, len(line))
                sha256.update(line)
                file.write(line)
        size = file.tell()
    shard = Output(job.target.name, counts.documents_kept, size, sha256.hexdigest())
    part = Part(shard, counts, tuple(notes))
    write_json_atomic(job.target.with_suffix(".json"), {
        "shard": asdict(shard), "counts": counts.to_json(), "notes": part.notes})
    return part


def read_part(target: Path) -> Part | None:
    """What `make_part` left, if it came to its end (and was not moved away by a `publish` that did not)."""
    value = read_json(target.with_suffix(".json"))
    if value is None or not target.is_file():
        return None
    return Part(Output(**value["shard"]), Counts.from_json(value["counts"]), tuple(value["notes"]))


@cache
def function_of(stage: MapStage, files: tuple[str, ...]) -> Function:
    """Models and word lists are loaded once in each process, and again when `files`, their checksums, change."""
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
        path = record.piece.source.path
        if fault.reason != UNREADABLE and (damage := damage_in(path)):  # which made nonsense of text, perhaps
            raise DataError(f"{path}: cannot read: {damage}; before that, {record.where()} {fault}")
        raise DataError(f"{record.where()} {fault}")
    return Drop(fault.reason)
