"""Made checkpoints: a few logical tensors, cut for any layout by plain slicing, and all ranks of a save as threads.

The slicing here is the slow, obvious reference that cut.py is compared with.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from data.storage import crc32
from megatron.checkpoint import writer
from megatron.checkpoint.file_formats import seal_record, unseal_record
from megatron.checkpoint.manifest import MANIFEST, CommitRecord, Lineage
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.reshard import DPSharding, TPSlice
from megatron.checkpoint.tags import choose_tag, latest_tag, read_tag_manifest
from megatron.checkpoint.verify import verify_tag
from megatron.checkpoint.writer import TensorSource
from megatron.distributed import consistency
from megatron.errors import CheckpointError
from megatron.zero.layout import FlatLayout, Slot
from mpu.groups import SOLO, Group
from mpu.split import Partition

VOCAB, ROWS_MULTIPLE = 50, 4

SHAPES: dict[str, tuple[tuple[int, ...], Partition | None]] = {
    "embedding.weight": ((VOCAB, 8), Partition(0, size=VOCAB)),
    "qkv.weight": ((3 * 16, 8), Partition(0, stride=3)),
    "qkv.bias": ((3 * 16,), Partition(0, stride=3)),
    "projection.weight": ((8, 16), Partition(-1)),
    "fc.weight": ((20, 8), Partition(0)),
    "norm.weight": ((8,), None),
    "norm.bias": ((8,), None),
}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Grid:
    """A layout: tp x dp ranks."""

    tp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}"


GRIDS = [Grid(tp, dp) for tp in (1, 2, 4) for dp in (1, 2, 4)]


def logical(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """All logical tensors by (kind, name)."""
    generator = torch.Generator().manual_seed(seed)
    return {(kind, name): torch.randn(shape, generator=generator)
            for kind in KINDS for name, (shape, _) in SHAPES.items()}


def local(tensor: torch.Tensor, partition: Partition | None, tp_rank: int, tp: int, padding: float = 0) -> torch.Tensor:
    """Rank `tp_rank`'s part of a logical tensor, by plain slicing."""
    if partition is None:
        return tensor
    if partition.size is not None:
        rows = -(-partition.size // (ROWS_MULTIPLE * tp)) * ROWS_MULTIPLE * tp
        tensor = torch.cat([tensor, torch.full((rows - partition.size, *tensor.shape[1:]), padding)])
    parts = tensor.chunk(partition.stride, partition.dim)
    return torch.cat([part.chunk(tp, partition.dim)[tp_rank] for part in parts], partition.dim)


def sources(values: Mapping[tuple[str, str], torch.Tensor], grid: Grid, tp_rank: int,
            padding: float = 0) -> Iterator[TensorSource]:
    """What all ranks of the grid together save, in the engine's own flat layout, with the data of one."""
    for kind in KINDS:
        locals_ = {name: local(values[kind, name], partition, tp_rank, grid.tp, padding)
                   for name, (_, partition) in SHAPES.items()}
        slots = [Slot(name, tuple(value.shape), partition=SHAPES[name][1]) for name, value in locals_.items()]
        layout = FlatLayout(slots, grid.dp)
        for slot in layout.slots:
            yield TensorSource.of(kind, slot.name, torch.float32, TPSlice(slot.shape, slot.partition, tp_rank, grid.tp),
                                  load_from(locals_[slot.name]), DPSharding(slot.offset, layout.shard_numel))


def whole(name: str, data: torch.Tensor, kind: str = "weight") -> TensorSource:
    """A tensor that is not split."""
    return TensorSource.of(kind, name, data.dtype, TPSlice(tuple(data.shape)), load_from(data))


def load_from(data: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda offset, count: data.flatten()[offset:offset + count]


def runs(values: Mapping[tuple[str, str], torch.Tensor], grid: Grid, tp_rank: int, dp_rank: int,
         padding: float = 0) -> Iterator[tuple[str, str, TPSlice, int, torch.Tensor]]:
    """(kind, name, cut, offset, elements) of what rank (tp_rank, dp_rank) owns, by plain slicing."""
    for entry in (source.entry for source in sources(values, grid, tp_rank, padding)):
        partition, cut = SHAPES[entry.name][1], entry.dp_sharding
        own = local(values[entry.kind, entry.name], partition, tp_rank, grid.tp, padding)
        start, stop = (min(max(shard * cut.shard_size - cut.start, 0), own.numel()) for shard in (dp_rank, dp_rank + 1))
        if start < stop:
            yield (entry.kind, entry.name, TPSlice(tuple(own.shape), partition, tp_rank, grid.tp), start,
                   own.flatten()[start:stop])


class Payload:
    """Unpickled by a loader that looks names up, it makes a folder called `canary` in the current one."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("canary",)


class ThreadWorld:
    """A world whose ranks are threads of this process: a collective is a list and a barrier."""

    def __init__(self, size: int) -> None:
        self.groups = [Group(rank, size, tuple(range(size))) for rank in range(size)]
        self._slots: dict[int, Any] = {}
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, value: Any, group: Group) -> list[Any]:
        self._slots[group.rank] = value
        self._barrier.wait()
        values = [self._slots[group.rank] for group in self.groups]
        self._barrier.wait()
        return values

    def reduce_number(self, number: float, group: Group, op: str = "max") -> float:
        return float({"min": min, "max": max, "sum": sum}[op](self.exchange(number, group)))

    def broadcast_json(self, value: Any, group: Group, src: int = 0) -> Any:
        text = json.dumps(value) if group.rank == src else None
        return json.loads(self.exchange(text, group)[src])

    def run(self, action: Callable[[Group], Any]) -> list[Any]:
        """What `action` returned or raised on each rank."""
        results: dict[int, Any] = {}

        def work(group: Group) -> None:
            try:
                results[group.rank] = action(group)
            except Exception as error:
                results[group.rank] = error

        with self.installed():
            threads = [threading.Thread(target=work, args=(group,)) for group in self.groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return [results[group.rank] for group in self.groups]

    @contextmanager
    def installed(self) -> Iterator[None]:
        with mock.patch.object(consistency, "all_reduce_scalar", self.reduce_number), \
                mock.patch.object(consistency, "broadcast_json", self.broadcast_json):
            yield


def save_grid(root: Path, grid: Grid, step: int = 1, seed: int = 0, padding: float = 0, run: str = "made",
              config: Mapping[str, Any] = {"hidden": 8}, tag: str | None = None) -> list[Any]:
    """Save as tp x dp ranks; what `save` returned or raised on each. The engine skips no replicated copies here."""
    values, lineage = logical(seed), Lineage(_parent(root, None, run))

    def work(world: Group) -> Any:
        return writer.save(root, tag or f"global_step{step}",
                           tensors=sources(values, grid, world.rank % grid.tp, padding),
                           rank_state={"seed": world.rank, "stream": torch.arange(8, dtype=torch.uint8) + world.rank},
                           shared_state={"scale": 2.0, "position": [1, step]}, config=config,
                           layout={"tp": grid.tp, "dp": grid.dp}, world=world, run_id=run, iteration=step,
                           lineage=lineage)

    return ThreadWorld(grid.tp * grid.dp).run(work)


def save_solo(root: Path, step: int, seed: int | None = None, tag: str | None = None, run: str = "solo",
              after: str | None = None, data: torch.Tensor | None = None, **given: Any) -> None:
    """A small checkpoint of one rank: `data`, or numbers that depend on the seed (default: the step) alone. It
    continues from the tag `after`, or else from the one that `latest` names where that is of the same run."""
    values = torch.full((16,), float(step if seed is None else seed)) if data is None else data
    content: dict[str, Any] = dict(
        tensors=[whole("w", values)], shared_state={}, config={},
        rank_state={"stream": torch.arange(4, dtype=torch.uint8)}, layout={"tp": 1, "dp": 1}, world=SOLO, run_id=run,
        iteration=step, lineage=Lineage(_parent(root, after, run)))
    writer.save(root, tag or f"global_step{step}", **{**content, **given})


def weight(root: Path, tag: str, count: int = 16) -> list[float]:
    """The numbers that a `save_solo` checkpoint holds, after every byte of it was verified."""
    verify_tag(root, tag)
    out = torch.empty(count)
    open_checkpoint(root, tag).read_slice("weight", "w", TPSlice((count,)), 0, out)
    return out.tolist()


def _parent(root: Path, after: str | None, run: str) -> CommitRecord | None:
    try:
        record = read_tag_manifest(root, after or latest_tag(root) or "none")
    except CheckpointError:
        return None
    return record if after or record.run_id == run else None


@contextmanager
def printed() -> Iterator[list[str]]:
    """The lines that go to standard error in the block."""
    lines: list[str] = []
    with redirect_stderr(StringIO()) as text:
        yield lines
    lines += text.getvalue().splitlines()


def open_quietly(root: Path, tag: str | None = None) -> Checkpoint:
    with printed() as lines:
        found = open_checkpoint(root, tag)
    assert lines == []
    return found


# ---- tags whose content is changed, with checksums that are right afterwards ----------------------------------------

def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a file of JSON, sealed or not; what `change` returns, if anything, takes its place."""
    data = path.read_bytes()
    sealed = path.name == MANIFEST or path.name.startswith("rank")
    value = unseal_record(data, path.name) if sealed else json.loads(data)
    changed = change(value)
    value = value if changed is None else changed
    path.write_bytes(seal_record(value) if sealed else json.dumps(value).encode())


def redigest(body: dict[str, Any]) -> None:
    """Give a manifest the save_id of what it says now."""
    said = {name: body[name] for name in ("run_id", "tag", "iteration", "layout", "config", "tensors")}
    digest = sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()[:32]
    body["save_id"] = f"{body['save_id'].partition('-')[0]}-{digest}"


def rejoin(folder: Path) -> None:
    """Let all files of a tag be of what its manifest says now, by digest, origin and checksums."""
    rewrite(folder / MANIFEST, redigest)
    body = json.loads((folder / MANIFEST).read_bytes())
    now = {name: body[name] for name in ("save_id", "run_id", "tag", "iteration")}
    for name in ("shared.json", *(path.name for path in folder.glob("rank*.json"))):
        rewrite(folder / name, lambda value: value["origin"].update(now))
    for path in folder.glob("*.safetensors"):
        set_header(path, lambda header: header["__metadata__"].update({key: str(value) for key, value in now.items()}))
    reseal(folder)


def reseal(folder: Path) -> None:
    """Sizes and checksums in every part as the files are now."""
    def renew(part: dict[str, Any]) -> None:
        for name in list(part["files"]):
            data = (folder / name).read_bytes()
            part["files"][name] = {"size": len(data), "crc32": f"{crc32(data):08x}"}

    for path in folder.glob("rank*.json"):
        rewrite(path, renew)


def set_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])


def load_candidates(root: Path) -> list[str]:
    """The tag that a load takes, then those that may replace it."""
    choice = choose_tag(root)
    return [choice.first, *choice.fallbacks]
