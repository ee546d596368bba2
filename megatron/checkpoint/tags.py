"""Which checkpoints (tags) a save root holds, and whether their files are intact. Reads only; no torch.

A tag is a folder with a valid manifest. It gets its name in one rename after its last byte is on disk (commit.py), so a
`global_step<N>` without a valid manifest is damaged, not unfinished. Links that lead out of the save root are not
followed, read, written or deleted; files that no save wrote are reported and left alone.
Not here: which tag a load uses (resolve_tag.py).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from data.storage import crc32_file, escape_to_one_line
from megatron.checkpoint.convert.detect_format import describe_format, no_checkpoint_message
from megatron.checkpoint.file_formats import (SafetensorsHeader, StrictRecord, TensorLocation, explain_read_errors,
                                              parse_json, read_bytes, read_header)
from megatron.checkpoint.manifest import (LATEST, MANIFEST, FileEntry, Manifest, check_safe_name, iteration_of_tag,
                                          piece_key, read_manifest)
from megatron.checkpoint.rank_manifest import (CONFIG_FILE, FileProvenance, check_provenance, provenance_of,
                                               rank_manifest_name, rank_of_file, read_rank_manifest)
from megatron.errors import CheckpointError

MAX_NAMES = 3
"""File names in a message; of further ones it gives the number."""
_OLD_FORMAT_FILE = re.compile(r"rank[0-9]{1,9}\.s[0-9]{1,9}\.safetensors")


def link_target_outside(path: Path, root: Path) -> str | None:
    """Target of a link that leaves the save root; None for anything else."""
    if not path.is_symlink():
        return None
    target, root_path = os.path.realpath(path), os.path.realpath(root)
    return None if os.path.commonpath([target, root_path]) == root_path else target


def check_link_inside(path: Path, root: Path, what: str, remedy: str) -> None:
    if (target := link_target_outside(path, root)) is not None:
        raise CheckpointError(f"{what}: {path} is a link to {target}, outside the save root, and is not followed; "
                              f"{remedy}")


def check_latest_inside(root: Path) -> None:
    check_link_inside(root / LATEST, root, LATEST, "write the name of a tag into a file in its place")


def remove_link(path: Path) -> Path:
    """Return `path` for writing; a link there is removed, its target stays."""
    if path.is_symlink():
        path.unlink()
    return path


def unknown_files(folder: Path) -> list[str]:
    """Names in a tag's folder that no save uses. Opens nothing."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in names if name != MANIFEST and rank_of_file(name) is None
                  and not _OLD_FORMAT_FILE.fullmatch(name))


def format_file_names(names: Iterable[str]) -> str:
    """`'notes.txt'`, `'a', 'b', 'c' and 5 more`."""
    known = sorted(names)
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return ", ".join(f"{name!r:.120}" for name in known[:MAX_NAMES]) + more


def unknown_files_warning(tag: str, names: Iterable[str]) -> str:
    return f"warning: tag {tag}: not part of this checkpoint, and not read: {format_file_names(names)}"


PrintLine = Callable[[str], None]

ASIDE_PREFIX = ".aside-"
"""Prefix of a committed tag that was moved aside for its successor of the same name (commit.py)."""


def print_to_stderr(line: str) -> None:
    print(escape_to_one_line(line), file=sys.stderr, flush=True)


def tag_folder(root: Path, tag: str) -> Path:
    """The folder of `tag`, or its aside copy after a kill between the two renames of a replacement."""
    folder, aside = root / check_safe_name(tag, "tag"), root / (ASIDE_PREFIX + tag)
    return aside if not folder.exists() and (aside / MANIFEST).exists() else folder


def check_tag_exists(root: Path, tag: str) -> str:
    """Return the tag; CheckpointError if it does not exist."""
    if not tag_folder(root, tag).is_dir():
        raise CheckpointError(f"no tag {tag} under {root}, which holds {names_in(root)}" if tag_names(root) else
                              f"no tag {tag}: {no_checkpoint_message(root)}")
    return tag


