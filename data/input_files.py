"""The text files behind the paths that a user gives, and the check that shards of a webtext stage are unchanged.

A name gives the kind: `.jsonl` (`.ndjson`, `.json`) or `.txt`, each also with `.gz`, `.xz`, `.zst`. A folder stands for
the files of these kinds below it, sorted by path; `InputFiles.left_out` summarizes the others. A stage's folder stands
for the shards listed in its `stage.json`, whose SHA-256 is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from data.compressed import COMPRESSED_SUFFIXES, read_errors_for, strip_compression_suffix
from data.storage import DataError, escape_to_one_line
from data.text_files import DATASET_PREFIX

Result = TypeVar("Result")

STAGE_FILE = "stage.json"
SHARD_PATTERN = re.compile(r"part-\d+\.jsonl")
WORK_FOLDER = ".work"  # exists in a stage's folder until the stage is complete
# Path of a shard relative to its stage's folder.
SHARD_PATH_PATTERN = re.compile(rf"(?:[^/.][^/]*/)?{SHARD_PATTERN.pattern}")


def check_stage_shards(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Check the SHA-256 of those paths that are shards of a stage; the others are the user's own files."""
    shards_of, expected = cache(recorded_shards), dict[str, str | None]()
    for path in map(Path, paths):
        if SHARD_PATTERN.fullmatch(path.name) and path.is_file():  # a pipe can be read only once
            _, expected[str(path)] = (shards_of(path.parent) or {}).get(str(path), (None, None))
    check_sha256(expected)


def check_sha256(expected: Mapping[str, str | None],
                 scan: Callable[[Callable[[str], str], Sequence[str]], Iterable[str]] | None = None) -> None:
    """Check the SHA-256 of each path whose one is known; raises DataError. `scan` maps the paths (default: threads)."""
    known = {path: sha256 for path, sha256 in expected.items() if sha256 is not None}
    for (path, wanted), found in zip(known.items(), (scan or checksum_in_threads)(sha256_file, list(known))):
        if found != wanted:
            raise DataError(f"{path}: expected content with the sha256 {wanted} ({STAGE_FILE}), found {found}: "
                            "changed or damaged since it was written; remove the folder of that stage and run its "
                            "command again")


def checksum_in_threads(checksum: Callable[[str], Result], paths: Sequence[str],
                        workers: int | None = None) -> Iterator[Result]:
    """Checksums in order, on all cores by default: other ranks may wait for them. Raises DataError. Threads are enough,
    since reading and hashing release the GIL."""
    def checksum_of(path: str) -> Result:
        with read_errors_for(path):
            return checksum(path)

    with ThreadPoolExecutor(max(1, min(workers or len(os.sched_getaffinity(0)), len(paths))), "checksum") as pool:
        yield from pool.map(checksum_of, paths)


def sha256_file(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_shard_records(folder: Path) -> dict[str, tuple[int | None, str]] | None:
    """Name -> (size, SHA-256) of each shard in a stage's `stage.json`; None if the folder has none."""
    try:
        record: Any = json.loads((folder / STAGE_FILE).read_bytes())
        return {str(output["name"]): (output.get("bytes"), str(output["sha256"])) for output in record["outputs"]}
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, AttributeError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / STAGE_FILE}: not the record of a stage ({error}); run its command again") from error


def recorded_shards(folder: Path) -> dict[str, tuple[int | None, str]] | None:
    """Path -> (size, SHA-256) of the shards of a stage, or of one part of a split; None for any other folder."""
    shards = read_shard_records(folder)
    if shards is None:
        part = Path(os.path.abspath(folder))
        of_stage = read_shard_records(part.parent) or {}
        shards = {name.partition("/")[2]: shard for name, shard in of_stage.items() if name.startswith(f"{part.name}/")}
        if not shards:
            return None
    return {str(folder / name): shard for name, shard in shards.items()}


def shards_of_folder(folder: Path) -> dict[str, tuple[int | None, str]] | None:
    """`recorded_shards`; raises unless each exists with its size, and no unlisted shard does."""
    found = recorded_shards(folder)
    if found is None:
        if (folder / WORK_FOLDER).is_dir() and (folder / ".lock").exists():
            raise DataError(f"{folder}: this stage is not complete; run its command again first")
        return None
    for path, (expected, _) in found.items():
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None or expected not in (None, size):
            raise DataError(f"{path}: expected {expected} bytes ({STAGE_FILE}), found "
                            f"{'no file' if size is None else size}; remove the folder and run its command again")
    for place in {folder, *(Path(path).parent for path in found)}:
        for name in sorted(os.listdir(place)):
            if SHARD_PATTERN.fullmatch(name) and str(place / name) not in found:
                raise DataError(f"{place / name}: is not one of the shards that {STAGE_FILE} lists; if it is yours, "
                                "move it out of the folder of that stage; else remove it")
    return found


JSON_LINES, PLAIN_TEXT = "jsonl", "text"
KIND_OF_SUFFIX = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".txt": PLAIN_TEXT}
FOLDER_SUFFIXES = (".jsonl", ".ndjson", ".txt")  # without .json: settings and corpus facts use that suffix


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What a file holds according to its name; None if unknown."""
    if os.fspath(path).startswith(DATASET_PREFIX):
        return JSON_LINES
    return KIND_OF_SUFFIX.get(Path(strip_compression_suffix(os.fspath(path))).suffix)


@dataclass
class InputFiles:
    files: list[str] = field(default_factory=list)
    hidden: int = 0  # names that begin with a dot; the content of such folders is not counted
    # Other kinds of files, pipes, links to a folder that contains them, and files in a stage's folder that are not its.
    others: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> str:
        """A summary of what was left out; "" for nothing."""
        parts = [f"{self.hidden} hidden"] if self.hidden else []
        if self.others:
            more = f" and {len(self.others) - 3} more" if len(self.others) > 3 else ""
            parts.append(f"{len(self.others)} other ({escape_to_one_line(', '.join(self.others[:3]))}{more})")
        return f"left out: {', '.join(parts)}" if parts else ""


def find_text_files(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = FOLDER_SUFFIXES) -> InputFiles:
    """The files that `inputs` stand for, in order; within a folder sorted by path. Nothing is read."""
    found = InputFiles()
    for given in inputs:
        name = os.fspath(given)
        if not os.path.isdir(name):
            found.files.append(name)
            continue
        shards = shards_of_folder(Path(name))
        if shards == {}:
            raise DataError(f"{name}: this stage kept no document")
        files = sorted(walk_files(Path(name), found)) if shards is None else []
        texts = [*(shards or ()), *(str(path) for path in files
                                    if Path(strip_compression_suffix(path.name)).suffix in suffixes)]
        found.others += sorted({*map(str, files)}.difference(texts))
        if not texts:
            raise DataError(f"{name}: this folder holds no file of text ({' '.join(suffixes)}, each also with "
                            f"{' '.join(COMPRESSED_SUFFIXES)})" + (f"; {found.left_out}" if found.left_out else ""))
        found.files += texts
    return found


def walk_files(folder: Path, found: InputFiles, parents: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Every file below a folder; follows symbolic links, but not into loops."""
    with read_errors_for(str(folder)):
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        found.others.append(str(folder))
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            found.hidden += 1
        elif entry.is_dir():
            yield from walk_files(path, found, (*parents, identity))
        elif entry.is_file() or not path.exists():  # opening a dangling link reports the error
            yield path
        else:
            found.others.append(entry.path)
