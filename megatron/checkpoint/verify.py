"""Check every byte of a tag: sizes, checksums, the provenance of each file, and that it holds the pieces it should.
Reads only; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from data.storage import crc32_file
from megatron.checkpoint.file_formats import (StrictRecord, TensorLocation, explain_read_errors, parse_json, read_bytes,
                                              read_header)
from megatron.checkpoint.manifest import (CONFIG_FILE, MANIFEST, FileEntry, Manifest, check_provenance, piece_key,
                                          provenance_of, rank_manifest_name, rank_of_file, read_rank_manifest)
from megatron.checkpoint.tags import print_to_stderr, read_tag_manifest, tag_folder, unknown_files_warning
from megatron.errors import CheckpointError


def verify_tag(root: Path, tag: str) -> dict[str, FileEntry]:
    """Check every byte of the tag, and warn of other files; returns its files without the manifest."""
    manifest = read_tag_manifest(root, tag)
    folder = tag_folder(root, tag)
    files = verify_share(folder, manifest)
    if others := unexpected_names(folder, manifest, len(files)):
        print_to_stderr(unknown_files_warning(tag, others))
    return files


def check_sizes(root: Path, tag: str) -> Manifest:
    """The manifest of a tag whose files all exist with the right size. No tensor is read."""
    manifest, folder = read_tag_manifest(root, tag), tag_folder(root, tag)
    for rank in range(manifest.world_size):
        for name, entry in read_rank_manifest(folder, manifest, rank).files.items():
            _check_size(folder / name, entry.size, manifest)
    return manifest


def verify_share(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> dict[str, FileEntry]:
    """Check every byte of the files of one share, and return these files. Ranks divide the work; no rank reads a file
    of another share."""
    found: dict[str, FileEntry] = {}
    for rank in range(share, manifest.world_size, shares):
        part = read_rank_manifest(folder, manifest, rank)
        _verify_files(folder, rank, part.files, manifest)
        found |= {rank_manifest_name(rank): part.own_entry, **part.files}
    return found


def unexpected_names(folder: Path, manifest: Manifest, count: int) -> list[str]:
    """Names beside the manifest and the `count` files that all shares together have checked."""
    names = set(os.listdir(folder)) - {MANIFEST}
    if len(names) == count:
        return []
    expected: set[str] = set()
    # Rank manifests are opened only after a mismatch, and only those that `names` concern.
    for rank in {rank_of_file(name) for name in names}:
        if rank is not None and rank < manifest.world_size:
            expected |= {rank_manifest_name(rank), *read_rank_manifest(folder, manifest, rank).files}
    return sorted(names - expected)


def _verify_files(folder: Path, rank: int, files: Mapping[str, FileEntry], manifest: Manifest) -> None:
    """Check the files of one rank: all sizes first, since they are cheap; then checksums and provenance; then that the
    tensor files hold each piece of the manifest once, with its dtype and count, and no key twice."""
    for name, entry in files.items():
        _check_size(folder / name, entry.size, manifest)
    stored: dict[str, TensorLocation] = {}
    for name, entry in files.items():
        path, where, expected = folder / name, f"tag {manifest.tag}: file {name}", provenance_of(manifest, rank)
        with explain_read_errors(where):
            if (found := crc32_file(path)) != entry.crc32:
                raise CheckpointError(f"{where}: damaged, crc32 expected {entry.crc32}, found {found}")
            if path.suffix == ".safetensors":
                with open(path, "rb") as file:
                    tensors, metadata = read_header(file, where)
                check_provenance(metadata, expected, where)
                if twice := stored.keys() & tensors.keys():
                    raise CheckpointError(f"{where}: {min(twice)!r:.80} is in another file of the rank as well")
                stored |= tensors
            elif name != CONFIG_FILE:
                parse_shared_state(parse_json(read_bytes(path, where), where), expected, where)
            elif parse_json(read_bytes(path, where), where) != manifest.config:
                raise CheckpointError(f"{where}: is of another checkpoint: not the configuration that the manifest has")
    for tensor in manifest.tensors:
        if (piece := manifest.piece_of_rank(tensor, rank)) is None:
            continue
        key, shape = piece_key(tensor.kind, tensor.name, rank % manifest.tp_dp_sizes[0], piece[0]), (piece[1],)
        place = stored.get(key)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, shape):
            actual = "nothing" if place is None else f"{place.dtype} {str(list(place.shape)):.80}"
            raise CheckpointError(f"tag {manifest.tag}: files of rank {rank}: {key!r:.80} expected to be "
                                  f"{tensor.dtype:.20} {list(shape)}, found {actual}")


def _check_size(path: Path, expected: int, manifest: Manifest) -> None:
    if not path.is_file():
        rank, file = rank_of_file(path.name), f"file {path.name}"
        if rank is not None and path.name.startswith("rank"):
            file = f"shard {file} (rank {rank} of {manifest.world_size})"
        raise CheckpointError(f"tag {manifest.tag}: {file} missing")
    if (found := path.stat().st_size) != expected:
        raise CheckpointError(f"tag {manifest.tag}: file {path.name}: size expected {expected} bytes, found {found}")


def parse_shared_state(value: object, expected: Mapping[str, str | int], where: str) -> object:
    """The state in `shared.json`, after checking its provenance."""
    record = StrictRecord(value, where)
    check_provenance(record.take_field("origin", dict), expected, where)
    state = record.take_field("state", dict)
    record.check_all_taken()
    return state
