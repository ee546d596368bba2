"""Saves an engine to a checkpoint and restores it; the model's weights as one state dict. File formats and commits are
in megatron/checkpoint.

    tensors    weights and optimizer state, as pieces of parameters
    shared     counters, loss scale, learning rate schedule, hyper-parameters, module buffers, the client state
    per rank   every random stream, restored if the layout is the same

On another layout random streams are derived from the seed and the step; all other state carries over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron.checkpoint.convert.external_checkpoint import ExternalCheckpoint, assert_same_weights
from megatron.checkpoint.file_formats import reraise_as_corrupt
from megatron.checkpoint.manifest import TensorEntry, rank_manifest_name
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.reshard import TPSlice, tp_sharding_of
from megatron.checkpoint.writer import LazyData, SavePlan, TensorPiece, agree
from megatron.distributed.collective_log import LOAD
from megatron.distributed.consistency import all_succeed_or_raise, assert_same_arguments
from megatron.distributed.rank_text import format_ranks, join_limited
from megatron.errors import CheckpointError, ConfigError
from megatron.zero.api.checkpoint_state import (
    SCHEDULED_HYPER_PARAMETERS, check_hyper_parameters, check_param_groups, error_feedback, hyper_parameters,
    load_error_feedback, restore_param_groups, saved_worker_ranks, tensor_entries)
from megatron.zero.api.init import GatheredParameters
from megatron.zero.api.model_checks import check_same_descriptions, describe_buffers
from megatron.zero.api.torch_interfaces import LRSchedulerProtocol
from megatron.zero.bucket import FlatBucket
from megatron.zero.compression import SERVER_ERROR, WORKER_ERROR
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import FlatLayout, Slot
from megatron.zero.state import broadcast_module_buffers
from mpu.collectives import all_gather
from mpu.groups import Group, Groups
from mpu.partition import join_local_slices, partition_of
from mpu.random import capture_rng, model_parallel_cuda_manual_seed, restore_rng

# Keys that `client_state` must not use: the engine's own, or DeepSpeed's names for them.
RESERVED_CLIENT_KEYS = frozenset({"module", "optimizer", "lr_scheduler", "buffers", "engine", "run_id", "client_state",
                                  "rng", "config", "layout", "global_steps", "skipped_steps", "global_samples",
                                  "micro_steps", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
                                  "buffer_names", "optimizer_state_dict", "param_shapes", "frozen_param_shapes"})

LOSS_SCALE_COUNTERS = ("loss_scale", "clean_steps", "hysteresis_left")  # specific to one precision

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


def plan_engine_save(engine: ZeroEngine, root: Path, tag: str, *, run_id: str, client_state: Mapping[str, Any],
                     scheduler: LRSchedulerProtocol | None, loop_state: Mapping[str, Any], optimizer: bool,
                     rng: bool, frozen: bool, **options: Any) -> SavePlan:
    """Plan the checkpoint `tag` under `root`, for the caller to finish; `options` are those of `agree`. The caller
    has checked the client state, and that every rank makes this call. Collective over the world."""
    all_succeed_or_raise(engine.check_before_save, engine.groups.world)
    kinds = ("weight", *(engine.rule.states if optimizer else ()))
    tp, dp = engine.groups.tp, engine.groups.dp
    # What all ranks together save. Replicas of an unsharded bucket divide the writing as if it were sharded.
    entries: list[TensorEntry] = []
    for bucket in (*engine.buckets, *(engine.frozen_buckets if frozen else ())):
        dtypes = dict.fromkeys(kinds if bucket.trainable else ("weight",), bucket.master_state.dtype)
        entries += tensor_entries(FlatLayout(bucket.layout.slots, dp.size), dtypes, tp.size)
    # What this rank writes of it.
    pieces: list[TensorPiece] = []
    for slot, offset, segment in engine.state.segments_to_save(kinds, frozen):
        # An offloaded segment is read when its file is written.
        data = segment.fetch() if segment.shard.is_on_device else LazyData(segment.count, segment.shard.dtype,
                                                                           segment.fetch)
        local = TPSlice(slot.shape, slot.partition, tp.rank, tp.size)
        pieces.append(TensorPiece(slot.name, segment.kind, local, offset, data))
    if optimizer and engine.compressed_exchanges:
        more_entries, more_pieces = error_feedback(engine)
        entries, pieces = entries + more_entries, pieces + more_pieces
    shared = {
        "run_id": run_id,
        "engine": engine.scalar_state(),
        "optimizer": engine.rule.name,
        "owed": [WORKER_ERROR, SERVER_ERROR] if optimizer and engine.compressed_exchanges else [],
        "param_groups": hyper_parameters(engine.param_groups),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "buffers": {name: buffer.detach().cpu() for name, buffer in engine.module.named_buffers()},
        "tied": tied_tensor_names(engine.module, (*engine.buckets, *engine.frozen_buckets)),
        "loop": dict(loop_state),
        "client_state": dict(client_state)}
    return agree(root, tag, pieces=pieces, tensors=entries, place=dp.rank * tp.size + tp.rank,
                 rank_state={"rng": capture_rng()} if rng else {}, shared_state=shared, world=engine.groups.world,
                 run_id=run_id, iteration=engine.state.counters.global_steps, **options)


def tied_tensor_names(module: nn.Module, buckets: Iterable[FlatBucket]) -> dict[str, str]:
    """Name of each tied parameter or buffer -> the name under which its tensor is saved."""
    saved = {id(buffer): name for name, buffer in module.named_buffers()}
    saved |= {id(parameter): slot.name for bucket in buckets
              for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True)}
    named = {name: id(tensor) for name, tensor in (*module.named_parameters(remove_duplicate=False),
                                                   *module.named_buffers(remove_duplicate=False))}
    return {name: saved[key] for name, key in named.items() if saved.get(key, name) != name}


def load_engine(engine: ZeroEngine, checkpoint: Checkpoint, scheduler: LRSchedulerProtocol | None,
                options: LoadOptions) -> None:
    """Restore everything but the random streams from an open checkpoint. `counters` includes the schedule, and the loss
    scale unless that is off. Mismatches raise before anything changes."""
    all_succeed_or_raise(engine.check_before_load, engine.groups.world)
    optimizer, shared = options.optimizer and bool(engine.buckets), checkpoint.shared_state
    where = checkpoint.shared_label
    if options.counters and not shared["engine"]:
        raise CheckpointError(f"{checkpoint.label} holds imported weights, not a run: load them with "
                              "load_module_only=True, or --finetune")
    _check_model(engine, checkpoint, options.strict, optimizer)
    param_groups = _param_groups_to_restore(shared, scheduler, options) if engine.buckets else None
    if param_groups is not None:
        check_param_groups(param_groups, engine.param_groups, checkpoint.label)
        check_hyper_parameters(param_groups, engine.param_groups, where)
    kinds = ("weight", *(engine.rule.states if optimizer else ()))
    known = {kind: frozenset(checkpoint.names(kind)) for kind in kinds}  # not strict: missing tensors keep their values
    engine.load_segments(known, partial(_read_segment, engine, checkpoint))
    for name, buffer in engine.module.named_buffers():
        if name in shared["buffers"]:
            buffer.copy_(shared["buffers"][name])
    # After the tensors: the rule's scalars decide whether gradients are compressed, and with MoQ round the weights.
    if options.counters:
        own = ({} if options.loss_scale
               else {key: value for key, value in engine.scalar_state().items() if key in LOSS_SCALE_COUNTERS})
        with reraise_as_corrupt(f"{where}: field 'engine'"):
            engine.restore_scalar_state({**shared["engine"], **own})
    if not optimizer:
        all_succeed_or_raise(engine.reset_optimizer_state, engine.groups.world)
    elif engine.compressed_exchanges:
        all_succeed_or_raise(lambda: load_error_feedback(engine, checkpoint), engine.groups.world)
    if param_groups is not None:
        restore_param_groups(engine.param_groups, param_groups)
    if options.counters and options.scheduler and scheduler is not None and shared["lr_scheduler"] is not None:
        with reraise_as_corrupt(f"{where}: field 'lr_scheduler'"):
            scheduler.load_state_dict(shared["lr_scheduler"])  # ours also set the param groups' rates


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
    all_succeed_or_raise(engine.check_before_load, engine.groups.world)
    engine.load_segments({"weight": checkpoint.shapes}, partial(_read_segment, engine, checkpoint))


def _read_segment(engine: ZeroEngine, checkpoint: Checkpoint | ExternalCheckpoint, kind: str, slot: Slot,
                  offset: int, out: Tensor) -> None:
    """out <- this rank's segment of a parameter, from any saved layout or format."""
    tp = engine.groups.tp
    checkpoint.read_slice(kind, slot.name, TPSlice(slot.shape, slot.partition, tp.rank, tp.size), offset, out)


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
    model, saved = {slot.name for slot, _ in slots}, set(checkpoint.names("weight"))
    for what, names in (("not in the checkpoint", model - saved), ("not in the model", saved - model)):
        if names and strict:
            raise CheckpointError(f"{where} is of another model: {len(names)} parameters are {what}, {min(names)} "
                                  "first; give the model it was saved from")
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # (what, in the model, in the checkpoint)
    shapes = [(f"buffer {name!r}", buffer.shape, checkpoint.shared_state["buffers"].get(name, buffer).shape)
              for name, buffer in engine.module.named_buffers()]
    for slot, is_trainable in slots:
        expected = tp_sharding_of(slot.shape, slot.partition, engine.groups.tp.size).logical_shape
        for kind in ("weight", *(states if strict and is_trainable else ())):
            if (kind, slot.name) in checkpoint.tensors:
                shapes.append((f"{kind} {slot.name!r}", expected, checkpoint.shape(kind, slot.name)))
            elif kind != "weight":  # weights may be missing if it is not strict
                raise CheckpointError(f"{where} holds no {kind} of {slot.name!r}: it was frozen then; "
                                      "load_optimizer_states=False starts the optimizer from scratch")
        if optimizer and is_trainable and slot.numel and (WORKER_ERROR, slot.name) in checkpoint.tensors:
            saved_worker_ranks(engine, checkpoint, slot)  # raises for another shape
    for what, expected, found in shapes:
        if found != expected:
            raise CheckpointError(f"{where} is of another model: {what}: shape expected {list(expected)}, found "
                                  f"{list(found)}")


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


