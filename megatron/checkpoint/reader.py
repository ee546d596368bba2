"""Open a checkpoint and read any consecutive elements (a *run*) of any tensor, whatever layout wrote it.

The asking side describes its own cut (local shape, partition, tensor-parallel rank) and a run of its flattened local
tensor; the manifest knows the writing side's. If both cuts are the same, a run of the one is a run of the other.
Otherwise the run is taken apart twice, asked local -> logical -> stored local (cut.py), and padding is left zero.
Either way arithmetic says which rank's files hold the stored runs (in formats 1 and 2 bisection in the list of pieces),
and they are read straight to where they are wanted. A rank opens the files that hold what it asks for, and no others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.agree import agree, alike, on_rank_0, total
from megatron.checkpoint.choice import assumption, candidates, explain_choice, latest_tag, why_alone
from megatron.checkpoint.cut import Run
from megatron.checkpoint.int8 import LEVELS
from megatron.checkpoint.manifest import Manifest, TensorEntry, key_of
from megatron.checkpoint.part import SHARED_STATE, Part, origin_of, part_name, read_part
from megatron.checkpoint.piece import sharding_of
from megatron.checkpoint.state import decode
from megatron.checkpoint.strict import parse_json, read_bytes, sense_of
from megatron.checkpoint.strangers import unread
from megatron.checkpoint.tags import Say, check_share, folder_of, held, manifest_of, other_names, say_stderr, state_in
from megatron.checkpoint.tensorfile import TensorFile
from megatron.errors import CheckpointError
from mpu.groups import SOLO, Group
from mpu.split import Partition


def open_checkpoint(root: str | Path, tag: str | None = None, *, world: Group = SOLO, fallback: bool = False,
                    say: Say = say_stderr, int8: bool = False) -> Checkpoint:
    """The checkpoint `tag`, or the one that `latest` names, with every byte verified before anything is read from it.

    Collective over `world`: the ranks share the verification, and all open the tag or all raise the same error.
    With `fallback` a damaged tag makes way for the newest intact one that it continues, and `say` prints why. One with
    int8 weights is for those who ask for it with `int8`.
    """
    found = _open(Path(root), tag, world, fallback, say)
    if found.has(LEVELS) and not int8:
        raise CheckpointError(f"{found.tag} of {root} holds int8 weights, which are for inference alone (`python -m "
                              "megatron.generate`); give the checkpoint they were made from")
    return found


def _open(root: Path, tag: str | None, world: Group, fallback: bool, say: Say) -> Checkpoint:
    first = str(on_rank_0(lambda: held(root, tag) if tag is not None else latest_tag(root) or candidates(root)[0],
                          world))
    try:
        if tag is None and world.rank == 0 and (warning := explain_choice(root, first)):
            say(warning)
        return _open_verified(root, first, world, say)
    except CheckpointError as error:
        last = error
    others = on_rank_0(lambda: candidates(root, tag)[1:], world) if fallback or tag is None else []
    if not fallback or not others:
        advice = ("; --resume-fallback takes the newest good one that it continues from" if others else
                  f"; {on_rank_0(lambda: why_alone(root, tag), world)}" if fallback else "")
        raise CheckpointError(f"{last}{advice}") from last
    assumed = on_rank_0(lambda: assumption(root, tag), world)
    for name in others:
        if world.rank == 0:
            say(f"warning: {last}; falling back to an older tag, {name}{assumed}")
        try:
            return _open_verified(root, name, world, say)
        except CheckpointError as error:
            last = error
    raise last


def _open_verified(root: Path, tag: str, world: Group, say: Say) -> Checkpoint:
    """Every rank checks its share of the files, and the first one whether there are others. Collective."""
    def check() -> tuple[Manifest, int]:
        with _reading(root, tag):
            manifest = manifest_of(root, tag)
            return manifest, len(check_share(folder_of(root, tag), manifest, world.rank, world.size))

    def find_others() -> list[str]:
        with _reading(root, tag):
            return other_names(folder_of(root, tag), manifest, count) if world.rank == 0 else []

    manifest, checked = agree(check, world)
    alike({f"tag {tag}": manifest.name_of_save}, world, "the ranks find different checkpoints")
    count = total(checked, world)
    if others := agree(find_others, world):
        say(unread(tag, others))
    return Checkpoint(folder_of(root, tag), manifest)


@contextmanager
def _reading(root: Path, tag: str) -> Iterator[None]:
    """A folder that cannot be listed, or a file that cannot be looked at, is an error of the checkpoint."""
    try:
        yield
    except OSError as error:
        where = error.filename or root / tag
        raise CheckpointError(f"tag {tag}: {where}: cannot be read ({error.strerror})") from error


class Checkpoint:
    """One open checkpoint. Names of tensors are pairs (kind, name)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tensors = {(tensor.kind, tensor.name): _Stored(tensor, manifest.grid[0] if manifest.has_parts else 1)
                        for tensor in manifest.tensors}
        self._open: dict[str, TensorFile] = {}
        self._parts: dict[int, Part] = {}

    @property
    def tag(self) -> str:
        return self.manifest.tag

    @property
    def iteration(self) -> int:
        return self.manifest.iteration

    @property
    def config(self) -> Mapping[str, Any]:
        return self.manifest.config

    @property
    def layout(self) -> Mapping[str, Any]:
        return self.manifest.layout

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({kind for kind, _ in self.tensors}))

    def has(self, kind: str) -> bool:
        return kind in self.kinds

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(sorted(name for other, name in self.tensors if other == kind))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The logical shape."""
        return self._stored(kind, name).sharding.shape

    @cached_property
    def shared_state(self) -> dict[str, Any]:
        return self._state(SHARED_STATE, 0)

    def rank_state(self, rank: int, layout: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """What `rank` saved; None when it was not a rank of that run, or when tp or dp of `layout` are others."""
        differs = layout is not None and any(layout[key] != self.layout.get(key) for key in ("tp", "dp"))
        if differs:
            return None
        if not self.manifest.has_parts:
            return self._state(part_name(rank), rank) if part_name(rank) in self.manifest.files else None
        if rank >= self.manifest.ranks:
            return None
        return self._decoded(self._part(rank).state, f"tag {self.tag}: file {part_name(rank)}", rank)

    def read(self, kind: str, name: str, *, shape: tuple[int, ...], partition: Partition | None, tp_rank: int,
             tp_size: int, offset: int, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the elements from `offset` of the flattened local tensor of `shape` at `tp_rank`."""
        stored, asked = self._stored(kind, name), sharding_of(shape, partition, tp_size)
        if asked.shape != stored.sharding.shape:
            raise CheckpointError(f"tag {self.tag}: {kind} {name!r}: shape expected {list(asked.shape)}, "
                                  f"found {list(stored.sharding.shape)}")
        tp_rank = 0 if partition is None else tp_rank
        if asked == stored.sharding:
            self._copy(stored, Run(tp_rank, offset, 0, out.numel()), out)
            return
        out.zero_()
        for run in asked.cut.to_logical(tp_rank, offset, offset + out.numel()):
            for part in stored.cut.to_local(run.logical, run.logical + run.count):
                start = run.local - offset + part.logical - run.logical
                self._copy(stored, part, out[start:start + part.count])

    def _copy(self, stored: _Stored, run: Run, out: torch.Tensor) -> None:
        """Copy a run of the stored local tensor of one rank, piece by piece."""
        done = 0
        for holder, key, start, count in stored.find(run):
            file = self._file_with(holder, key)
            if (dtype := file.places[key].dtype) != stored.entry.dtype:
                raise CheckpointError(f"{file.where}: {key!r} is {dtype}, and the manifest says {stored.entry.dtype}")
            file.read(key, start, out[done:done + count])
            done += count

    def _stored(self, kind: str, name: str) -> _Stored:
        if (kind, name) not in self.tensors:
            raise CheckpointError(f"tag {self.tag}: holds no {kind} {name!r}")
        return self.tensors[kind, name]

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name, f"tag {self.tag}: file {name}")
        return self._open[name]

    def _file_with(self, holder: str | int, key: str) -> TensorFile:
        """The file of a name, or the one of a rank's that holds `key`."""
        if isinstance(holder, str):
            return self._file(holder)
        names = self._files_of(holder)
        for file in map(self._file, names):
            if key in file.places:
                return file
        raise CheckpointError(f"tag {self.tag}: tensor {key!r} is in none of {names}")

    def _part(self, rank: int) -> Part:
        if rank not in self._parts:
            self._parts[rank] = read_part(self.folder, self.manifest, rank)[0]
        return self._parts[rank]

    def _files_of(self, rank: int) -> list[str]:
        if self.manifest.has_parts:
            return self._part(rank).tensor_files
        return [name for name in self.manifest.files if name.startswith((f"rank{rank}.s", f"rank{rank}-"))]

    def _state(self, name: str, writer: int) -> dict[str, Any]:
        """The state in a file of JSON; its tensors are in the files of the rank that wrote it."""
        where = f"tag {self.tag}: file {name}"
        value = parse_json(read_bytes(self.folder / name, where), where)
        if self.manifest.has_origins:
            value = state_in(value, origin_of(self.manifest, writer), where)
        return self._decoded(value, where, writer)

    def _decoded(self, value: Any, where: str, writer: int) -> dict[str, Any]:
        with sense_of(where):
            state = decode(value, lambda key: self._file_with(writer, key).tensor(key))
        if not isinstance(state, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(state).__name__}")
        return state