def read_tag_manifest(root: Path, tag: str) -> Manifest:
    """The manifest of one tag; CheckpointError if it is missing or invalid."""
    folder = tag_folder(root, tag)
    check_link_inside(folder, root, f"tag {tag}", "give that folder itself, or move it here")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"tag {tag}: {MANIFEST} missing in {folder}{describe_format(folder)}")
    manifest = read_manifest(folder)
    if manifest.tag != tag:
        raise CheckpointError(f"tag {tag}: {MANIFEST} is of tag {manifest.tag}")
    return manifest


def tag_names(root: Path) -> list[str]:
    """Tags by step: every folder named global_step<N>, and any other with a valid manifest."""
    return list(iterations_by_tag(root))


def names_in(root: Path) -> str:
    """`tag_names` for a message; of many only the first and last."""
    names = tag_names(root)
    return ", ".join(names if len(names) < 8 else [*names[:2], f"{len(names) - 5} more", *names[-3:]]) or "none"


def iterations_by_tag(root: Path) -> dict[str, int]:
    """Tag -> iteration, sorted by iteration."""
    iterations: dict[str, int] = {}
    for name in tag_folder_names(root):
        tag = name.removeprefix(ASIDE_PREFIX)
        if (step := iteration_of_tag(tag)) is not None:
            iterations[tag] = step
        elif (root / name / MANIFEST).is_file():
            with suppress(CheckpointError):
                iterations[tag] = read_tag_manifest(root, tag).iteration
    return dict(sorted(iterations.items(), key=lambda entry: (entry[1], entry[0])))


def tag_folder_names(root: Path) -> Iterator[str]:
    """Names of folders that may be tags."""
    try:
        with os.scandir(root) as entries:
            yield from (entry.name for entry in entries
                        if entry.is_dir() and (not entry.name.startswith(".") or entry.name.startswith(ASIDE_PREFIX)))
    except (FileNotFoundError, NotADirectoryError):
        return  # a missing root holds no checkpoint; the caller reports it
    except OSError as error:  # an unreadable one may hold some, so this is not a fresh start
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from error


def complete_manifests(root: Path) -> list[Manifest]:
    """The manifests of all complete tags by step."""
    manifests = []
    for tag in tag_names(root):
        with suppress(CheckpointError):
            manifests.append(read_tag_manifest(root, tag))
    return manifests


def verify_tag(root: Path, tag: str, print_line: PrintLine = print_to_stderr) -> Manifest:
    """Check every byte of the tag; returns the manifest with all files filled in. `print_line` gets a warning of other
    files."""
    manifest = read_tag_manifest(root, tag)
    folder = tag_folder(root, tag)
    files = verify_share(folder, manifest)
    if others := unexpected_names(folder, manifest, len(files)):
        print_line(unknown_files_warning(tag, others))
    return replace(manifest, files=files)


def check_sizes(root: Path, tag: str) -> Manifest:
    """The manifest of a tag whose files all exist with the right size. No tensor is read."""
    manifest, folder = read_tag_manifest(root, tag), tag_folder(root, tag)
    for rank in range(manifest.world_size if manifest.has_rank_manifests else 1):
        files = read_rank_manifest(folder, manifest, rank)[0].files if manifest.has_rank_manifests else manifest.files
        for name, entry in files.items():
            _check_size(folder / name, entry.size, manifest)
    return manifest