def gather_full_state_dict(engine: ZeroEngine, frozen: bool = True) -> dict[str, Tensor]:
    """The model's state dict in the working precision, tensor parallel slices joined, on the host of world rank 0
    (empty on the others). Collective; one bucket is gathered at a time. The caller has checked that arguments are
    equal."""
    all_succeed_or_raise(engine.check_before_save, engine.groups.world)
    collects, tp = engine.groups.world.rank == 0, engine.groups.tp
    collected: dict[int, Tensor] = {}
    for bucket in (*engine.buckets, *engine.frozen_buckets):
        try:
            bucket.gather_for_user()
            for parameter in bucket.parameters:
                value, partition = parameter.detach(), partition_of(parameter)
                if partition is not None:
                    slices = [value] if tp.is_solo else list(all_gather(value.unsqueeze(0), tp, dim=0))
                    value = join_local_slices(slices, partition)
                    if partition.size is not None:  # without padding
                        value = value.narrow(partition.dim, 0, partition.size)
                if collects and (frozen or bucket.trainable):
                    collected[id(parameter)] = value.to("cpu", copy=True).contiguous()
        except BaseException:  # an interrupt or an OOM error: reshard without communication
            bucket.cancel_user_gather()
            raise
        bucket.reshard_after_user(None)
    for tensor in engine.module.buffers() if collects else ():
        collected[id(tensor)] = tensor.detach().cpu()
    names = engine.module.state_dict(keep_vars=True)
    return {name: collected[id(tensor)] for name, tensor in names.items() if id(tensor) in collected}


