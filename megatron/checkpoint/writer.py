"""Save: every rank writes the pieces it owns, rank 0 commits. Collective: every rank starts it with the same tag.

    share     what this rank is to write, copied first if it is to be written later          all ranks agree
    staging   rank 0 makes the folder, if there is room for the shares of all ranks          all ranks agree
    writing   rank k: rank<k>.safetensors (and rank<k>-1, ... beyond 4 GB), rank<k>.json;
              rank 0 also shared.json and config.json; checksummed on the way, fsynced       all ranks agree
    commit    rank 0: manifest.json with what all ranks wrote, fsync, rename; old tags go    all ranks agree

"Agree" is agree.py: when one rank fails, all raise its error, the staging folder is removed and no tag is touched.
A replicated parameter (partition None) is written by tensor-parallel rank 0 alone; its other copies are skipped.

The protocol is written once, as the generator `saving`: it yields its slow parts, writing and commit, as *jobs*. A job
talks to no other rank, so it may run anywhere: `save` does each at once, background.py in a thread while training goes
on. Whoever drives the generator calls `answer` on every rank when the job is done there; the rest is in that call.

Memory of a save: one tensor of a rank's share (on the CPU none: it is written in place), two blocks of 8 MB and the
manifest.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint.agree import agree, on_rank_0
from megatron.checkpoint.commit import Keep, commit, prune, stage, storing, time_of_commit
from megatron.checkpoint.flock import alone
from megatron.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, gather_tensors, tensor_from_json
from megatron.checkpoint.piece import Piece
from megatron.checkpoint.state import encode
from megatron.checkpoint.tags import Say, manifest_of, say_stderr
from megatron.checkpoint.tensorfile import Item, split_files, write_blob, write_file
from megatron.errors import CheckpointError
from mpu.collectives import all_gather_json
from mpu.groups import Group


@dataclass(frozen=True)
class SaveReport:
    """What was saved, and what it cost: bytes of all ranks, seconds on this one."""

    tag: str
    bytes: int
    seconds: float


Job = Callable[[], Any]
"""A slow part of a save that needs no other rank; its result is a JSON value."""

Saving = Generator[Job, list[Any], SaveReport]
"""A save under way: yields a job, is sent what the job gave on each rank."""

Hold = Callable[[list[Item]], list[Item]]
"""The same items with data that later steps of training do not change."""


def save(root: str | Path, tag: str, *, world: Group, **content: Any) -> SaveReport:
    """`saving` in one go: on return the checkpoint is complete and durable, whoever wrote its parts."""
    return complete(saving(root, tag, world=world, **content), world)


def complete(steps: Saving, world: Group) -> SaveReport:
    """Do what is left of a save, here and now."""
    try:
        job = next(steps)
        while True:
            job = answer(steps, job, world)
    except StopIteration as end:
        report: SaveReport = end.value
        return report


def answer(steps: Saving, job: Job, world: Group) -> Job:
    """The next job, after all ranks have agreed on this one; StopIteration at the end. An error of any rank is raised
    inside the save on every rank, so that it cleans up."""
    try:
        results = all_gather_json(agree(job, world), world)
    except BaseException as error:
        return steps.throw(error)
    return steps.send(results)


def saving(root: str | Path, tag: str, *, pieces: Iterable[Piece], rank_state: Mapping[str, Any],
           shared_state: Mapping[str, Any], config: Mapping[str, Any], layout: Mapping[str, Any], world: Group,
           run_id: str, iteration: int, say: Say = say_stderr, keep: Keep = Keep(), hold: Hold | None = None,
           latest: bool = True) -> Saving:
    """Write the checkpoint `tag` under `root`, then delete the older ones that `keep` does not name.

    `rank_state` is this rank's (random streams); `shared_state` and `config` are taken from rank 0. States are nested
    dicts of JSON values and tensors. `layout` holds at least "tp" and "dp". A save without `latest` is loaded only by
    its name.
    """
    begin = time.perf_counter()
    root = Path(root)
    states = {f"rank{world.rank}": rank_state}
    if world.rank == 0:
        states |= {"shared": shared_state, "config": config}  # config.json is for people: the manifest has it too
    own = [piece for piece in pieces if piece.partition is not None or piece.tp_rank == 0]
    share = agree(lambda: _share(world.rank, own, states, hold), world)
    needed = sum(all_gather_json(share.nbytes, world))
    with ExitStack() as until_saved:  # rank 0 holds the staging folder
        staging = Path(on_rank_0(lambda: str(until_saved.enter_context(stage(root, tag, run_id, say, needed))), world))

        def publish() -> int:
            with alone(root):
                if replaced := _replaced(root, tag):
                    say(replaced)
                files, tensors = _collect(parts, tag)
                manifest = Manifest(run_id, tag, iteration, layout, config, files, tensors, time_of_commit(root))
                size = _commit(staging, root, manifest, latest)
                prune(root, keep, iteration)
                return size

        try:
            parts = yield partial(_write_rank, staging, share)
            sizes = yield publish if world.rank == 0 else _nothing
        except Exception:  # not when the save is abandoned: a thread may be writing still, and the next save sweeps
            if world.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
    return SaveReport(tag, sizes[0], time.perf_counter() - begin)


def _replaced(root: Path, tag: str) -> str | None:
    """What to say about the tag of this name that the save replaces."""
    if not (root / tag).exists():
        return None
    try:
        saved_at = manifest_of(root, tag).saved_at
    except CheckpointError:
        return f"replacing {root / tag}, which is damaged"
    when = f" of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(saved_at / 1e6))}" if saved_at else ""
    return f"replacing {root / tag}: an earlier save{when} of the same name"


def _nothing() -> None:
    """What the other ranks do while rank 0 commits."""


@dataclass(frozen=True)
class _Share:
    """What one rank is to write."""

    rank: int
    items: list[Item]
    texts: Mapping[str, bytes]
    """JSON files by name."""
    pieces: list[Piece]
    """What `items` are, for the manifest; their data is not asked for."""

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items) + sum(map(len, self.texts.values()))


def _share(rank: int, pieces: list[Piece], states: Mapping[str, Mapping[str, Any]], hold: Hold | None) -> _Share:
    """Tensors of the states are in the same files as the pieces."""
    items: list[Item] = []
    texts = {f"{stem}.json": _text(encode(state, stem, items)) for stem, state in states.items()}
    items += [piece.item() for piece in pieces]
    return _Share(rank, items if hold is None else hold(items), texts, pieces)


def _write_rank(staging: Path, share: _Share) -> Any:
    """Write a rank's share; what the manifest has to say about it."""
    files: dict[str, FileEntry] = {}
    file_of: dict[str, str] = {}
    for index, batch in enumerate(split_files(share.items)):
        name = f"rank{share.rank}-{index}.safetensors" if index else f"rank{share.rank}.safetensors"
        with storing(staging / name, share.nbytes):
            files[name] = write_file(staging / name, batch)
        file_of |= {item.key: name for item in batch}
    for name, text in share.texts.items():
        with storing(staging / name, share.nbytes):
            files[name] = write_blob(staging / name, text)
    tensors = gather_tensors(piece.entry(file_of[piece.key]) for piece in share.pieces)
    return {"files": {name: asdict(entry) for name, entry in files.items()}, "tensors": [asdict(t) for t in tensors]}


def _collect(parts: list[Any], tag: str) -> tuple[dict[str, FileEntry], tuple[TensorEntry, ...]]:
    """The files and the whole tensors of all ranks."""
    files = {name: FileEntry(**entry) for part in parts for name, entry in part["files"].items()}
    return files, gather_tensors(tensor_from_json(value, tag) for part in parts for value in part["tensors"])


def _commit(staging: Path, root: Path, manifest: Manifest, latest: bool) -> int:
    """The manifest, last of all files, then the rename; the bytes of the whole checkpoint."""
    manifest.check()
    data = manifest.to_bytes()
    with storing(staging / MANIFEST, len(data)):
        write_blob(staging / MANIFEST, data)
    commit(staging, root, manifest.tag, latest)
    return sum(entry.size for entry in manifest.files.values()) + len(data)


def _text(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
