"""The files of text that a user means: `find` turns names of files and folders into a list of files, in order.

A name says what a file holds: `.jsonl` (or `.ndjson`, `.json`) one JSON object per line, `.txt` plain text; each also
with `.gz`, `.xz` or `.zst`. A folder means the files of these kinds in it and in the folders inside it, sorted by path;
nothing but our own caches is left out without being counted, or named, in `Found.left_out`. Of the folder of a stage
(see `recorded`) it means the shards that are listed. A file that is named itself
is always read: as plain text where its name says so, else as JSON lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from data.compressed import COMPRESSED, without_compression
from data.recorded import STAGE_FILE, listed
from data.storage import DataError, one_line

JSON_LINES, PLAIN_TEXT = "jsonl", "text"
KINDS = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".txt": PLAIN_TEXT}
IN_FOLDERS = (".jsonl", ".ndjson", ".txt")
"""Not .json there: settings and the facts of corpora have that name."""

CACHE_SUFFIX = ".cache"
"""Of the folder beside a source that holds the corpus made of it (`corpora`)."""

OF_A_STAGE = (STAGE_FILE, "dropped.jsonl")

NAMES_SHOWN = 3

OF_OURS = re.compile(r"\.?(?:.*-)?[0-9a-f]{16}(?:\.(?:bin|idx|json|lock)|-\d+-(?:documents|starts)\.(?:rows|npy))|"
                     r"\..*\.(?:tmp|writing)|\.lock")
"""Files that this program keeps in a cache, which may be a folder of text (--data-cache-path), and their locks."""


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What a file holds, by its name; None: the name does not say."""
    return KINDS.get(Path(without_compression(os.fspath(path))).suffix)


@dataclass
class Found:
    """The files, and what of the folders is not among them."""

    files: list[str] = field(default_factory=list)
    hidden: int = 0
    """Names that begin with a dot; what is inside such a folder is not counted."""
    unknown: list[str] = field(default_factory=list)
    pipes: list[str] = field(default_factory=list)
    """And other things that are no files: sockets, devices."""
    loops: list[str] = field(default_factory=list)
    """Symbolic links to a folder that they are in."""

    strangers: list[str] = field(default_factory=list)
    """In the folder of a stage, and none of its files."""

    @property
    def left_out(self) -> str:
        """What was not read, in a few words; "" for nothing."""
        parts = [f"{self.hidden} hidden"] if self.hidden else []
        for names, one, several in (
                (self.unknown, "1 of unknown kind", "of unknown kind"), (self.pipes, "a pipe", "pipes"),
                (self.strangers, "1 not of the stage", "not of the stage"),
                (self.loops, "1 link to a folder around it", "links to a folder around them")):
            if names:
                more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
                count = one if len(names) == 1 else f"{len(names)} {several}"
                parts.append(f"{count} ({one_line(', '.join(names[:NAMES_SHOWN]))}{more})")
        return f"left out: {', '.join(parts)}" if parts else ""


def find(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = IN_FOLDERS) -> Found:
    """The files that are meant, in the order given; within a folder, sorted by path. Nothing is read."""
    found = Found()
    for given in inputs:
        name = os.fspath(given)
        if not os.path.isdir(name):
            found.files.append(name)
            continue
        before, shards_of = len(found.files), cache(listed)
        is_stage = shards_of(Path(name)) is not None
        for path in sorted(files_in(Path(name), found, _is_ours)):
            around = [Path(name), *(folder for folder in reversed(path.parents) if Path(name) in folder.parents)]
            shards = next((shards for shards in map(shards_of, around) if shards is not None), None)
            if shards is not None and str(path) not in shards:
                if path.name not in OF_A_STAGE:
                    found.strangers.append(str(path))
                continue
            wanted = Path(without_compression(path.name)).suffix in suffixes
            (found.files if wanted else found.unknown).append(str(path))
        if len(found.files) == before and is_stage:
            raise DataError(f"{name}: this stage kept no document")
        if len(found.files) == before:
            raise DataError(f"{name}: this folder holds no file of text ({' '.join(suffixes)}, each also with "
                            f"{' '.join(COMPRESSED)})" + (f"; {found.left_out}" if found.left_out else ""))
    return found


def files_in(folder: Path, found: Found, passed_over: Callable[[os.DirEntry[str]], bool] = lambda _: False,
             around: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Every file in a folder and in those inside it; symbolic links are followed, but not round and round."""
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot read: {error.strerror or error}") from error
    here = (status.st_dev, status.st_ino)
    if here in around:
        found.loops.append(str(folder))
        return
    for entry in entries:
        path = Path(entry.path)
        if passed_over(entry):
            continue
        if entry.name.startswith("."):
            found.hidden += 1
        elif entry.is_dir():
            yield from files_in(path, found, passed_over, (*around, here))
        elif entry.is_file() or not path.exists():  # a dangling link is an error where it is opened
            yield path
        else:
            found.pipes.append(entry.path)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """What we made of text, beside the text: no part of what the user put there."""
    if entry.is_dir():
        return entry.name.endswith(CACHE_SUFFIX) and os.path.exists(entry.path.removesuffix(CACHE_SUFFIX))
    return OF_OURS.fullmatch(entry.name) is not None