def write_state_dict(state_dict: Mapping[str, Tensor], path: Path) -> None:
    """Write one file: safetensors if its name ends so (a tied tensor once per name), otherwise torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state_dict.items()}, path)
    else:
        torch.save(dict(state_dict), path)


def load_module_weights(engine: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """Load data parallel rank 0's weights and buffers by name, into the model and the masters. Collective, one bucket
    at a time; mismatches raise on every rank before anything changes."""
    provides_values = engine.groups.dp.rank == 0
    buckets = [*engine.buckets, *engine.frozen_buckets]

    def check() -> None:
        for bucket in buckets:
            bucket.check_before_user_gather()
        if provides_values:
            _check_state_dict(engine, state, strict)

    engine.assert_collective_call(LOAD)
    assert_same_arguments("load_module_state_dict", {"strict": strict}, engine.groups.world)
    check_same_descriptions(describe_buffers(engine.module), engine.groups.world,  # they may be newer than the engine
                            "the ranks call load_module_state_dict with different buffers")
    all_succeed_or_raise(check, engine.groups.world)
    named: dict[str, Any] = engine.module.state_dict(keep_vars=True)
    new = {id(tensor): state[name] for name, tensor in named.items() if provides_values and name in state}
    with engine.state.guard_state_change("load of weights"):
        for bucket in buckets:
            with GatheredParameters(bucket.parameters, modifier_rank=0):
                for parameter in bucket.parameters:
                    if (value := new.get(id(parameter))) is not None:
                        parameter.copy_(value)
    with torch.no_grad():
        for buffer in engine.module.buffers():
            if (value := new.get(id(buffer))) is not None:
                buffer.copy_(value)
    broadcast_module_buffers(engine.module, engine.groups)


def _check_state_dict(engine: ZeroEngine, state: Mapping[str, Any], strict: bool) -> None:
    """torch's checks of a state dict, before anything is written."""
    named: dict[str, Any] = engine.module.state_dict(keep_vars=True)
    if named and not state:
        raise ConfigError("load_state_dict was given an empty state dict on the first data parallel rank (tensor "
                          f"parallel rank {engine.groups.tp.rank}), whose weights count: give it the weights of its "
                          "part of the model, or use save_checkpoint and load_checkpoint")
    for what, names in (("missing", named.keys() - state.keys()), ("not the model's", state.keys() - named.keys())):
        if names and strict:
            raise ConfigError(f"load_state_dict: {len(names)} names are {what}, {min(names)} first; give the state "
                              "dict of this model, or strict=False")
    for name in named.keys() & state.keys():
        current, given = named[name], state[name]
        if not isinstance(current, Tensor):  # from get_extra_state()
            raise ConfigError(f"load_state_dict: {name} is not a tensor, and only tensors are loaded: give it to "
                              "set_extra_state() of its module, and leave it out, with strict=False")
        if not isinstance(given, Tensor) or given.shape != current.shape:
            found = f"shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise ConfigError(f"load_state_dict: {name} has {found} in the state dict, and shape "
                              f"{list(current.shape)} in the model")
