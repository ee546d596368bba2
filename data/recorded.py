"""Files of text that a stage of `data.webtext` wrote, and whether they are what it wrote.

A stage writes down the size and the SHA-256 of each of its shards in `stage.json`, beside them or, for the parts of a
split, one folder up. A disk, or a copy between machines, can change bytes and leave their number; so whoever is about
to read shards has them checked, here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from data.parallel import ordered_map
from data.storage import CHUNK, DataError

STAGE_FILE = "stage.json"
SHARD = re.compile(r"part-\d+\.jsonl")
LARGE = 1 << 26
"""Bytes from which processes are started for it."""


def check_recorded(paths: Iterable[str | os.PathLike[str]], workers: int = 1) -> None:
    """Those of some files that are shards of a stage; the others are somebody's own."""
    outputs = cache(_outputs)
    expected = {}
    for path in map(Path, paths):
        if SHARD.fullmatch(path.name) and path.is_file():  # a pipe is read once
            place = Path(os.path.abspath(path))
            known = outputs(place.parent).get(place.name) or outputs(place.parent.parent).get(
                f"{place.parent.name}/{place.name}")
            if known is not None:
                expected[str(path)] = known
    check_shards(expected, workers)


def check_shards(expected: Mapping[str, str], workers: int = 1) -> None:
    """By path the SHA-256 that each must have."""
    try:
        large = sum(map(os.path.getsize, expected)) > LARGE
        for (path, wanted), found in zip(expected.items(), _sums(list(expected), workers if large else 1)):
            if found != wanted:
                raise DataError(f"{path}: expected content with the sha256 {wanted} ({STAGE_FILE}), found {found}: "
                                "changed or damaged since it was written; remove the folder of that stage and run its "
                                "command again")
    except OSError as error:
        raise DataError(f"{error.filename}: cannot read: {error.strerror or error}") from error


def _sums(paths: Sequence[str], workers: int) -> Iterable[str]:
    return ordered_map(sha256_file, paths, min(workers, len(paths)))


def sha256_file(path: str) -> str:
    whole, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            whole.update(buffer[:count])
    return whole.hexdigest()


def _outputs(folder: Path) -> Mapping[str, str]:
    """Name -> SHA-256 of the shards in the folder of a stage; of any other folder nothing."""
    try:
        record: Any = json.loads((folder / STAGE_FILE).read_bytes())
        return {str(output["name"]): str(output["sha256"]) for output in record["outputs"]}
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError):
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / STAGE_FILE}: not the record of a stage ({error}); run its command again") from error
