"""Save a checkpoint: every rank writes the pieces it owns, rank 0 commits. Collective.

    share     what this rank writes, copied first if it is written later                     all ranks agree
    staging   rank 0 creates the folder if the disk has room for all shares                  all ranks agree
    writing   rank k: rank<k>.safetensors (more files beyond 4 GB), then rank<k>.json        all ranks agree
    commit    rank 0: manifest.json, fsync, rename; old tags are deleted                     all ranks agree

"Agree" is megatron/distributed/consistency.py: if one rank fails, all raise its error and no tag is touched. The
protocol is a generator (`save_protocol`) that yields its slow parts as jobs: `save` runs them at once, async_save.py in
a thread. Replicated parameters are written by tensor-parallel rank 0 alone. Memory: one tensor, two blocks of 8 MB.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.storage import crc32
from megatron.checkpoint.commit import (Keep, commit_tag, delete_old_tags, exclusive_access, explain_disk_errors,
                                        last_commit_number, open_staging_folder)
from megatron.checkpoint.deletion import BackgroundDeleter, delete_folder
from megatron.checkpoint.file_formats import check_json_size
from megatron.checkpoint.json_state import encode_state
from megatron.checkpoint.manifest import (MANIFEST, FileEntry, Lineage, Manifest, TensorEntry, lineage_to_json,
                                          read_commit_record)
from megatron.checkpoint.pieces import TensorPiece
from megatron.checkpoint.rank_manifest import (CONFIG_FILE, SHARED_STATE_FILE, RankManifest, provenance_of,
                                               rank_manifest_name, tensor_file_name)
from megatron.checkpoint.safetensors_io import FileTensor, split_files, write_blob, write_file
from megatron.checkpoint.tags import PrintLine, format_file_names, print_to_stderr, tag_folder, unknown_files
from megatron.distributed.consistency import all_succeed_or_raise, on_rank_0, explain_out_of_memory, sum_over_ranks
from megatron.errors import CheckpointError
from mpu.groups import Group


@dataclass(frozen=True)
class SaveReport:
    """What was saved: bytes of all ranks, seconds on this one."""

    tag: str
    bytes: int
    seconds: float


SaveJob = Callable[[], int]
"""A slow part of a save without communication; returns the bytes written."""

SaveSteps = Generator[SaveJob, int, SaveReport]
"""A save in progress: yields a job, and is sent the sum of the results over all ranks."""

Snapshot = Callable[[list[FileTensor]], list[FileTensor]]
"""Copies the items' data, so that later training steps do not change it."""


def save(root: str | Path, tag: str, *, world: Group, **content: Any) -> SaveReport:
    """`save_protocol` at once: on return the checkpoint of all ranks is complete and durable. Collective."""
    return finish_save(save_protocol(root, tag, world=world, **content), world)


def finish_save(steps: SaveSteps, world: Group) -> SaveReport:
    """Run the rest of a save in this thread."""
    try:
        job = next(steps)
        while True:
            job = advance_save(steps, job, world)
    except StopIteration as end:
        report: SaveReport = end.value
        return report


def advance_save(steps: SaveSteps, job: SaveJob, world: Group) -> SaveJob:
    """Run `job`, agree with all ranks, return the next job; StopIteration at the end. An error of any rank is raised
    inside the save on every rank, so that it cleans up. Collective."""
    try:
        written = sum_over_ranks(all_succeed_or_raise(job, world), world)
    except BaseException as error:
        return steps.throw(error)
    return steps.send(written)


