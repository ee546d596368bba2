"""Which checkpoints are there under a save root, and are they intact. Reads only; no torch. choice.py chooses one.

A checkpoint is a folder with a valid manifest. A folder gets its final name in one rename, after its last byte is on
the disk (commit.py), so a visible `global_step<N>` without a valid manifest is damaged, not unfinished: choosing it is
an error, and silently choosing an older one would lose work, unless the caller asks to fall back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from data.storage import crc32_file, escape_to_one_line
from megatron.checkpoint.header import Header, Place, read_header
from megatron.checkpoint.manifest import MANIFEST, FileEntry, Manifest, key_of, read_manifest, safe_name, step_of
from megatron.checkpoint.part import CONFIG, Origin, check_origin, origin_of, part_name, read_part, writer_of
from megatron.checkpoint.recognise import nothing_under, recognise
from megatron.checkpoint.strangers import check_tag_inside, unread
from megatron.checkpoint.strict import Record, parse_json, read_bytes
from megatron.errors import CheckpointError

Say = Callable[[str], None]

ASIDE = ".aside-"
"""Prefix of a committed tag that was moved out of the way of its successor of the same name (commit.py)."""


def say_stderr(line: str) -> None:
    print(escape_to_one_line(line), file=sys.stderr, flush=True)


def folder_of(root: Path, tag: str) -> Path:
    """The folder of `tag`: of that name, or aside if a kill fell between the two renames of its replacement."""
    folder, aside = root / safe_name(tag, "tag"), root / (ASIDE + tag)
    return aside if not folder.exists() and (aside / MANIFEST).exists() else folder


def held(root: Path, tag: str) -> str:
    """The tag, if there is one of that name."""
    if not folder_of(root, tag).is_dir():
        raise CheckpointError(f"no tag {tag} under {root}, which holds {names_in(root)}" if tag_names(root) else
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


def names_in(root: Path) -> str:
    """The same for a line: of many the first and the last ones."""
    names = tag_names(root)
    return ", ".join(names if len(names) < 8 else [*names[:2], f"{len(names) - 5} more", *names[-3:]]) or "none"


def steps_of(root: Path) -> dict[str, int]:
    """The same with their steps, in the order of the steps."""
    found: dict[str, int] = {}
    for name in folders(root):
        tag = name.removeprefix(ASIDE)
        step = step_of(tag)
        if step is None and (root / name / MANIFEST).is_file():
            step = _own_iteration(root, tag)
        if step is not None:
            found[tag] = step
    return dict(sorted(found.items(), key=lambda entry: (entry[1], entry[0])))


def folders(root: Path) -> Iterator[str]:
    """Names of what may be tags."""
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


def check_sizes(root: Path, tag: str) -> Manifest:
    """The valid manifest of one tag whose files are all there, and of their sizes. No tensor is read."""
    manifest, folder = manifest_of(root, tag), folder_of(root, tag)
    for rank in range(manifest.ranks if manifest.has_parts else 1):
        files = read_part(folder, manifest, rank)[0].files if manifest.has_parts else manifest.files
        for name, entry in files.items():
            _check_size(folder / name, entry.size, manifest)
    return manifest


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


# ---- the files of one rank ------------------------------------------------------------------------------------------

def check_files(folder: Path, files: Mapping[str, FileEntry], manifest: Manifest) -> None:
    """Those of one rank. All sizes first: they cost nothing."""
    for name, entry in files.items():
        _check_size(folder / name, entry.size, manifest)
    for name, entry in files.items():
        where = f"tag {manifest.tag}: file {name}"
        try:
            if (found := crc32_file(folder / name)) != entry.crc32:
                raise CheckpointError(f"{where}: damaged, crc32 expected {entry.crc32}, found {found}")
            if manifest.has_origins:
                _check_origin(folder / name, manifest, where)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error


def check_pieces(folder: Path, rank: int, names: Iterable[str], manifest: Manifest) -> None:
    """The rank's files of tensors hold each piece that the manifest says it wrote, once and as it says, and nothing
    twice."""
    found: dict[str, Place] = {}
    for name in names:
        where = f"tag {manifest.tag}: file {name}"
        for key, place in header_of(folder / name, where).places.items():
            if key in found:
                raise CheckpointError(f"{where}: {key!r:.80} is in another file of the rank as well")
            found[key] = place
    for tensor in manifest.tensors:
        piece = manifest.piece_of(tensor, rank)
        if piece is None:
            continue
        key, expected = key_of(tensor, rank % manifest.grid[0], piece[0]), (tensor.dtype, (piece[1],))
        there = found.get(key)
        if there is None or (there.dtype, there.shape) != expected:
            held = "nothing" if there is None else f"{there.dtype} {str(list(there.shape)):.80}"
            raise CheckpointError(f"tag {manifest.tag}: files of rank {rank}: {key!r:.80} expected to be "
                                  f"{tensor.dtype:.20} {list(expected[1])}, found {held}")


def header_of(path: Path, where: str) -> Header:
    try:
        with open(path, "rb") as file:
            return read_header(file, where)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read ({error.strerror})") from error


def _check_size(path: Path, expected: int, manifest: Manifest) -> None:
    if not path.is_file():
        raise CheckpointError(f"tag {manifest.tag}: {_describe(path.name, manifest)} missing")
    if (found := path.stat().st_size) != expected:
        raise CheckpointError(f"tag {manifest.tag}: file {path.name}: size expected {expected} bytes, found {found}")


def _check_origin(path: Path, manifest: Manifest, where: str) -> None:
    """What the file says that it is of."""
    if path.name == CONFIG:
        if parse_json(read_bytes(path, where), where) != manifest.config:
            raise CheckpointError(f"{where}: is of another checkpoint: not the configuration that the manifest has")
        return
    rank = writer_of(path.name)
    assert rank is not None, path.name
    expected = origin_of(manifest, rank)
    if path.suffix == ".safetensors":
        check_origin(header_of(path, where).metadata, expected, where)
    else:
        state_in(parse_json(read_bytes(path, where), where), expected, where)


def state_in(value: object, expected: Origin, where: str) -> object:
    """What `shared.json` holds, if it is of the checkpoint."""
    record = Record(value, where)
    check_origin(record.take("origin", dict), expected, where)
    state = record.take("state", dict)
    record.done()
    return state


def _describe(name: str, manifest: Manifest) -> str:
    """A file, with its rank where it is one rank's shard."""
    rank, shared = writer_of(name), not name.startswith("rank")
    if rank is None or shared:
        return f"file {name}"
    world = manifest.ranks if manifest.has_parts else sum(
        other.endswith(".json") and other.startswith("rank") for other in manifest.files)
    return f"shard file {name} (rank {rank} of {world})"
