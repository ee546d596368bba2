"""Is a file of a tag what its manifest and its part say: its bytes, and which checkpoint they are of. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from data.storage import crc32_file
from megatron.checkpoint.header import Header, Place, read_header
from megatron.checkpoint.manifest import FileEntry, Manifest, key_of
from megatron.checkpoint.origin import Origin, check_origin, origin_of
from megatron.checkpoint.part import CONFIG, writer_of
from megatron.checkpoint.strict import Record, parse_json, read_bytes
from megatron.errors import CheckpointError


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