def save_protocol(root: str | Path, tag: str, *, pieces: Iterable[TensorPiece], rank_state: Mapping[str, Any],
                  shared_state: Mapping[str, Any], config: Mapping[str, Any], layout: Mapping[str, Any],
                  world: Group, run_id: str, iteration: int, tensors: Iterable[TensorEntry] | None = None,
                  place: int | None = None, say: PrintLine = print_to_stderr, keep: Keep = Keep(),
                  hold: Snapshot | None = None, latest: bool = True, trash: BackgroundDeleter | None = None,
                  lineage: Lineage | None = None) -> SaveSteps:
    """Write the checkpoint `tag` under `root`, then delete older ones that `keep` does not name.

    `tensors` lists everything that all ranks write together, equal on all of them; None: every piece is a full local
    tensor, and each rank has pieces of every tensor. `rank_state` is per rank (random streams); `shared_state` and
    `config` are those of rank 0. States are nested dicts of JSON values and tensors. `layout` holds at least "tp" and
    "dp". `place` is this rank's index in that grid, tensor-parallel rank + tp * data-parallel rank, and names its
    files; default: the rank. `hold` copies the data for an asynchronous save. With `latest` False the tag is loaded
    only by name. `trash` deletes folders in the background; None: before the save ends. The save continues `lineage`;
    None starts a branch."""
    begin = time.perf_counter()
    delete = delete_folder if trash is None else trash.delete
    root, place, lineage = Path(root), world.rank if place is None else place, lineage or Lineage()
    own = [piece for piece in pieces if piece.partition is not None or piece.tp_rank == 0]
    entries = sorted((piece.to_tensor_entry() for piece in own) if tensors is None else tensors,
                     key=lambda entry: (entry.kind, entry.name))
    manifest = Manifest(run_id, tag, iteration, layout, config, tuple(entries), branch=lineage.branch,
                        history=lineage.history)
    manifest = replace(manifest, save_id=_agree_on_save_id(manifest, own, place, world))
    with_memory_check = partial(explain_out_of_memory, world=world, doing=f"saving {tag}")
    share = all_succeed_or_raise(lambda: with_memory_check(lambda: _build_rank_share(manifest, place, own, rank_state,
                                                                                     shared_state, hold)), world)
    needed = sum_over_ranks(share.nbytes, world)
    with ExitStack() as until_saved:  # rank 0 keeps the staging folder locked
        def prepare() -> str:
            return str(until_saved.enter_context(open_staging_folder(root, tag, run_id, say, needed, trash)))

        staging = Path(on_rank_0(lambda: with_memory_check(prepare), world))

        def publish() -> int:
            with explain_disk_errors(root / tag, 0), exclusive_access(root):
                if replaced := _replacement_note(root, tag):
                    say(replaced)
                now = max(time.time_ns() // 1000, 0)  # the clock may be before 1970
                made = replace(manifest, nbytes=written, saved_at=now,
                               commit=lineage.next_commit_number(last_commit_number(root)))
                data = made.to_bytes()  # the last file written
                with explain_disk_errors(staging / MANIFEST, len(data)):
                    write_blob(staging / MANIFEST, data)
                commit_tag(staging, root, tag, latest, delete)
                lineage.set_parent(made.commit_record)
                delete_old_tags(root, keep, made.commit_record, say, delete)
                return len(data)

        try:
            written = yield partial(with_memory_check, partial(_write_rank_files, staging, share))
            size = yield partial(with_memory_check, publish) if world.rank == 0 else lambda: 0
        except Exception:  # not if the save is abandoned: a thread may still write, and the next save cleans up
            if world.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
    return SaveReport(tag, written + size, time.perf_counter() - begin)


def _agree_on_save_id(manifest: Manifest, own: Sequence[TensorPiece], place: int, world: Group) -> str:
    """The id of this save, equal on all ranks, after checking that all list the same tensors and hold the right pieces.
    Collective."""
    tensors_checksum = f"{crc32(json.dumps(manifest.tensors_as_json()).encode()):08x}"
    save_id, first = on_rank_0(lambda: [f"{secrets.token_hex(8)}-{manifest.digest()}", tensors_checksum], world)

    def check() -> None:
        if world.size != manifest.world_size:
            raise CheckpointError(
                f"a layout of {manifest.world_size} ranks ({dict(manifest.layout)}) is saved by {world.size}")
        manifest.check()
        if tensors_checksum != first:
            raise CheckpointError(f"rank {world.rank} and rank 0 disagree about what tensors there are to save, or how "
                                  "they are cut")
        remaining = {(piece.kind, piece.name): (piece.offset, piece.count) for piece in own}
        for tensor in manifest.tensors:
            expected, here = manifest.piece_of_rank(tensor, place), remaining.pop((tensor.kind, tensor.name), None)
            if here != expected:
                should_write, has = ("no elements" if piece is None else
                                     f"{piece[1]} elements from element {piece[0]} on" for piece in (expected, here))
                raise CheckpointError(
                    f"{tensor.label}: rank {place} should write {should_write} of {tensor.numel}, and has {has}")
        if remaining:
            raise CheckpointError("{} {!r}: not one of the tensors to be saved".format(*min(remaining)))

    all_succeed_or_raise(check, world)
    return str(save_id)


def _replacement_note(root: Path, tag: str) -> str | None:
    """A note on the tag of this name that the save replaces; None if there is none."""
    if not os.path.lexists(root / tag):
        return None
    if (root / tag).is_symlink():
        return f"replacing {root / tag}, a link; what it leads to stays as it is"
    others = unknown_files(root / tag)
    lost = f", and what no save wrote with it: {format_file_names(others)}" if others else ""
    record = read_commit_record(tag_folder(root, tag))
    if record is None or record.tag != tag:
        return f"replacing {root / tag}, which is damaged{lost}"
    saved_at = record.saved_at
    when = f" of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(saved_at / 1e6))}" if saved_at else ""
    return f"replacing {root / tag}: an earlier save{when} of the same name{lost}"


@dataclass(frozen=True)
class _RankShare:
    """What one rank writes; `rank_manifest` still without its files."""

    rank_manifest: RankManifest
    tensors: list[FileTensor]
    texts: Mapping[str, bytes]
    """Other files: name -> content."""

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.tensors) + sum(map(len, self.texts.values()))


