"""Saves an engine to a checkpoint and restores it. File formats and commits are in megatron/checkpoint.

    tensors    weights and optimizer state, as pieces of parameters
    shared     counters, loss scale, learning rate schedule, hyper-parameters, module buffers, the client state
    per rank   every random stream, restored if the layout is the same

On another layout random streams are derived from the seed and the step; all other state carries over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint, assert_same_weights
from megatron.checkpoint.file_formats import check_field, check_record, reraise_as_corrupt
from megatron.checkpoint.manifest import rank_manifest_name
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.reshard import DPSharding, TPSlice
from megatron.checkpoint.writer import SavePlan, TensorSource, agree
from megatron.distributed.collective_log import LOAD
from megatron.distributed.consistency import all_succeed_or_raise, assert_same_arguments
from megatron.distributed.rank_text import format_ranks, join_limited
from megatron.errors import CheckpointError, ConfigError
from megatron.optim.rule import ParamGroup
from megatron.zero.api.torch_interfaces import EpochDataLoader, LRSchedulerProtocol
from megatron.zero.bucket import FlatBucket
from megatron.zero.compression import SERVER_ERROR, WORKER_ERROR
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.state import persistent_buffers
from mpu.groups import Group, Groups
from mpu.random import capture_rng, model_parallel_cuda_manual_seed, restore_rng
from mpu.split import Partition

if TYPE_CHECKING:
    from megatron.zero.api.engine import Engine

# Changed by schedulers, or stored by them in a group.
SCHEDULED_HYPER_PARAMETERS = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum", "max_momentum"})

# Which parameters a group has and how it is computed: never restored from another run.
RUN_SPECIFIC_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})

# Keys that `client_state` must not use: the engine's own, or DeepSpeed's names for them.
RESERVED_CLIENT_KEYS = frozenset({"module", "optimizer", "lr_scheduler", "buffers", "engine", "run_id", "client_state",
                                  "rng", "config", "layout", "global_steps", "skipped_steps", "global_samples",
                                  "micro_steps", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
                                  "buffer_names", "optimizer_state_dict", "param_shapes", "frozen_param_shapes"})

SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class LoadOptions:
    """Which parts of a checkpoint to restore."""

    optimizer: bool = True
    scheduler: bool = True
    counters: bool = True
    strict: bool = True
    rng: bool = True
    # Together with `counters`. Switch it off when the precision changed.
    loss_scale: bool = True
    # Of the param groups: the learning rates with the scheduler, the others with the optimizer.
    hyper_parameters: bool = True


# ---- save ------------------------------------------------------------------------------------------------------------

def check_save_call(arguments: Mapping[str, Any], client_state: Mapping[str, Any], world: Group) -> None:
    """Raise ConfigError if the ranks' arguments differ or a client state cannot be saved; warn about client keys that
    only other ranks than 0 have. Collective: one exchange if all is well."""
    per_rank = assert_same_arguments("save_checkpoint", {**arguments, "client_state": sorted(map(str, client_state))},
                                     world, lambda: check_client_state(client_state), may_differ="client_state")
    dropped: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(per_rank if world.rank == 0 else ()):
        for key in set(of_rank["client_state"]).difference(per_rank[0]["client_state"]):
            dropped.setdefault(key, []).append(rank)
    if dropped:
        which = join_limited([f"{key!r} (given on {format_ranks(dropped[key])})" for key in sorted(dropped)], "keys")
        print(f"warning: client_state: {which} is not saved: a checkpoint holds that of rank 0; give it there",
              file=sys.stderr)


def check_client_state(client_state: Mapping[str, Any]) -> None:
    reserved = sorted(RESERVED_CLIENT_KEYS & set(client_state))
    if reserved:
        raise ConfigError(f"client_state: {', '.join(reserved)} is the engine's own; choose another name")


def plan_engine_save(engine: Engine, root: Path, tag: str, client_state: Mapping[str, Any], *, optimizer: bool,
                     rng: bool, frozen: bool, **options: Any) -> SavePlan:
    """Plan the checkpoint `tag` under `root`, for the caller to finish; `options` are those of `agree`. The caller
    has checked the client state, and that every rank makes this call. Collective over the world."""
    core, tp, dp = engine.core, engine.groups.tp, engine.groups.dp
    all_succeed_or_raise(core.check_before_save, engine.groups.world)
    kinds, tensors = ("weight", *(core.rule.states if optimizer else ())), list[TensorSource]()
    for bucket in (*core.buckets, *(core.frozen_buckets if frozen else ())):
        # Replicas of an unsharded bucket divide the writing as if it were sharded. Of replicas of shards the first ones
        # write: they are the first ranks.
        layout = FlatLayout(bucket.layout.slots, dp.size) if bucket.shard_group.is_solo else bucket.layout
        for kind, slot in product(kinds if bucket.trainable else ("weight",), layout.slots):
            tensors.append(TensorSource.of(kind, slot.name, bucket.master_state.dtype,
                                           TPSlice(slot.shape, slot.partition, tp.rank, tp.size),
                                           partial(read_state, bucket, kind, slot),
                                           DPSharding(slot.offset, layout.shard_numel)))
    errors = error_feedback(core) if optimizer else []
    epochs, batch_size = engine.training_dataloader, engine.train_batch_size()
    batch_is_set = batch_size != engine.configured_batch_size and engine.config.train.batch_ramp is None
    shared = {
        "run_id": engine.run_id,
        "engine": core.state.scalar_state(),
        "optimizer": core.rule.name,
        "owed": [WORKER_ERROR, SERVER_ERROR] if errors else [],
        "param_groups": hyper_parameters(core.param_groups),
        "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "buffers": {name: buffer.detach().cpu() for name, buffer in persistent_buffers(engine.module).items()},
        "tied": tied_tensor_names(engine.module, core.all_buckets),
        "loop": {"global_samples": engine.global_samples,
                 "train_batch_size": batch_size if batch_is_set else None,
                 "epoch": epochs.epoch if isinstance(epochs, EpochDataLoader) else None},
        "client_state": dict(client_state)}
    return agree(root, tag, tensors=tensors + errors, rank_state={"rng": capture_rng()} if rng else {},
                 shared_state=shared, config=engine.config.as_dict(), layout=engine.layout, world=engine.groups.world,
                 run_id=engine.run_id, iteration=core.state.counters.global_steps, lineage=engine.lineage, **options)


def read_state(bucket: FlatBucket, kind: str, slot: Slot, offset: int, count: int) -> Tensor:
    """`count` elements from `offset` of the slot, which this rank holds."""
    start = slot.offset + offset - bucket.shard_group.rank * bucket.layout.shard_numel
    return bucket.master_state.fetch(kind, start, count)


def tied_tensor_names(module: nn.Module, buckets: Iterable[FlatBucket]) -> dict[str, str]:
    """Name of each tied parameter or buffer -> the name under which its tensor is saved."""
    saved = {id(buffer): name for name, buffer in module.named_buffers()}
    saved |= {id(parameter): slot.name for bucket in buckets
              for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True)}
    named = {name: id(tensor) for name, tensor in (*module.named_parameters(remove_duplicate=False),
                                                   *module.named_buffers(remove_duplicate=False))}
    return {name: saved[key] for name, key in named.items() if saved.get(key, name) != name}


# ---- load ------------------------------------------------------------------------------------------------------------

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
        check_record(engine, f"{where}: field 'engine'", ENGINE_FIELDS,
                     {"quantisation": dict, "recent_norms": list[float]})
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


def load_engine(engine: ZeroEngine, checkpoint: Checkpoint, scheduler: LRSchedulerProtocol | None,
                options: LoadOptions) -> None:
    """Restore everything but the random streams from an open checkpoint. `counters` includes the schedule, and the loss
    scale unless that is off. Mismatches raise before anything changes."""
    world, state, shared, where = engine.groups.world, engine.state, checkpoint.shared_state, checkpoint.shared_label
    all_succeed_or_raise(engine.param_guard.check_before_load, world)
    optimizer = options.optimizer and bool(engine.buckets)
    if options.counters and not shared["engine"]:
        raise CheckpointError(f"{checkpoint.label} holds imported weights, not a run: load them with "
                              "load_module_only=True, or --finetune")
    _check_model(engine, checkpoint, options.strict, optimizer)
    param_groups = _param_groups_to_restore(shared, scheduler, options) if engine.buckets else None
    if param_groups is not None:
        check_param_groups(param_groups, engine.param_groups, where)

    kinds = ("weight", *(engine.rule.states if optimizer else ()))
    known = {kind: frozenset(checkpoint.names(kind)) for kind in kinds}  # not strict: missing tensors keep their values
    engine.load_segments(known, partial(_read_segment, engine, checkpoint))
    load_buffers(engine.module, checkpoint)
    if options.counters:  # after the tensors: with MoQ this rounds the weights
        with reraise_as_corrupt(f"{where}: field 'engine'"):
            state.restore_scalar_state(shared["engine"], loss_scale=options.loss_scale)
    if not optimizer:
        all_succeed_or_raise(state.reset_optimizer_state, world)
    if engine.compressed_exchange is not None:
        engine.compressed_exchange.sync_with_rule()  # the rule's scalars decide whether gradients are compressed
        if optimizer:
            all_succeed_or_raise(lambda: load_error_feedback(engine, checkpoint), world)
    if param_groups is not None:
        restore_param_groups(engine.param_groups, param_groups)
    if options.counters and options.scheduler and scheduler is not None and shared["lr_scheduler"] is not None:
        with reraise_as_corrupt(f"{where}: field 'lr_scheduler'"):
            scheduler.load_state_dict(shared["lr_scheduler"])  # ours also set the param groups' rates
    engine.state.unfinished_change = None


def _param_groups_to_restore(shared: Mapping[str, Any], scheduler: LRSchedulerProtocol | None,
                             options: LoadOptions) -> list[dict[str, Any]] | None:
    """The hyper-parameters of each group to restore, or None. Learning rates are restored with the scheduler's state;
    if this run has no scheduler, with the optimizer's. A scheduler without saved state sets its own."""
    saved = shared.get("param_groups")  # None in checkpoints of older versions
    resumed = scheduler is not None and shared["lr_scheduler"] is not None and options.counters
    rates = options.scheduler and (resumed or scheduler is None and options.optimizer)
    if saved is None or not options.hyper_parameters or not (rates or options.optimizer):
        return None
    return [{name: value for name, value in group.items()
             if (rates if name in SCHEDULED_HYPER_PARAMETERS else options.optimizer)} for group in saved]


