"""Which checkpoints are there under a save root, and are they intact. Reads only; no torch. choice.py chooses one.

A checkpoint is a folder with a valid manifest. A folder gets its final name in one rename, after its last byte is on
the disk (commit.py), so a visible `global_step<N>` without a valid manifest is damaged, not unfinished: choosing it is
an error, and silently choosing an older one would lose work, unless the caller asks to fall back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.content import check_files, check_pieces
from megatron.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_manifest, safe_name, step_of
from megatron.checkpoint.part import part_name, read_part, writer_of
from megatron.checkpoint.recognise import nothing_under, recognise
from megatron.checkpoint.strangers import check_tag_inside, unread
from megatron.errors import CheckpointError

Say = Callable[[str], None]

ASIDE = ".aside-"
"""Prefix of a committed tag that was moved out of the way of its successor of the same name (commit.py)."""


def say_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def folder_of(root: Path, tag: str) -> Path:
    """The folder of `tag`: of that name, or aside if a kill fell between the two renames of its replacement."""
    folder, aside = root / safe_name(tag, "tag"), root / (ASIDE + tag)
    return aside if not folder.exists() and (aside / MANIFEST).exists() else folder


def held(root: Path, tag: str) -> str:
    """The tag, if there is one of that name."""
    if not folder_of(root, tag).is_dir():
        names = ", ".join(tag_names(root))
        raise CheckpointError(f"no tag {tag} under {root}, which holds {names}" if names else
                              f"no tag {tag}: {nothing_under(root)}")
    return tag


def manifest_of(root: Path, tag: str) -> Manifest:
    """The valid manifest of one tag."""
    folder = folder_of(root, tag)
    check_tag_inside(folder, root, tag)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"tag {tag}: {MANIFEST} missing in {folder}{recognise(folder)}")
    manifest = read_manifest(folder)
    if manifest.tag != tag:
        raise CheckpointError(f"tag {tag}: {MANIFEST} is of tag {manifest.tag}")
    return manifest


def tag_names(root: Path) -> list[str]:
    """Names that look like tags, by step: every folder named global_step<N>, and any other with a valid manifest."""
    return list(steps_of(root))


def steps_of(root: Path) -> dict[str, int]:
    """The same with their steps, in the order of the steps."""
    found: dict[str, int] = {}
    for name in _folders(root):
        tag = name.removeprefix(ASIDE)
        step = step_of(tag)
        if step is None and (root / name / MANIFEST).is_file():
            step = _own_iteration(root, tag)
        if step is not None:
            found[tag] = step
    return dict(sorted(found.items(), key=lambda entry: (entry[1], entry[0])))


def _folders(root: Path) -> Iterator[str]:
    try:
        with os.scandir(root) as entries:
            yield from (entry.name for entry in entries
                        if entry.is_dir() and (not entry.name.startswith(".") or entry.name.startswith(ASIDE)))
    except (FileNotFoundError, NotADirectoryError):
        return  # an absent root holds no checkpoint; the caller says so
    except OSError as error:  # an unreadable one may well hold some: this is not a fresh start
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from error


def _own_iteration(root: Path, tag: str) -> int | None:
    """The step of a tag whose name does not contain it; None when it is not a valid one of ours."""
    try:
        return manifest_of(root, tag).iteration
    except CheckpointError:
        return None


def complete(root: Path) -> list[Manifest]:
    """The manifests of all complete tags, by step."""
    manifests = []
    for tag in tag_names(root):
        try:
            manifests.append(manifest_of(root, tag))
        except CheckpointError:
            continue
    return manifests


def verify(root: Path, tag: str, say: Say = say_stderr) -> Manifest:
    """Every byte of the tag against its manifest and its parts; the manifest with all files. `say` is told of others.
    """
    manifest = manifest_of(root, tag)
    folder = folder_of(root, tag)
    files = check_share(folder, manifest)
    if others := other_names(folder, manifest, len(files)):
        say(unread(tag, others))
    return replace(manifest, files=files)


def check_share(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> dict[str, FileEntry]:
    """Check every byte of the files of one share, so that ranks can divide the work; those files. No rank looks at a
    file of another share."""
    if manifest.has_parts:
        found: dict[str, FileEntry] = {}
        for rank in range(share, manifest.ranks, shares):
            part, itself = read_part(folder, manifest, rank)
            check_files(folder, part.files, manifest)
            check_pieces(folder, rank, part.tensor_files, manifest)
            found |= {part_name(rank): itself, **part.files}
        return found
    mine = {name: manifest.files[name] for name in sorted(manifest.files)[share::shares]}
    check_files(folder, mine, manifest)
    return mine


def other_names(folder: Path, manifest: Manifest, count: int) -> list[str]:
    """What is there beside the manifest and the `count` files that all shares together have checked."""
    names = set(os.listdir(folder)) - {MANIFEST}
    if len(names) == count and (manifest.has_parts or names == set(manifest.files)):
        return []
    return sorted(names - set(_expected(folder, manifest, names)))


def _expected(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[str]:
    """The files of the tag, as far as those of `names` are concerned. Only where something is wrong: it opens parts."""
    if not manifest.has_parts:
        yield from manifest.files
        return
    for rank in {rank for name in names if (rank := writer_of(name)) is not None and rank < manifest.ranks}:
        yield part_name(rank)
        yield from read_part(folder, manifest, rank)[0].files