def _build_rank_share(manifest: Manifest, rank: int, pieces: Iterable[TensorPiece], rank_state: Mapping[str, Any],
                      shared_state: Mapping[str, Any], snapshot: Snapshot | None) -> _RankShare:
    """Collect what this rank writes; tensors of the states go into the same files as the pieces."""
    items: list[FileTensor] = []
    provenance = provenance_of(manifest, rank)
    own = encode_state(rank_state, f"rank{rank}", items)
    texts, lineage = {}, None
    if rank == 0:
        lineage = lineage_to_json(manifest.branch, manifest.history)
        shared = {"origin": asdict(provenance), "state": encode_state(shared_state, "shared", items)}
        texts = {SHARED_STATE_FILE: _json_bytes(shared),
                 CONFIG_FILE: _json_bytes(encode_state(manifest.config, "config", items))}
    items += [FileTensor(piece.key, piece.data.dtype, (piece.count,), piece.load) for piece in pieces]
    items = items if snapshot is None else snapshot(items)
    return _RankShare(RankManifest(provenance, {}, own, lineage), items, texts)


def _write_rank_files(staging: Path, share: _RankShare) -> int:
    """Write a rank's share, then its rank manifest; returns the bytes."""
    files: dict[str, FileEntry] = {}
    provenance = share.rank_manifest.provenance
    for index, batch in enumerate(split_files(share.tensors)):
        name = tensor_file_name(provenance.rank, index)
        with explain_disk_errors(staging / name, share.nbytes):
            files[name] = write_file(staging / name, batch, provenance.as_metadata())
    for name, text in share.texts.items():
        with explain_disk_errors(staging / name, share.nbytes):
            files[name] = write_blob(staging / name, text)
    name, text = rank_manifest_name(provenance.rank), replace(share.rank_manifest, files=files).to_bytes()
    with explain_disk_errors(staging / name, len(text)):
        write_blob(staging / name, text)
    return sum(entry.size for entry in files.values()) + len(text)


def _json_bytes(value: object) -> bytes:
    return check_json_size(json.dumps(value, indent=1).encode() + b"\n")
