"""Check every byte of a tag: sizes, checksums, the provenance of each file, and that it holds the pieces it should.
Reads only; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from data.storage import crc32_file
from megatron.checkpoint.file_formats import TensorLocation, explain_read_errors, read_header
from megatron.checkpoint.manifest import (MANIFEST, RANK_0_FILES, SHARED_STATE_FILE, FileEntry, Manifest,
                                          check_provenance, rank_manifest_name, rank_of_file, read_rank_manifest,
                                          read_shared_state)
from megatron.checkpoint.tags import format_file_names, print_to_stderr, read_tag_manifest, tag_folder
from megatron.errors import CheckpointError


def verify_tag(root: Path, tag: str) -> tuple[Manifest, list[str]]:
    """Check every byte of the tag, and warn of other files; returns the manifest and the names of all other files."""
    manifest, files = verify_share(root, tag)
    warn_of_unknown_files(tag_folder(root, tag), manifest, len(files))
    return manifest, files


def verify_share(root: Path, tag: str, share: int = 0, shares: int = 1) -> tuple[Manifest, list[str]]:
    """Check every byte of the manifest and of the files of one share, and that they hold each piece of the manifest
    once, with its dtype and count; returns the manifest and the names of the files. Ranks divide the work; no rank
    reads a file of another share."""
    manifest, folder, found = read_tag_manifest(root, tag), tag_folder(root, tag), list[str]()
    with explain_read_errors(f"tag {tag}: {folder}"):
        for rank in range(share, manifest.world_size, shares):
            part = read_rank_manifest(folder, manifest, rank)
            found += [rank_manifest_name(rank), *part.files]
            _check_sizes(folder, part.files, manifest)  # of all files first, since they are cheap
            stored: dict[str, TensorLocation] = {}
            for name, entry in part.files.items():
                tensors = _verify_file(folder / name, entry, manifest, rank)
                if twice := stored.keys() & tensors.keys():
                    raise CheckpointError(f"tag {manifest.tag}: file {name}: {min(twice)!r:.80} is in another file of "
                                          "the rank as well")
                stored |= tensors
            for tensor in manifest.tensors:
                if (piece := manifest.piece_of_rank(tensor, rank)) is None:
                    continue
                key, _, count = piece
                place = stored.get(key)
                if place is None or (place.dtype, place.shape) != (tensor.dtype, (count,)):
                    actual = "nothing" if place is None else f"{place.dtype} {str(list(place.shape)):.80}"
                    raise CheckpointError(f"tag {manifest.tag}: files of rank {rank}: {key!r:.80} expected to be "
                                          f"{tensor.dtype:.20} [{count}], found {actual}")
    return manifest, found


def _verify_file(path: Path, entry: FileEntry, manifest: Manifest, rank: int) -> dict[str, TensorLocation]:
    """Check the bytes and the provenance of one file; returns the tensors in it."""
    where = f"tag {manifest.tag}: file {path.name}"
    with explain_read_errors(where):
        if (found := crc32_file(path)) != entry.crc32:
            raise CheckpointError(f"{where}: damaged, crc32 expected {entry.crc32}, found {found}")
        if path.name == SHARED_STATE_FILE:
            read_shared_state(path.parent, manifest, where)
            return {}
        if path.name in RANK_0_FILES:
            return {}
        with open(path, "rb") as file:
            tensors, metadata = read_header(file, where)
        check_provenance(metadata, manifest, rank, where)
        return tensors


def check_sizes(root: Path, tag: str) -> Manifest:
    """The manifest of a tag whose files all exist with the right size. No tensor is read."""
    manifest, folder = read_tag_manifest(root, tag), tag_folder(root, tag)
    for rank in range(manifest.world_size):
        _check_sizes(folder, read_rank_manifest(folder, manifest, rank).files, manifest)
    return manifest


def _check_sizes(folder: Path, files: Mapping[str, FileEntry], manifest: Manifest) -> None:
    for name, entry in files.items():
        if not (folder / name).is_file():
            what = f"file {name}" if not name.startswith("rank") else (
                f"shard file {name} (rank {rank_of_file(name)} of {manifest.world_size})")
            raise CheckpointError(f"tag {manifest.tag}: {what} missing")
        if (found := (folder / name).stat().st_size) != entry.size:
            raise CheckpointError(f"tag {manifest.tag}: file {name}: size expected {entry.size} bytes, found {found}")


def warn_of_unknown_files(folder: Path, manifest: Manifest, count: int) -> None:
    """Warn of names in the folder beside the manifest and the `count` files that all shares together have checked."""
    with explain_read_errors(f"tag {manifest.tag}: {folder}"):
        names = {*os.listdir(folder)} - {MANIFEST}
    if len(names) == count:
        return
    # Rank manifests are opened only after a mismatch, and only those that `names` concern.
    expected: set[str] = set()
    for rank in {rank_of_file(name) for name in names}:
        if rank is not None and rank < manifest.world_size:
            expected |= {rank_manifest_name(rank), *read_rank_manifest(folder, manifest, rank).files}
    if unknown := names - expected:
        print_to_stderr(f"warning: tag {manifest.tag}: not part of this checkpoint, and not read: "
                        f"{format_file_names(unknown)}")
