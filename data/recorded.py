"""Files of text that a stage of `data.webtext` wrote, and whether they are what it wrote.

A stage writes down the size and the SHA-256 of each of its shards in `stage.json`, beside them or, for the parts of a
split, one folder up. A disk, or a copy between machines, can change bytes and leave their number; so whoever is about
to read shards has them checked, here. Whoever is given the folder reads the shards that are listed: all of them, and no
file beside.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data.storage import READ_BYTES, DataError

STAGE_FILE = "stage.json"
SHARD_PATTERN = re.compile(r"part-\d+\.jsonl")
WORK_FOLDER = ".work"
"""In the folder of a stage while it is made."""
SHARD_PATH_PATTERN = re.compile(rf"(?:[^/.][^/]*/)?{SHARD_PATTERN.pattern}")
"""Of a shard, in the folder of its stage."""


def check_stage_shards(paths: Iterable[str | os.PathLike[str]], workers: int = 1) -> None:
    """Those of some files that are shards of a stage; the others are somebody's own."""
    outputs = cache(_recorded_sha256)
    expected = {}
    for path in map(Path, paths):
        if SHARD_PATTERN.fullmatch(path.name) and path.is_file():  # a pipe is read once
            place = Path(os.path.abspath(path))
            known = outputs(place.parent).get(place.name) or outputs(place.parent.parent).get(
                f"{place.parent.name}/{place.name}")
            if known is not None:
                expected[str(path)] = known
    check_sha256(expected, workers)


def check_sha256(expected: Mapping[str, str], workers: int = 1) -> None:
    """By path the SHA-256 that each must have."""
    try:
        for (path, wanted), found in zip(expected.items(), checksum_in_threads(sha256_file, list(expected), workers)):
            if found != wanted:
                raise DataError(f"{path}: expected content with the sha256 {wanted} ({STAGE_FILE}), found {found}: "
                                "changed or damaged since it was written; remove the folder of that stage and run its "
                                "command again")
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror or error}") from error


def checksum_in_threads(checksum: Callable[[str], str], paths: Sequence[str], workers: int) -> Iterator[str]:
    """In order; an OSError names its file. Python's lock is free while bytes are read and summed, so there need be no
    processes."""
    def checksum_of(path: str) -> str:
        try:
            return checksum(path)
        except OSError as error:  # a read knows no name
            error.filename = path
            raise

    with ThreadPoolExecutor(max(1, min(workers, len(paths))), "checksum") as pool:
        try:
            yield from pool.map(checksum_of, paths)
        finally:
            pool.shutdown(cancel_futures=True)  # one that is wrong is enough


def sha256_file(path: str) -> str:
    whole, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            whole.update(buffer[:count])
    return whole.hexdigest()


def _recorded_sha256(folder: Path) -> Mapping[str, str]:
    return {name: shard.sha256 for name, shard in (read_shard_records(folder) or {}).items()}


@dataclass(frozen=True)
class ShardRecord:
    """As it was written."""

    size: int | None
    sha256: str


def read_shard_records(folder: Path) -> dict[str, ShardRecord] | None:
    """By name what the record of a stage lists; None: the folder has none."""
    try:
        record: Any = json.loads((folder / STAGE_FILE).read_bytes())
        return {
            str(output["name"]): ShardRecord(output.get("bytes"), str(output["sha256"]))
            for output in record["outputs"]
        }
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, AttributeError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / STAGE_FILE}: not the record of a stage ({error}); run its command again") from error


def shards_of_folder(folder: Path) -> dict[str, ShardRecord] | None:
    """By path the shards that are meant by a folder: of a stage, or of one part of a split. All are there, and no other
    shard beside them. None: it is nobody's but the user's."""
    shards = read_shard_records(folder)
    if shards is None:
        if (folder / WORK_FOLDER).is_dir() and (folder / ".lock").exists():
            raise DataError(f"{folder}: this stage is not complete; run its command again first")
        here = Path(os.path.abspath(folder))
        above = read_shard_records(here.parent) or {}
        shards = {name.partition("/")[2]: shard for name, shard in above.items() if name.startswith(f"{here.name}/")}
        if not shards:
            return None
    found = {str(folder / name): shard for name, shard in shards.items()}
    check_shards_complete(folder, found)
    return found


def check_shards_complete(folder: Path, shards: Mapping[str, ShardRecord]) -> None:
    """Every shard is there in its size, and none that the record does not list."""
    for path, shard in shards.items():
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None or shard.size not in (None, size):
            raise DataError(f"{path}: expected {shard.size} bytes ({STAGE_FILE}), found "
                            f"{'no file' if size is None else size}; remove the folder and run its command again")
    for place in {folder, *(Path(path).parent for path in shards)}:
        for name in sorted(os.listdir(place)):
            if SHARD_PATTERN.fullmatch(name) and str(place / name) not in shards:
                raise DataError(f"{place / name}: is not one of the shards that {STAGE_FILE} lists; if it is yours, "
                                "move it out of the folder of that stage; else remove it")
