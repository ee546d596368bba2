"""Non-weight state of an engine checkpoint: hyper-parameters of param groups, validation of the shared state, 1-bit
error feedback.

    worker_error    [dp ranks, ...shape of the parameter]: each rank writes its own, unsharded
    server_error    [...shape of the parameter]: each server writes its chunk

With the saved number of ranks each rank reads its own errors; with another number every rank takes the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.file_formats import check_field, check_record
from megatron.checkpoint.manifest import TensorEntry
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.reshard import DPSharding, TPSlice, tp_sharding_of
from megatron.checkpoint.safetensors_io import DTYPE_NAMES
from megatron.checkpoint.writer import TensorPiece
from megatron.errors import CheckpointError
from megatron.optim.rule import ParamGroup
from megatron.zero.compression import SERVER_ERROR, WORKER_ERROR
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import FlatLayout, Slot
from mpu.split import Partition

# Changed by schedulers, or stored by them in a group.
SCHEDULED_HYPER_PARAMETERS = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum", "max_momentum"})

# Which parameters a group has and how it is computed: never restored from another run.
RUN_SPECIFIC_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})


def hyper_parameters(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """The serializable ones of each group: numbers, strings, tensors, and lists or tuples of them."""
    return [{name: value for name, value in group.items() if name not in RUN_SPECIFIC_KEYS and _is_serializable(value)}
            for group in groups]


def check_param_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[ParamGroup], where: str) -> None:
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{where} holds the hyper-parameters of {len(saved)} param groups, the optimizer has {len(groups)}: give "
            "it the same groups, or load_optimizer_states=False and load_lr_scheduler_states=False")


def restore_param_groups(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(groups, saved, strict=True):
        for name, value in values.items():
            current = group.get(name)
            if isinstance(current, Tensor):  # in place: a compiled step or a scheduler may hold this tensor
                current.fill_(value)
            else:
                group[name] = value.item() if isinstance(value, Tensor) and isinstance(current, float) else value


def _is_serializable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_serializable, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


SHARED_FIELDS = {"run_id": str, "engine": dict, "buffers": dict, "client_state": dict}
OPTIONAL_FIELDS = {"optimizer": str | None, "owed": list[str] | None, "param_groups": list[dict[str, Any]] | None,
                   "lr_scheduler": dict | None, "tied": dict | None, "loop": dict | None}
ENGINE_FIELDS = {"global_steps": int, "skipped_steps": int, "micro_steps": int, "optimizer_steps": int,
                 "clean_steps": int, "hysteresis_left": int, "loss_scale": float, "rule": dict}
QUANTISATION_FIELDS = {"counter": int, "blocks": list[str], "bits": list[int], "periods": list[int],
                       "fell_at": list[int], "factors": list[int]}


def check_shared_state(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a field is missing, unknown, or of the wrong type or range. Does not check the client
    state and what a scheduler or an optimizer validates itself."""
    where = checkpoint.shared_label
    state = check_record(checkpoint.shared_state, where, SHARED_FIELDS, OPTIONAL_FIELDS)
    engine = state["engine"]
    if engine:  # imported weights come from no engine
        check_record(engine, f"{where}: field 'engine'", ENGINE_FIELDS, {"quantisation": dict})
        if engine["loss_scale"] <= 0:
            raise CheckpointError(f"{where}: field 'engine': field 'loss_scale' must be a finite number above 0, found "
                                  f"{engine['loss_scale']!r:.80}")
    if "quantisation" in engine:
        quantisation = check_record(engine["quantisation"], f"{where}: field 'quantisation'", QUANTISATION_FIELDS,
                                    {"rounded": list[str]})
        # For every block a name and one number of each kind.
        counts = {len(quantisation[name]) for name in ("blocks", "bits", "periods", "fell_at", "factors")}
        if len(counts) != 1 or 0 in counts:
            raise CheckpointError(f"{where}: field 'quantisation': bits, periods, fell_at and factors are not of the "
                                  "same blocks")
    for name, kind in (("buffers", Tensor), ("tied", str)):
        for value in (state.get(name) or {}).values():
            check_field(f"{where}: field {name!r}", value, kind)
    for name in ("global_samples", "train_batch_size", "epoch"):
        check_field(f"{where}: field 'loop': field {name!r}", (state.get("loop") or {}).get(name), int | None)


