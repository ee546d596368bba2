"""Save a checkpoint: every rank writes the pieces it owns, rank 0 commits. Collective.

A *piece* is a run of consecutive elements of one parameter's state, as the engine hands it to a save. A save has three
phases, and after each all ranks agree (megatron/distributed/consistency.py): if one rank fails, all raise its error and
no tag is touched.

    agree     what each rank writes, copied first if it is written later; rank 0 makes the staging folder
    write     rank k: rank<k>.safetensors (more files beyond 4 GB), then rank<k>.json
    commit    rank 0: manifest.json, fsync, rename; old tags are deleted

`save` runs the phases one after the other, async_save.py runs `write` and `commit` in a thread.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from math import prod
from pathlib import Path
from typing import Any

import torch

from data.storage import crc32
from megatron.checkpoint.commit import (STAGING_PREFIX, TRASH_PREFIX, Keep, commit_tag, delete_old_tags,
                                        exclusive_access, explain_disk_errors, open_staging_folder)
from megatron.checkpoint.file_formats import seal_record
from megatron.checkpoint.json_state import encode_state
from megatron.checkpoint.manifest import (CONFIG_FILE, FORMAT, MANIFEST, SHARED_STATE_FILE, FileEntry, Lineage,
                                          Manifest, TensorEntry, lineage_to_json, piece_key, provenance_of,
                                          rank_manifest_name, read_manifest_end)
from megatron.checkpoint.reshard import DPSharding, TPSlice
from megatron.checkpoint.safetensors_io import DTYPE_NAMES, FileTensor, split_files, write_blob, write_file
from megatron.checkpoint.tags import (format_file_names, link_target_outside, print_to_stderr, read_tag_manifest,
                                      unknown_files)
from megatron.distributed.consistency import all_succeed_or_raise, explain_out_of_memory, on_rank_0, sum_over_ranks
from megatron.errors import CheckpointError, NumericsError
from mpu.groups import Group


@dataclass(frozen=True)
class LazyData:
    """Data that is loaded when it is written (from NVMe, for example), so that a rank never holds all of it."""

    count: int
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class TensorPiece:
    """Elements from `offset` on of the flattened local tensor of one tensor-parallel rank."""

    name: str
    kind: str
    local: TPSlice
    offset: int
    data: torch.Tensor | LazyData  # 1-D, on any device

    @property
    def count(self) -> int:
        return self.data.count if isinstance(self.data, LazyData) else self.data.numel()

    def load(self) -> torch.Tensor:
        """The data; NumericsError if it is not finite, so that no such checkpoint is committed."""
        data = self.data.load() if isinstance(self.data, LazyData) else self.data
        # A sum is fast and finds any non-finite element, but may overflow itself: then check each element.
        if data.is_floating_point() and not data.sum().isfinite() and not data.isfinite().all():
            raise NumericsError(f"{self.kind} {self.name!r} holds a non-finite value; not saved")
        return data


@dataclass(frozen=True)
class SaveReport:
    """What was saved: bytes of all ranks, seconds on this one."""

    tag: str
    bytes: int
    seconds: float


def save(root: str | Path, tag: str, *, world: Group, **content: Any) -> SaveReport:
    """Save at once, with the arguments of `PendingSave`: on return the checkpoint is complete and durable. Collective.
    """
    return PendingSave(root, tag, world=world, **content).finish()


class RankFiles:
    """What one rank writes; tensors of the states go into the same files as the pieces."""

    def __init__(self, manifest: Manifest, rank: int, pieces: Iterable[TensorPiece], rank_state: Mapping[str, Any],
                 shared_state: Mapping[str, Any]) -> None:
        self.rank, self.tensors, self.texts = rank, list[FileTensor](), dict[str, bytes]()  # texts: name -> content
        origin = provenance_of(manifest, rank)
        self._rank_manifest = {"format": FORMAT, "origin": origin, "files": {},
                               "state": encode_state(rank_state, f"rank{rank}", self.tensors)}
        if rank == 0:
            # A copy, in case the manifest is damaged.
            self._rank_manifest["lineage"] = lineage_to_json(manifest)
            shared = {"origin": origin, "state": encode_state(shared_state, "shared", self.tensors)}
            config = encode_state(manifest.config, "config", self.tensors)
            for name, value in ((SHARED_STATE_FILE, shared), (CONFIG_FILE, config)):
                self.texts[name] = json.dumps(value, indent=1).encode() + b"\n"
        self.tensors += [
            FileTensor(piece_key(piece.kind, piece.name, piece.local.stored_rank, piece.offset), piece.data.dtype,
                       (piece.count,), piece.load) for piece in pieces]
        self.nbytes = sum(item.nbytes for item in self.tensors) + sum(map(len, self.texts.values()))

    def write(self, folder: Path) -> int:
        """Write the files, the rank manifest last; returns the bytes."""
        files: dict[str, FileEntry] = {}
        metadata = {name: str(value) for name, value in self._rank_manifest["origin"].items()}
        for index, batch in enumerate(split_files(self.tensors)):
            name = f"rank{self.rank}-{index}.safetensors" if index else f"rank{self.rank}.safetensors"
            with explain_disk_errors(folder / name, self.nbytes):
                files[name] = write_file(folder / name, batch, metadata)
        for name, text in self.texts.items():
            with explain_disk_errors(folder / name, self.nbytes):
                files[name] = write_blob(folder / name, text)
        name = rank_manifest_name(self.rank)
        text = seal_record({**self._rank_manifest, "files": {file: asdict(entry) for file, entry in files.items()}})
        with explain_disk_errors(folder / name, len(text)):
            write_blob(folder / name, text)
        return sum(entry.size for entry in files.values()) + len(text)


class SavePhase(Enum):
    """What a save that all ranks have agreed on does next."""

    WRITE = auto()  # every rank writes its files into the staging folder
    COMMIT = auto()  # rank 0 writes the manifest and renames the folder


class PendingSave:
    """A save on which all ranks have agreed. Every rank runs its part of a phase (`run_phase`, in any thread), then
    calls `finish_phase`, until the save is complete; `finish` does both."""

    def __init__(self, root: str | Path, tag: str, *, pieces: Iterable[TensorPiece], rank_state: Mapping[str, Any],
                 shared_state: Mapping[str, Any], config: Mapping[str, Any], layout: Mapping[str, Any], world: Group,
                 run_id: str, iteration: int, tensors: Iterable[TensorEntry] | None = None, place: int | None = None,
                 keep: Keep = Keep(), hold: Callable[[list[FileTensor]], list[FileTensor]] | None = None,
                 latest: bool = True, lineage: Lineage | None = None) -> None:
        """The checkpoint `tag` under `root`; older ones that `keep` does not name are deleted after it. Collective.

        `tensors` lists everything that all ranks write together, equal on all of them; None: every piece is a full
        local tensor, and each rank has pieces of every tensor. `rank_state` is per rank (random streams);
        `shared_state` and `config` are those of rank 0. States are nested dicts of JSON values and tensors. `layout`
        holds at least "tp" and "dp". `place` is this rank's index in that grid, tensor-parallel rank + tp *
        data-parallel rank, and names its files; default: the rank. `hold` copies the data for an asynchronous save.
        With `latest` False the tag is loaded only by name. The save continues `lineage`; None starts a branch."""
        self._begin, self.root, self.world = time.perf_counter(), Path(root), world
        self.phase, self._written = SavePhase.WRITE, 0
        self._keep, self._latest, self._lineage = keep, latest, lineage or Lineage()
        # A replicated tensor is stored once, under tensor-parallel rank 0.
        own = [piece for piece in pieces if piece.local.tp_rank == piece.local.stored_rank]
        if tensors is None:
            tensors = (TensorEntry(piece.kind, piece.name, DTYPE_NAMES[piece.data.dtype], piece.local.sharding,
                                   DPSharding(0, prod(piece.local.shape))) for piece in own)
        manifest = Manifest(tag, iteration, run_id, self._lineage.branch, history=self._lineage.history,
                            layout=layout, config=config,
                            tensors=tuple(sorted(tensors, key=lambda entry: (entry.kind, entry.name))))
        # ---- agree: one id for all files of this save, and the same tensors on all ranks ----
        checksum = f"{crc32(json.dumps(manifest.tensors_as_json()).encode()):08x}"
        save_id, checksum_of_rank_0 = on_rank_0(lambda: [f"{secrets.token_hex(8)}-{manifest.digest()}", checksum],
                                                world)
        self.manifest = replace(manifest, save_id=save_id)

        def collect() -> RankFiles:
            with explain_out_of_memory(world, f"saving {tag}"):
                rank = world.rank if place is None else place
                _check_pieces(self.manifest, own, rank, world, checksum == checksum_of_rank_0)
                files = RankFiles(self.manifest, rank, own, rank_state, shared_state)
                # Copies are made here, before training goes on; a rank without memory for them ends the save on all.
                files.tensors = files.tensors if hold is None else hold(files.tensors)
                return files

        self._files = all_succeed_or_raise(collect, world)
        # All ranks write into one file system, so the sum must fit.
        needed = sum_over_ranks(self._files.nbytes, world)
        self._staging_lock = ExitStack()  # the lock of rank 0

        def open_staging() -> str:
            with explain_out_of_memory(world, f"saving {tag}"):
                return str(self._staging_lock.enter_context(open_staging_folder(self.root, tag, run_id, needed)))

        self._staging = Path(on_rank_0(open_staging, world))

    def run_phase(self) -> int:
        """This rank's part of the phase; returns the bytes written. No communication."""
        with explain_out_of_memory(self.world, f"saving {self.manifest.tag}"):
            if self.phase is SavePhase.WRITE:
                return self._files.write(self._staging)
            return self._commit() if self.world.rank == 0 else 0

    def finish_phase(self, result: Callable[[], int]) -> SaveReport | None:
        """Agree that every rank has done its part, whose bytes or error `result` returns or raises; returns the report
        if that completes the save. An error of any rank ends the save on every rank. Collective."""
        try:
            self._written += sum_over_ranks(all_succeed_or_raise(result, self.world), self.world)
        except BaseException as error:
            # After an interrupt the next save deletes the staging folder.
            if isinstance(error, Exception) and self.world.rank == 0:
                shutil.rmtree(self._staging, ignore_errors=True)
            self.close()
            raise
        if self.phase is SavePhase.WRITE:
            self.phase = SavePhase.COMMIT
            return None
        self.close()
        return SaveReport(self.manifest.tag, self._written, time.perf_counter() - self._begin)

    def finish(self) -> SaveReport:
        """Run the remaining phases in this thread. Collective."""
        report = None
        while report is None:
            report = self.finish_phase(self.run_phase)
        return report

    def close(self) -> None:
        """Release the staging folder. The next save removes it if the save is not complete."""
        self._staging_lock.close()

    def _commit(self) -> int:
        """Write the manifest, rename the staging folder to the tag, delete old tags; returns the manifest's bytes."""
        root, tag = self.root, self.manifest.tag
        with explain_disk_errors(root / tag, 0), exclusive_access(root):
            if os.path.lexists(root / tag):
                print_to_stderr(_replacement_note(root, tag))
            now = max(time.time_ns() // 1000, 0)  # the clock may be before 1970
            # Above every number in this folder and in the history: a copied tag keeps its place in the order.
            earlier = [read_manifest_end(root / name)[0] for name in os.listdir(root)
                       if not name.startswith((STAGING_PREFIX, TRASH_PREFIX))
                       and link_target_outside(root / name, root) is None]
            earlier += [known.commit for known in self.manifest.history]
            made = replace(self.manifest, nbytes=self._written, saved_at=now, commit=1 + max(earlier, default=0))
            data = made.to_bytes()
            with explain_disk_errors(self._staging / MANIFEST, len(data)):
                write_blob(self._staging / MANIFEST, data)  # the last file written
            commit_tag(self._staging, root, tag, self._latest)
            self._lineage.parent = made
            delete_old_tags(root, self._keep, made)
            return len(data)


def _check_pieces(manifest: Manifest, own: Sequence[TensorPiece], rank: int, world: Group, agrees: bool) -> None:
    """Raise unless this rank holds exactly the pieces that it should write. `agrees`: its list of tensors is rank 0's.
    """
    if world.size != manifest.world_size:
        raise CheckpointError(
            f"a layout of {manifest.world_size} ranks ({dict(manifest.layout)}) is saved by {world.size}")
    manifest.check()
    if not agrees:
        raise CheckpointError(f"rank {world.rank} and rank 0 disagree about what tensors there are to save, or how "
                              "they are cut")
    remaining = {(piece.kind, piece.name): (piece.offset, piece.count) for piece in own}
    for tensor in manifest.tensors:
        expected, found = manifest.piece_of_rank(tensor, rank), remaining.pop((tensor.kind, tensor.name), None)
        if found != expected:
            should_write, has = ("no elements" if piece is None else
                                 f"{piece[1]} elements from element {piece[0]} on" for piece in (expected, found))
            raise CheckpointError(f"{tensor.kind} {tensor.name!r}: rank {rank} should write {should_write} of "
                                  f"{tensor.numel}, and has {has}")
    if remaining:
        raise CheckpointError("{} {!r}: not one of the tensors to be saved".format(*min(remaining)))


def _replacement_note(root: Path, tag: str) -> str:
    """A note on the tag of this name that the save replaces."""
    if (root / tag).is_symlink():
        return f"replacing {root / tag}, a link; what it leads to stays as it is"
    others = unknown_files(root / tag)
    lost = f", and what no save wrote with it: {format_file_names(others)}" if others else ""
    try:
        saved_at = read_tag_manifest(root, tag).saved_at
    except CheckpointError:
        return f"replacing {root / tag}, which is damaged{lost}"
    when = f" of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(saved_at / 1e6))}" if saved_at else ""
    return f"replacing {root / tag}: an earlier save{when} of the same name{lost}"