def verify_share(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> dict[str, FileEntry]:
    """Check every byte of the files of one share, and return these files. Ranks divide the work; no rank reads a file
    of another share."""
    if manifest.has_rank_manifests:
        found: dict[str, FileEntry] = {}
        for rank in range(share, manifest.world_size, shares):
            part, itself = read_rank_manifest(folder, manifest, rank)
            verify_files(folder, part.files, manifest)
            verify_pieces(folder, rank, part.tensor_files, manifest)
            found |= {rank_manifest_name(rank): itself, **part.files}
        return found
    mine = {name: manifest.files[name] for name in sorted(manifest.files)[share::shares]}
    verify_files(folder, mine, manifest)
    return mine


def unexpected_names(folder: Path, manifest: Manifest, count: int) -> list[str]:
    """Names beside the manifest and the `count` files that all shares together have checked."""
    names = set(os.listdir(folder)) - {MANIFEST}
    if len(names) == count and (manifest.has_rank_manifests or names == set(manifest.files)):
        return []
    expected = set(manifest.files)
    # Rank manifests are opened only after a mismatch, and only those that `names` concern.
    for rank in {rank_of_file(name) for name in names} if manifest.has_rank_manifests else ():
        if rank is not None and rank < manifest.world_size:
            expected |= {rank_manifest_name(rank), *read_rank_manifest(folder, manifest, rank)[0].files}
    return sorted(names - expected)


# ---- the files of one rank ------------------------------------------------------------------------------------------

def verify_files(folder: Path, files: Mapping[str, FileEntry], manifest: Manifest) -> None:
    """Check the files of one rank; all sizes first, since they are cheap."""
    for name, entry in files.items():
        _check_size(folder / name, entry.size, manifest)
    for name, entry in files.items():
        path, where = folder / name, f"tag {manifest.tag}: file {name}"
        with explain_read_errors(where):
            if (found := crc32_file(path)) != entry.crc32:
                raise CheckpointError(f"{where}: damaged, crc32 expected {entry.crc32}, found {found}")
            if not manifest.has_provenance:
                continue
            rank = rank_of_file(name)
            assert rank is not None, name
            expected = provenance_of(manifest, rank)
            if path.suffix == ".safetensors":
                check_provenance(read_file_header(path, where).metadata, expected, where)
            elif name != CONFIG_FILE:
                parse_shared_state(parse_json(read_bytes(path, where), where), expected, where)
            elif parse_json(read_bytes(path, where), where) != manifest.config:
                raise CheckpointError(f"{where}: is of another checkpoint: not the configuration that the manifest has")


def verify_pieces(folder: Path, rank: int, names: Iterable[str], manifest: Manifest) -> None:
    """Check that the rank's tensor files hold each piece of the manifest once, with its dtype and count, and no key
    twice."""
    found: dict[str, TensorLocation] = {}
    for name in names:
        where = f"tag {manifest.tag}: file {name}"
        for key, place in read_file_header(folder / name, where).tensors.items():
            if key in found:
                raise CheckpointError(f"{where}: {key!r:.80} is in another file of the rank as well")
            found[key] = place
    for tensor in manifest.tensors:
        if (piece := manifest.piece_of_rank(tensor, rank)) is None:
            continue
        key, expected = piece_key(tensor, rank % manifest.tp_dp_sizes[0], piece[0]), (tensor.dtype, (piece[1],))
        stored = found.get(key)
        if stored is None or (stored.dtype, stored.shape) != expected:
            actual = "nothing" if stored is None else f"{stored.dtype} {str(list(stored.shape)):.80}"
            raise CheckpointError(f"tag {manifest.tag}: files of rank {rank}: {key!r:.80} expected to be "
                                  f"{tensor.dtype:.20} {list(expected[1])}, found {actual}")


def read_file_header(path: Path, where: str) -> SafetensorsHeader:
    with explain_read_errors(where), open(path, "rb") as file:
        return read_header(file, where)


def _check_size(path: Path, expected: int, manifest: Manifest) -> None:
    if not path.is_file():
        rank, file = rank_of_file(path.name), f"file {path.name}"
        if rank is not None and path.name.startswith("rank"):
            world = manifest.world_size if manifest.has_rank_manifests else sum(
                other.endswith(".json") and other.startswith("rank") for other in manifest.files)
            file = f"shard {file} (rank {rank} of {world})"
        raise CheckpointError(f"tag {manifest.tag}: {file} missing")
    if (found := path.stat().st_size) != expected:
        raise CheckpointError(f"tag {manifest.tag}: file {path.name}: size expected {expected} bytes, found {found}")


def parse_shared_state(value: object, expected: FileProvenance, where: str) -> object:
    """The state in `shared.json`, after checking its provenance."""
    record = StrictRecord(value, where)
    check_provenance(record.take_field("origin", dict), expected, where)
    state = record.take_field("state", dict)
    record.check_all_taken()
    return state