def load_external_weights(engine: ZeroEngine, checkpoint: ExternalCheckpoint) -> None:
    """Initial weights from another program's checkpoint of this model."""
    engine.assert_collective_call(LOAD)
    assert_same_weights(checkpoint, engine.groups.world)
    all_succeed_or_raise(engine.param_guard.check_before_load, engine.groups.world)
    engine.load_segments({"weight": checkpoint.shapes}, partial(_read_segment, engine, checkpoint))
    engine.state.unfinished_change = None


def _read_segment(engine: ZeroEngine, checkpoint: Checkpoint | ExternalCheckpoint, kind: str, slot: Slot,
                  offset: int, out: Tensor) -> None:
    """out <- this rank's segment of a parameter, from any saved layout or format."""
    tp = engine.groups.tp
    checkpoint.read_slice(kind, slot.name, TPSlice(slot.shape, slot.partition, tp.rank, tp.size), offset, out)


def check_model(module: nn.Module, slots: Sequence[Slot], checkpoint: Checkpoint, strict: bool = True,
                tp_size: int = 1) -> None:
    """Raise CheckpointError unless parameters and persistent buffers have the model's shapes and, with `strict`, its
    names."""
    weights = {name: checkpoint.shape("weight", name) for name in checkpoint.names("weight")}
    parameters = {slot.name: _logical_shape(slot, tp_size) for slot in slots}
    saved_buffers, buffers = ({name: tuple(buffer.shape) for name, buffer in found.items()}
                              for found in (checkpoint.shared_state["buffers"], persistent_buffers(module)))
    known = dict(module.named_buffers())  # some tags also hold those that are not persistent
    for kind, one, own, in_model, saved in (("parameters", "weight", parameters, parameters.keys(), weights),
                                            ("buffers", "buffer", buffers, known.keys(), saved_buffers)):
        for what, names in (("not in the checkpoint", own.keys() - saved.keys()),
                            ("not in the model", saved.keys() - in_model)):
            if names and strict:
                raise CheckpointError(f"{checkpoint.label} is of another model: {len(names)} {kind} are {what}, "
                                      f"{min(names)} first; give the model it was saved from")
        for name, shape in own.items():
            if saved.get(name, shape) != shape:
                raise CheckpointError(f"{checkpoint.label} is of another model: {one} {name!r}: shape expected "
                                      f"{list(shape)}, found {list(saved[name])}")