def check_hyper_parameters(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise CheckpointError unless saved values have the types of the groups' values and are finite."""
    for index, (values, group) in enumerate(zip(saved, groups, strict=True)):
        for name, value in values.items():
            if name in group and not _is_same_kind(group[name], value):
                raise CheckpointError(f"{where}: param_groups[{index}]: field {name!r:.80}: {value!r:.80} in the place "
                                      f"of {group[name]!r:.80}")


def _is_same_kind(current: Any, value: Any) -> bool:
    if current is None or value is None:
        return True
    if isinstance(current, list | tuple):
        return (isinstance(value, list | tuple) and len(value) == len(current)
                and all(map(_is_same_kind, current, value)))
    if isinstance(current, str):
        return isinstance(value, str)
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and math.isfinite(value)


def tensor_entries(layout: FlatLayout, dtypes: Mapping[str, torch.dtype], tp: int) -> Iterator[TensorEntry]:
    """What all ranks together save of a bucket: for each kind of state, every parameter."""
    for kind, dtype in dtypes.items():
        for slot in layout.slots:
            yield TensorEntry(kind, slot.name, DTYPE_NAMES[dtype], tp_sharding_of(slot.shape, slot.partition, tp),
                              DPSharding(slot.offset, layout.shard_numel))


def error_feedback(engine: ZeroEngine) -> tuple[list[TensorEntry], list[TensorPiece]]:
    """The tensors that all ranks save together, and the pieces of this rank."""
    dp, tp, entries, pieces = engine.groups.dp, engine.groups.tp, list[TensorEntry](), list[TensorPiece]()
    for exchange in engine.compressed_exchanges:
        layout, mean = exchange.layout, exchange.one_bit_mean
        dtype = DTYPE_NAMES[mean.worker_error.dtype]
        for slot in layout.slots:
            if not slot.numel:
                continue
            worker = TPSlice(*_worker_error_shape(slot, dp.size), tp.rank, tp.size)
            server = TPSlice(slot.shape, slot.partition, tp.rank, tp.size)
            entries += [TensorEntry(WORKER_ERROR, slot.name, dtype, worker.sharding, DPSharding(0, slot.numel)),
                        TensorEntry(SERVER_ERROR, slot.name, dtype, server.sharding,
                                    DPSharding(slot.offset, layout.shard_numel))]
            pieces.append(TensorPiece(slot.name, WORKER_ERROR, worker, dp.rank * slot.numel,
                                      mean.worker_error[slot.offset : slot.end]))
        for segment in layout.segments(dp.rank):
            slot, start = segment.slot, segment.shard_offset
            pieces.append(TensorPiece(slot.name, SERVER_ERROR, TPSlice(slot.shape, slot.partition, tp.rank, tp.size),
                                      segment.slot_offset, mean.server_error[start : start + segment.count]))
    return entries, pieces


def load_error_feedback(engine: ZeroEngine, checkpoint: Checkpoint) -> None:
    """Call it after the rule's state is restored, which decides what is compressed. Checkpoints from before compression
    began hold no errors."""
    dp, tp = engine.groups.dp, engine.groups.tp
    for exchange in engine.compressed_exchanges:
        for slot in exchange.layout.slots:
            # Missing for an empty parameter and for a new one (strict=False).
            if (WORKER_ERROR, slot.name) not in checkpoint.tensors:
                continue
            out = exchange.one_bit_mean.worker_error[slot.offset : slot.end]
            ranks = saved_worker_ranks(engine, checkpoint, slot)
            local = TPSlice(*_worker_error_shape(slot, ranks), tp.rank, tp.size)
            if ranks == dp.size:
                checkpoint.read_slice(WORKER_ERROR, slot.name, local, dp.rank * slot.numel, out)
                continue
            # Another number of ranks: each takes the mean, so that the mean over the ranks stays.
            out.zero_()
            for rank in range(ranks):
                one = out.new_empty(slot.numel)
                checkpoint.read_slice(WORKER_ERROR, slot.name, local, rank * slot.numel, one)
                out.add_(one, alpha=1 / ranks)
        for segment in exchange.layout.segments(dp.rank):
            slot, start = segment.slot, segment.shard_offset
            if (SERVER_ERROR, slot.name) in checkpoint.tensors:
                local = TPSlice(slot.shape, slot.partition, tp.rank, tp.size)
                checkpoint.read_slice(SERVER_ERROR, slot.name, local, segment.slot_offset,
                                      exchange.one_bit_mean.server_error[start : start + segment.count])


def saved_worker_ranks(engine: ZeroEngine, checkpoint: Checkpoint, slot: Slot) -> int:
    """The number of ranks that saved worker errors of a parameter; CheckpointError for another shape than its own."""
    saved = checkpoint.shape(WORKER_ERROR, slot.name)
    expected = tp_sharding_of(*_worker_error_shape(slot, 1), engine.groups.tp.size).logical_shape
    if len(saved) != len(expected) or saved[1:] != expected[1:] or not saved[0]:
        raise CheckpointError(
            f"{checkpoint.label} is of another model: {WORKER_ERROR} {slot.name!r}: shape expected "
            f"[ranks, {', '.join(map(str, expected[1:]))}], found {list(saved)}")
    return saved[0]


def _worker_error_shape(slot: Slot, ranks: int) -> tuple[tuple[int, ...], Partition | None]:
    """Shape [ranks, ...parameter] and tensor parallel partition of one parameter's worker errors."""
    partition = slot.partition
    return (ranks, *slot.shape), partition and replace(partition, dim=partition.dim % len(slot.shape) + 1)
