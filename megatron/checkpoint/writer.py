"""Save: every rank writes the pieces it owns, rank 0 commits. Collective: every rank calls `save` with the same tag.

    staging   rank 0 makes the folder, if there is room for the pieces of all ranks          all ranks agree
    writing   rank k: rank<k>.safetensors (and rank<k>-1, ... beyond 4 GB), rank<k>.json;
              rank 0 also shared.json and config.json; checksummed on the way, fsynced       all ranks agree
    commit    rank 0: manifest.json with what all ranks wrote, fsync, rename                 all ranks agree

"Agree" is agree.py: when one rank fails, all raise its error, the staging folder is removed and no tag is touched.
A replicated parameter (partition None) is written by tensor-parallel rank 0 alone; its other copies are skipped.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.agree import agree, on_rank_0
from megatron.checkpoint.commit import commit, stage, storing
from megatron.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, gather_tensors, tensor_from_json
from megatron.checkpoint.piece import Piece
from megatron.checkpoint.state import encode
from megatron.checkpoint.tags import Say, say_stderr
from megatron.checkpoint.tensorfile import Item, split_files, write_blob, write_file
from mpu.collectives import all_gather_json
from mpu.groups import Group


@dataclass(frozen=True)
class SaveReport:
    """What was saved, and what it cost: bytes of all ranks, seconds on this one."""

    tag: str
    bytes: int
    seconds: float


def save(root: str | Path, tag: str, *, pieces: Iterable[Piece], rank_state: Mapping[str, Any],
         shared_state: Mapping[str, Any], config: Mapping[str, Any], layout: Mapping[str, Any], world: Group,
         run_id: str, iteration: int, say: Say = say_stderr) -> SaveReport:
    """Write the checkpoint `tag` under `root`; on return it is complete and durable, whoever wrote its parts.

    `rank_state` is this rank's (random streams); `shared_state` and `config` are taken from rank 0. States are nested
    dicts of JSON values and tensors. `layout` holds at least "tp" and "dp".
    """
    begin = time.perf_counter()
    root = Path(root)
    states = {f"rank{world.rank}": rank_state}
    if world.rank == 0:
        states |= {"shared": shared_state, "config": config}  # config.json is for people: the manifest has it too
    own = [piece for piece in pieces if piece.partition is not None or piece.tp_rank == 0]
    needed = sum(all_gather_json(sum(piece.item().nbytes for piece in own), world))
    staging = Path(on_rank_0(lambda: str(stage(root, tag, run_id, say, needed)), world))
    try:
        parts = all_gather_json(agree(lambda: _write_rank(staging, world.rank, own, states), world), world)
        size = on_rank_0(lambda: _commit(staging, root, Manifest(run_id, tag, iteration, layout, config,
                                                                 *_collect(parts, tag))), world)
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return SaveReport(tag, size, time.perf_counter() - begin)


def _write_rank(staging: Path, rank: int, pieces: list[Piece], states: Mapping[str, Mapping[str, Any]]) -> Any:
    """Write this rank's tensors and states; tensors of the states stand in the same files as the pieces."""
    items: list[Item] = []
    texts = {f"{stem}.json": _text(encode(state, stem, items)) for stem, state in states.items()}
    items += [piece.item() for piece in pieces]
    needed = sum(item.nbytes for item in items) + sum(map(len, texts.values()))
    files: dict[str, FileEntry] = {}
    file_of: dict[str, str] = {}
    for index, batch in enumerate(split_files(items)):
        name = f"rank{rank}-{index}.safetensors" if index else f"rank{rank}.safetensors"
        with storing(staging / name, needed):
            files[name] = write_file(staging / name, batch)
        file_of |= {item.key: name for item in batch}
    for name, text in texts.items():
        with storing(staging / name, needed):
            files[name] = write_blob(staging / name, text)
    tensors = gather_tensors(piece.entry(file_of[piece.key]) for piece in pieces)
    return {"files": {name: asdict(entry) for name, entry in files.items()}, "tensors": [asdict(t) for t in tensors]}


def _collect(parts: list[Any], tag: str) -> tuple[dict[str, FileEntry], tuple[TensorEntry, ...]]:
    """The files and the whole tensors of all ranks."""
    files = {name: FileEntry(**entry) for part in parts for name, entry in part["files"].items()}
    return files, gather_tensors(tensor_from_json(value, tag) for part in parts for value in part["tensors"])


def _commit(staging: Path, root: Path, manifest: Manifest) -> int:
    """The manifest, last of all files, then the rename; the bytes of the whole checkpoint."""
    manifest.check()
    data = manifest.to_bytes()
    with storing(staging / MANIFEST, len(data)):
        write_blob(staging / MANIFEST, data)
    commit(staging, root, manifest.tag)
    return sum(entry.size for entry in manifest.files.values()) + len(data)


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
