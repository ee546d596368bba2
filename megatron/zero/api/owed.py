"""What ranks owe each other (zero/own_exchange.py) <-> a checkpoint.

    worker_error    [dp ranks, ...shape of the parameter]: each rank writes its own, whole
    server_error    [...shape of the parameter]: each server writes its chunk

On as many ranks as wrote it, each takes its own again. On another number every rank takes the mean: what the ranks owe
on average, which is all that the next mean of their numbers shows of it, is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.checkpoint.cut import DPSharding
from megatron.checkpoint.manifest import TensorEntry
from megatron.checkpoint.piece import TensorPiece, tp_sharding_of
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.tensorfile import DTYPE_NAMES
from megatron.errors import CheckpointError
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import Slot
from megatron.zero.own_exchange import SERVER_ERROR, WORKER_ERROR, CompressedBucketExchange
from mpu.split import Partition


def error_feedback_pieces(engine: ZeroEngine) -> Iterator[TensorPiece]:
    """This rank's."""
    dp, tp = engine.groups.dp, engine.groups.tp
    for line in engine.compressed_exchanges:
        for slot in _nonempty_slots(line):
            shape, partition = _worker_error_shape(slot, dp.size)
            yield TensorPiece(slot.name, WORKER_ERROR, shape, partition, tp.rank, tp.size, dp.rank * slot.numel,
                              line.one_bit_mean.worker_error[slot.offset : slot.end])
        for segment in line.layout.segments(dp.rank):
            slot, start = segment.slot, segment.shard_offset
            yield TensorPiece(slot.name, SERVER_ERROR, slot.shape, slot.partition, tp.rank, tp.size,
                              segment.slot_offset, line.one_bit_mean.server_error[start:start + segment.count])


def error_feedback_tensors(engine: ZeroEngine) -> Iterator[TensorEntry]:
    """Of all ranks together."""
    tp = engine.groups.tp.size
    for line in engine.compressed_exchanges:
        dtype = DTYPE_NAMES[line.one_bit_mean.worker_error.dtype]
        for slot in _nonempty_slots(line):
            shape, partition = _worker_error_shape(slot, engine.groups.dp.size)
            yield TensorEntry(WORKER_ERROR, slot.name, dtype, tp_sharding_of(shape, partition, tp),
                              DPSharding(0, slot.numel))
            yield TensorEntry(SERVER_ERROR, slot.name, dtype, tp_sharding_of(slot.shape, slot.partition, tp),
                              DPSharding(slot.offset, line.layout.shard_numel))


def error_feedback_kinds(engine: ZeroEngine) -> list[str]:
    return [WORKER_ERROR, SERVER_ERROR] if engine.compressed_exchanges else []


def check_error_feedback(engine: ZeroEngine, found: Checkpoint) -> None:
    """What there is of this model's parameters has their shape."""
    for bucket in engine.buckets:
        for slot in (slot for slot in bucket.layout.slots if slot.numel):
            if (WORKER_ERROR, slot.name) in found.tensors:
                _saved_ranks(engine, found, slot)


def load_error_feedback(engine: ZeroEngine, found: Checkpoint) -> None:
    """After the rule has been told what travels. A run of which nothing but sums had travelled owed nothing."""
    tp = engine.groups.tp
    where: dict[str, Any] = {"tp_rank": tp.rank, "tp_size": tp.size}
    for line in engine.compressed_exchanges:
        for slot in _nonempty_slots(line):
            if (WORKER_ERROR, slot.name) in found.tensors:  # not strict: who is new owes nothing
                _load_worker_error(engine, found, slot, line.one_bit_mean.worker_error[slot.offset : slot.end], where)
        for segment in line.layout.segments(engine.groups.dp.rank):
            slot, start = segment.slot, segment.shard_offset
            if (SERVER_ERROR, slot.name) not in found.tensors:
                continue
            found.read(SERVER_ERROR, slot.name, shape=slot.shape, partition=slot.partition, offset=segment.slot_offset,
                       out=line.one_bit_mean.server_error[start : start + segment.count], **where)


def _load_worker_error(engine: ZeroEngine, found: Checkpoint, slot: Slot, out: Tensor, where: dict[str, Any]) -> None:
    dp = engine.groups.dp
    ranks = _saved_ranks(engine, found, slot)
    shape, partition = _worker_error_shape(slot, ranks)
    if ranks == dp.size:
        found.read(WORKER_ERROR,
                   slot.name,
                   shape=shape,
                   partition=partition,
                   offset=dp.rank * slot.numel,
                   out=out,
                   **where)
        return
    out.zero_()
    for rank in range(ranks):
        one = out.new_empty(slot.numel)
        found.read(WORKER_ERROR,
                   slot.name,
                   shape=shape,
                   partition=partition,
                   offset=rank * slot.numel,
                   out=one,
                   **where)
        out.add_(one, alpha=1 / ranks)


def _saved_ranks(engine: ZeroEngine, found: Checkpoint, slot: Slot) -> int:
    saved, expected = found.shape(WORKER_ERROR, slot.name), tp_sharding_of(*_worker_error_shape(slot, 1),
                                                                           engine.groups.tp.size).logical_shape
    if len(saved) != len(expected) or saved[1:] != expected[1:] or not saved[0]:
        raise CheckpointError(
            f"{found.tag} of {found.folder.parent} is of another model: {WORKER_ERROR} {slot.name!r}: shape "
            f"expected [ranks, {', '.join(map(str, expected[1:]))}], found {list(saved)}")
    return saved[0]


def _nonempty_slots(line: CompressedBucketExchange) -> Iterator[Slot]:
    return (slot for slot in line.layout.slots if slot.numel)


def _worker_error_shape(slot: Slot, ranks: int) -> tuple[tuple[int, ...], Partition | None]:
    """Shape and cut of one parameter's numbers of so many ranks."""
    partition = slot.partition
    return (ranks, *slot.shape), partition and replace(partition, dim=partition.dim % len(slot.shape) + 1)
