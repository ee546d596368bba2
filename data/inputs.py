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

from data.compressed import COMPRESSED_SUFFIXES, strip_compression_suffix
from data.recorded import STAGE_FILE, shards_of_folder
from data.storage import DataError, escape_to_one_line

JSON_LINES, PLAIN_TEXT = "jsonl", "text"
KIND_OF_SUFFIX = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".txt": PLAIN_TEXT}
FOLDER_SUFFIXES = (".jsonl", ".ndjson", ".txt")
"""Not .json there: settings and the facts of corpora have that name."""

CACHE_SUFFIX = ".cache"
"""Of the folder beside a source that holds the corpus made of it (`corpora`)."""

STAGE_OWN_FILES = (STAGE_FILE, "dropped.jsonl")

NAMES_SHOWN = 3

OWN_CACHE_PATTERN = re.compile(
    r"\.?(?:.*-)?[0-9a-f]{16}(?:\.(?:bin|idx|json|lock)|-\d+-(?:documents|starts)\.(?:rows|npy))|"
    r"\..*\.(?:tmp|writing)|\.lock")
"""Files that this program keeps in a cache, which may be a folder of text (--data-cache-path), and their locks."""


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What a file holds, by its name; None: the name does not say."""
    return KIND_OF_SUFFIX.get(Path(strip_compression_suffix(os.fspath(path))).suffix)


@dataclass
class FoundFiles:
    """The files, and what of the folders is not among them."""

    files: list[str] = field(default_factory=list)
    hidden: int = 0
    """Names that begin with a dot; what is inside such a folder is not counted."""
    unknown: list[str] = field(default_factory=list)
    pipes: list[str] = field(default_factory=list)
    """And other things that are no files: sockets, devices."""
    link_loops: list[str] = field(default_factory=list)
    """Symbolic links to a folder that they are in."""

    not_of_stage: list[str] = field(default_factory=list)
    """In the folder of a stage, and none of its files."""

    @property
    def left_out(self) -> str:
        """What was not read, in a few words; "" for nothing."""
        parts = [f"{self.hidden} hidden"] if self.hidden else []
        for names, one, several in (
                (self.unknown, "1 of unknown kind", "of unknown kind"), (self.pipes, "a pipe", "pipes"),
                (self.not_of_stage, "1 not of the stage", "not of the stage"),
                (self.link_loops, "1 link to a folder around it", "links to a folder around them")):
            if names:
                more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
                count = one if len(names) == 1 else f"{len(names)} {several}"
                parts.append(f"{count} ({escape_to_one_line(', '.join(names[:NAMES_SHOWN]))}{more})")
        return f"left out: {', '.join(parts)}" if parts else ""


def find_text_files(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = FOLDER_SUFFIXES) -> FoundFiles:
    """The files that are meant, in the order given; within a folder, sorted by path. Nothing is read."""
    found = FoundFiles()
    for given in inputs:
        name = os.fspath(given)
        if not os.path.isdir(name):
            found.files.append(name)
            continue
        before, shards_of = len(found.files), cache(shards_of_folder)
        is_stage = shards_of(Path(name)) is not None
        for path in sorted(walk_files(Path(name), found, _is_own_cache)):
            folders = [Path(name), *(folder for folder in reversed(path.parents) if Path(name) in folder.parents)]
            shards = next((shards for shards in map(shards_of, folders) if shards is not None), None)
            if shards is not None and str(path) not in shards:
                if path.name not in STAGE_OWN_FILES:
                    found.not_of_stage.append(str(path))
                continue
            wanted = Path(strip_compression_suffix(path.name)).suffix in suffixes
            (found.files if wanted else found.unknown).append(str(path))
        if len(found.files) == before and is_stage:
            raise DataError(f"{name}: this stage kept no document")
        if len(found.files) == before:
            raise DataError(f"{name}: this folder holds no file of text ({' '.join(suffixes)}, each also with "
                            f"{' '.join(COMPRESSED_SUFFIXES)})" + (f"; {found.left_out}" if found.left_out else ""))
    return found


def walk_files(folder: Path, found: FoundFiles, skip: Callable[[os.DirEntry[str]], bool] = lambda _: False,
               parents: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Every file in a folder and in those inside it; symbolic links are followed, but not round and round."""
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot read: {error.strerror or error}") from error
    here = (status.st_dev, status.st_ino)
    if here in parents:
        found.link_loops.append(str(folder))
        return
    for entry in entries:
        path = Path(entry.path)
        if skip(entry):
            continue
        if entry.name.startswith("."):
            found.hidden += 1
        elif entry.is_dir():
            yield from walk_files(path, found, skip, (*parents, here))
        elif entry.is_file() or not path.exists():  # a dangling link is an error where it is opened
            yield path
        else:
            found.pipes.append(entry.path)


def _is_own_cache(entry: os.DirEntry[str]) -> bool:
    """What we made of text, beside the text: no part of what the user put there."""
    if entry.is_dir():
        return entry.name.endswith(CACHE_SUFFIX) and os.path.exists(entry.path.removesuffix(CACHE_SUFFIX))
    return OWN_CACHE_PATTERN.fullmatch(entry.name) is not None