def _logical_shape(slot: Slot, tp_size: int) -> tuple[int, ...]:
    """The shape of a parameter over all tensor parallel ranks."""
    return TPSlice(slot.shape, slot.partition, tp_size=tp_size).sharding.logical_shape


def load_buffers(module: nn.Module, checkpoint: Checkpoint) -> None:
    for name, buffer in persistent_buffers(module).items():
        if name in checkpoint.shared_state["buffers"]:
            buffer.copy_(checkpoint.shared_state["buffers"][name])


def _check_model(engine: ZeroEngine, checkpoint: Checkpoint, strict: bool, optimizer: bool) -> None:
    """Raise CheckpointError unless buffers, weights and, with `optimizer`, the state of trainable parameters have the
    model's shapes and the engine's rule; with `strict`, unless model and checkpoint have the same parameters."""
    where, states = checkpoint.label, engine.rule.states if optimizer else ()
    if optimizer:
        saved_rule = checkpoint.shared_state["optimizer"]
        missing = [kind for kind in (*states, *checkpoint.shared_state.get("owed", ())) if kind not in checkpoint.kinds]
        if missing or saved_rule != engine.rule.name:
            what = (f"holds no optimizer state ({', '.join(missing)}): saved without" if saved_rule == engine.rule.name
                    else f"holds the optimizer state of {saved_rule}, not of {engine.rule.name}")
            raise CheckpointError(f"{where} {what}; to resume from the weights alone give --no-load-optim or "
                                  "--finetune (load_optimizer_states=False)")
    slots = [(slot, bucket.trainable) for bucket in (*engine.buckets, *engine.frozen_buckets)
             for slot in bucket.layout.slots]
    check_model(engine.module, [slot for slot, _ in slots], checkpoint, strict, engine.groups.tp.size)
    for slot in (slot for slot, is_trainable in slots if is_trainable):
        for kind in states if strict else ():
            if (kind, slot.name) not in checkpoint.tensors:
                raise CheckpointError(f"{where} holds no {kind} of {slot.name!r}: it was frozen then; "
                                      "load_optimizer_states=False starts the optimizer from scratch")
            expected, found = _logical_shape(slot, engine.groups.tp.size), checkpoint.shape(kind, slot.name)
            if found != expected:
                raise CheckpointError(f"{where} is of another model: {kind} {slot.name!r}: shape expected "
                                      f"{list(expected)}, found {list(found)}")
        if optimizer and slot.numel and (WORKER_ERROR, slot.name) in checkpoint.tensors:
            saved_worker_ranks(engine, checkpoint, slot)  # raises for another shape


