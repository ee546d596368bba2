"""Open a checkpoint and read any consecutive elements (a *run*) of any tensor, whatever layout wrote it.

The asking side describes its own cut (local shape, partition, tensor-parallel rank) and a run of its flattened local
tensor; the manifest knows the writing side's. If both cuts are the same, a run of the one is a run of the other.
Otherwise the run is taken apart twice, asked local -> logical -> stored local (cut.py), and padding is left zero.
Either way the stored runs are found in the pieces by bisection and copied straight from a memory map.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.agree import agree, on_rank_0
from megatron.checkpoint.choice import candidates, explain_choice, latest_tag
from megatron.checkpoint.cut import Run
from megatron.checkpoint.manifest import Manifest, TensorEntry
from megatron.checkpoint.piece import sharding_of
from megatron.checkpoint.state import decode
from megatron.checkpoint.strict import parse_json, read_bytes
from megatron.checkpoint.tags import Say, check_files, folder_of, held, manifest_of, say_stderr
from megatron.checkpoint.tensorfile import TensorFile
from megatron.errors import CheckpointError
from mpu.groups import SOLO, Group
from mpu.split import Partition


def open_checkpoint(root: str | Path, tag: str | None = None, *, world: Group = SOLO, fallback: bool = False,
                    say: Say = say_stderr) -> Checkpoint:
    """The checkpoint `tag`, or the one that `latest` names, with every byte verified before anything is read from it.

    Collective over `world`: the ranks share the verification, and all open the tag or all raise the same error.
    With `fallback` a damaged tag that was not asked for makes way for an older one, and `say` prints why.
    """
    root = Path(root)
    first = str(on_rank_0(lambda: held(root, tag) if tag is not None else latest_tag(root) or candidates(root)[0],
                          world))
    try:
        found = agree(lambda: _open_verified(root, first, world), world)
    except CheckpointError as error:
        others = [] if tag is not None else on_rank_0(lambda: candidates(root)[1:], world)
        if not fallback or not others:
            advice = "; --resume-fallback takes the newest good one before it" if others else ""
            raise CheckpointError(f"{error}{advice}") from error
        return _fall_back(root, error, others, world, say)
    if tag is None and world.rank == 0 and (warning := explain_choice(root, first)):
        say(warning)
    return found


def _fall_back(root: Path, error: CheckpointError, others: list[str], world: Group, say: Say) -> Checkpoint:
    """The first of the other tags that is good; the last one's error where none is."""
    for name in others:
        if world.rank == 0:
            say(f"warning: {error}; falling back to an older tag, {name}")
        try:
            return agree(partial(_open_verified, root, name, world), world)
        except CheckpointError as found:
            error = found
    raise error


def _open_verified(root: Path, tag: str, world: Group) -> Checkpoint:
    try:
        manifest, folder = manifest_of(root, tag), folder_of(root, tag)
        check_files(folder, manifest, world.rank, world.size)
    except OSError as error:  # a folder that cannot be listed, a file that cannot be looked at
        where = error.filename or root / tag
        raise CheckpointError(f"tag {tag}: {where}: cannot be read ({error.strerror})") from error
    return Checkpoint(folder, manifest)


class Checkpoint:
    """One open checkpoint. Names of tensors are pairs (kind, name)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tensors = {(tensor.kind, tensor.name): _Stored(tensor) for tensor in manifest.tensors}
        self._open: dict[str, TensorFile] = {}

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
        return self._state("shared", writer=0)

    def rank_state(self, rank: int, layout: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """What `rank` saved; None when it was not a rank of that run, or when tp or dp of `layout` are others."""
        differs = layout is not None and any(layout[key] != self.layout.get(key) for key in ("tp", "dp"))
        if differs or f"rank{rank}.json" not in self.manifest.files:
            return None
        return self._state(f"rank{rank}", writer=rank)

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
        """Copy a run of the stored local tensor of one rank, piece by piece; copy_ converts dtype and device."""
        done = 0
        for file, key, start, count in stored.find(run):
            out[done:done + count].copy_(self._file(file).run(key, start, count))
            done += count

    def _stored(self, kind: str, name: str) -> _Stored:
        if (kind, name) not in self.tensors:
            raise CheckpointError(f"tag {self.tag}: holds no {kind} {name!r}")
        return self.tensors[kind, name]

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name, f"tag {self.tag}: file {name}")
        return self._open[name]

    def _state(self, stem: str, writer: int) -> dict[str, Any]:
        """The state in `<stem>.json`; its tensors are in the files of the rank that wrote it."""
        where = f"tag {self.tag}: file {stem}.json"
        files = [name for name in self.manifest.files if name.startswith((f"rank{writer}.s", f"rank{writer}-"))]

        def fetch(key: str) -> torch.Tensor:
            for file in map(self._file, files):
                if key in file.entries:
                    return file.tensor(key).clone()
            raise CheckpointError(f"{where}: tensor {key!r} is in none of {files}")

        state = decode(parse_json(read_bytes(self.folder / f"{stem}.json", where), where), fetch)
        if not isinstance(state, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(state).__name__}")
        return state


class _Stored:
    """A tensor of the manifest, ready for look-ups: its pieces follow each other, rank by rank, without gaps."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry, self.sharding, self.cut = entry, entry.sharding, entry.sharding.cut
        self.starts = [(piece.tp_rank, piece.offset) for piece in entry.pieces]

    def find(self, run: Run) -> Iterator[tuple[str, str, int, int]]:
        """(file, key, start in the piece, count) of the pieces that make up `run`."""
        start, stop = run.local, run.local + run.count
        index = bisect_right(self.starts, (run.tp_rank, start)) - 1
        while start < stop:
            piece = self.entry.pieces[index]
            count = min(stop, piece.offset + piece.count) - start
            assert piece.tp_rank == run.tp_rank and count > 0, (self.entry.where, run)
            yield piece.file, piece.key, start - piece.offset, count
            start, index = start + count, index + 1