class _Stored:
    """A tensor of the manifest, ready for look-ups."""

    def __init__(self, entry: TensorEntry, tp_size: int) -> None:
        self.entry, self.sharding, self.cut, self._tp_size = entry, entry.sharding, entry.sharding.cut, tp_size
        self._starts = [(piece.tp_rank, piece.offset) for piece in entry.pieces]

    def find(self, run: Run) -> Iterator[tuple[str | int, str, int, int]]:
        """(rank or file that holds it, key, start in the piece, count) of the pieces that make up `run`."""
        start, stop = run.local, run.local + run.count
        if self.entry.spread is None:
            yield from self._find_listed(run.tp_rank, start, stop)
            return
        for shard, offset, within, count in self.entry.spread.find(start, stop):
            yield shard * self._tp_size + run.tp_rank, key_of(self.entry, run.tp_rank, offset), within, count

    def _find_listed(self, tp_rank: int, start: int, stop: int) -> Iterator[tuple[str, str, int, int]]:
        """The pieces follow each other, rank by rank, without gaps."""
        index = bisect_right(self._starts, (tp_rank, start)) - 1
        while start < stop:
            piece = self.entry.pieces[index]
            count = min(stop, piece.offset + piece.count) - start
            assert piece.tp_rank == tp_rank and count > 0, (self.entry.where, tp_rank, start)
            yield piece.file, piece.key, start - piece.offset, count
            start, index = start + count, index + 1