def restore_rng_streams(checkpoint: Checkpoint, groups: Groups, layout: Mapping[str, int], seed: int) -> str | None:
    """Restore this rank's random streams; a note if they cannot continue. Local."""
    index = groups.dp.rank * groups.tp.size + groups.tp.rank
    # With equal tp and dp sizes rank k has the same role in both runs.
    same_ranks = all(checkpoint.layout.get(axis) == layout[axis] for axis in ("tp", "dp"))
    saved = checkpoint.rank_state(index) if same_ranks else None
    with reraise_as_corrupt(f"tag {checkpoint.tag}: file {rank_manifest_name(index)}: its random streams"):
        moved = saved and ("cuda" in saved["rng"]) != ("cuda" in capture_rng())
        if saved and not moved:
            restore_rng(saved["rng"])
            return None
    # Another layout has other streams: derive them from the seed and the step.
    model_parallel_cuda_manual_seed(seed + SEED_STRIDE * checkpoint.iteration, groups, vary_over_dp=True)
    if not checkpoint.rank_state(0):
        return " the checkpoint holds no random streams: they start from the seed"
    if saved:
        was, now = ("a GPU", "the CPU") if "cuda" in saved["rng"] else ("the CPU", "a GPU")
        return f" random streams start from the seed: saved on {was}, now on {now}, which draws other numbers"
    return f" random streams start from the seed: saved on {dict(checkpoint.layout)}, now {dict(layout)}"


# ---- hyper-parameters of the param groups ----------------------------------------------------------------------------

def hyper_parameters(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """The serializable ones of each group: numbers, strings, tensors, and lists or tuples of them."""
    return [{name: value for name, value in group.items() if name not in RUN_SPECIFIC_KEYS and _is_serializable(value)}
            for group in groups]


def check_param_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[ParamGroup], where: str) -> None:
    """Raise CheckpointError if the number of groups differs."""
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


# ---- 1-bit error feedback --------------------------------------------------------------------------------------------

#     worker_error    [dp ranks, ...shape of the parameter]: each rank writes its own, unsharded
#     server_error    [...shape of the parameter]: each server writes its chunk
#
# With the saved number of ranks each rank reads its own errors; with another number every rank takes the mean.

def error_feedback(engine: ZeroEngine) -> list[TensorSource]:
    """What a save holds of compressed gradients; nothing before they are compressed."""
    dp, tp, tensors = engine.groups.dp, engine.groups.tp, list[TensorSource]()
    for exchange in engine.compressed_exchanges:
        layout, mean = exchange.layout, exchange.one_bit_mean
        workers, servers = list[TensorSource](), list[TensorSource]()
        for slot in (slot for slot in layout.slots if slot.numel):
            # Element 0 of the slot, in the buffer of all ranks' errors and in this server's chunk.
            worker_start = slot.offset - dp.rank * slot.numel
            server_start = slot.offset - dp.rank * layout.shard_numel
            workers.append(TensorSource.of(
                WORKER_ERROR, slot.name, mean.worker_error.dtype,
                TPSlice(*_worker_error_shape(slot, dp.size), tp.rank, tp.size),
                partial(_elements, mean.worker_error, worker_start), DPSharding(0, slot.numel)))
            servers.append(TensorSource.of(
                SERVER_ERROR, slot.name, mean.server_error.dtype, TPSlice(slot.shape, slot.partition, tp.rank, tp.size),
                partial(_elements, mean.server_error, server_start), DPSharding(slot.offset, layout.shard_numel)))
        tensors += workers + servers
    return tensors


def _elements(flat: Tensor, start: int, offset: int, count: int) -> Tensor:
    return flat[start + offset : start + offset + count]


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
    expected = TPSlice(*_worker_error_shape(slot, 1), tp_size=engine.groups.tp.size).sharding.logical_shape
    if len(saved) != len(expected) or saved[1:] != expected[1:] or not saved[0]:
        raise CheckpointError(
            f"{checkpoint.label} is of another model: {WORKER_ERROR} {slot.name!r}: shape expected "
            f"[ranks, {', '.join(map(str, expected[1:]))}], found {list(saved)}")
    return saved[0]


def _worker_error_shape(slot: Slot, ranks: int) -> tuple[tuple[int, ...], Partition | None]:
    """Shape [ranks, ...parameter] and tensor parallel partition of one parameter's worker errors."""
    partition = slot.partition
    return (ranks, *slot.shape), partition and replace(partition, dim=partition.dim % len(slot.shape) + 1)
