"""Checkpoints of sharded models: each rank's segments, in the engine's format (megatron/checkpoint).

    save_checkpoint(model, optimizer, folder, scheduler=..., client_state={...})
    client_state = load_checkpoint(model, optimizer, folder, scheduler=...)

Any number of ranks can load them, as can the engine of `zero.initialize` and `python -m megatron.checkpoint`;
checkpoints of the engine load here. Nothing is gathered. Random streams continue if the number of ranks is the same.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.checkpoint.commit import Keep, check_save_root_is_writable
from megatron.checkpoint.manifest import Lineage, tag_of_iteration
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.reshard import DPSharding, TPSlice
from megatron.checkpoint.writer import TensorSource, save
from megatron.distributed.consistency import all_succeed_or_raise, on_rank_0
from megatron.errors import CheckpointError, ConfigError
from megatron.fsdp.root import FSDPRoot
from megatron.fsdp.sharded_tensor import LocalParam, local_params, local_tensor, make_segment
from megatron.fsdp.sharding import require_fsdp_state, unwrap
from megatron.fsdp.state_dict import (OptimState, buffers_in_own_dtype, is_sharded_state, params_of,
                                      prepare_all_ranks)
from megatron.zero.api.checkpoint_io import (check_client_state, check_model, check_param_groups, check_shared_state,
                                             hyper_parameters, load_buffers, restore_param_groups, tied_tensor_names)
from megatron.zero.bucket import FlatBucket
from megatron.zero.offload.storage import WEIGHT
from megatron.zero.state import persistent_buffers
from mpu.collectives import broadcast_json
from mpu.random import capture_rng, restore_rng


def save_checkpoint(model: nn.Module, optimizer: Optimizer, save_dir: str | os.PathLike[str],
                    tag: str | int | None = None, *, scheduler: Any = None,
                    client_state: Mapping[str, Any] | None = None, keep: Keep = Keep()) -> str:
    """Save everything a resumed run needs; returns the tag, `global_step<N>` unless given. Collective."""
    root = _prepare(model, "save_checkpoint()")
    folder, (kinds, numbers) = Path(save_dir), _split_state(optimizer, root.trained)
    steps = max((int(values.get("step", 0)) for values in numbers.values()), default=root.steps)
    name = tag_of_iteration(steps) if tag is None else str(tag)
    all_succeed_or_raise(lambda: check_client_state(client_state or {}), root.dp)
    on_rank_0(lambda: check_save_root_is_writable(folder, "save_dir"), root.dp)
    with buffers_in_own_dtype(root.module):
        buffers = {bare: buffer.detach().cpu() for bare, buffer in persistent_buffers(root.module).items()}
    # the scalar state of each parameter, unless all share one step count
    has_one_step_count = (len(numbers) == sum(len(bucket.parameters) for bucket in root.trained)
                          and all(values == {"step": steps} for values in numbers.values()))
    shared = {
        "run_id": broadcast_json(secrets.token_hex(8), root.dp),
        "engine": {"global_steps": steps, "skipped_steps": 0, "micro_steps": steps, "optimizer_steps": steps,
                   "rule": {} if has_one_step_count or not numbers else {"parameters": dict(numbers)},
                   **root.loss_scaler.state_dict()},
        "optimizer": type(optimizer).__name__,
        "param_groups": hyper_parameters(optimizer.param_groups),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "buffers": buffers,
        "tied": tied_tensor_names(root.module, root.buckets),
        "loop": {},
        "client_state": dict(client_state or {})}
    save(folder, name, world=root.dp, tensors=_tensor_sources(optimizer, root, kinds), shared_state=shared,
         rank_state={"rng": capture_rng()}, config={"fsdp": True}, run_id=shared["run_id"], iteration=steps, keep=keep,
         layout={"tp": 1, "dp": root.dp.size, "zero_stage": 3}, lineage=root.lineage)
    return name


def load_checkpoint(model: nn.Module, optimizer: Optimizer | None, load_dir: str | os.PathLike[str],
                    tag: str | int | None = None, *, scheduler: Any = None) -> dict[str, Any]:
    """Load the checkpoint `tag`, or the one named by `latest`, into the model and, if given, the optimizer and
    scheduler; returns its client_state. Collective."""
    root = _prepare(model, "load_checkpoint()")
    found = open_checkpoint(Path(load_dir), None if tag is None else str(tag), world=root.dp)
    all_succeed_or_raise(lambda: check_shared_state(found), root.dp)
    all_succeed_or_raise(lambda: _check_compatible(found, root, optimizer), root.dp)
    all_succeed_or_raise(lambda: [_read_bucket(found, bucket, WEIGHT, bucket.master_state.view(WEIGHT))
                                  for bucket in root.buckets], root.dp)
    root.apply_master_edits()
    root.lineage = Lineage(found.manifest)
    load_buffers(root.module, found)
    if optimizer is not None:
        _load_optimizer(found, root, optimizer)
    if scheduler is not None and found.shared_state["lr_scheduler"] is not None:
        scheduler.load_state_dict(found.shared_state["lr_scheduler"])
    if found.shared_state["engine"]:
        root.loss_scaler.load_state_dict(found.shared_state["engine"])
    is_same_layout = all(found.layout.get(axis) == size for axis, size in (("tp", 1), ("dp", root.dp.size)))
    saved = (found.rank_state(root.dp.rank) if is_same_layout else None) or {}
    if "rng" in saved and ("cuda" in saved["rng"]) == ("cuda" in capture_rng()):
        restore_rng(saved["rng"])
    state: dict[str, Any] = found.shared_state["client_state"]
    return state


def _prepare(model: nn.Module, what: str) -> FSDPRoot:
    module = unwrap(model)
    root = require_fsdp_state(module).root
    if root.module is not module:
        raise ConfigError(f"{what} is for the outermost sharded module")
    prepare_all_ranks(module, what)
    return root


# ---- what is written ---------------------------------------------------------------------------------------------


def _split_state(optimizer: Optimizer, buckets: Iterable[FlatBucket]) -> tuple[list[str], dict[str, OptimState]]:
    """(the kinds of state with a value for each element, by parameter name the state that is one number)."""
    kinds, numbers = dict[str, None](), dict[str, OptimState]()
    for bucket in buckets:
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            for kind, value in optimizer.state.get(parameter, {}).items():
                own = numbers.setdefault(slot.name, {})
                if is_sharded_state(parameter, kind, value):
                    kinds[kind] = None
                elif value is not None:
                    own[kind] = value.item() if isinstance(value, Tensor) else value
    return list(kinds), numbers


def _tensor_sources(optimizer: Optimizer, root: FSDPRoot, kinds: list[str]) -> Iterator[TensorSource]:
    """Weights and sharded optimizer state of all parameters."""
    def load(bucket: FlatBucket, one: LocalParam, kind: str, offset: int, count: int) -> Tensor:
        if kind == WEIGHT:
            return bucket.master_state.view(WEIGHT)[one.range]
        state = optimizer.state.get(one.parameter, {})
        return local_tensor(state[kind]) if kind in state else torch.zeros(  # before its first step
            count, dtype=_state_dtype(optimizer, bucket, kind))

    for bucket in root.buckets:
        for one, kind in product(local_params(bucket), (WEIGHT, *(kinds if bucket.trainable else ()))):
            dtype = bucket.master_state.dtype if kind == WEIGHT else _state_dtype(optimizer, bucket, kind)
            yield TensorSource.of(kind, one.slot.name, dtype, TPSlice(one.slot.shape, one.slot.partition),
                                  partial(load, bucket, one, kind),
                                  DPSharding(one.slot.offset, bucket.layout.shard_numel))


def _state_dtype(optimizer: Optimizer, bucket: FlatBucket, kind: str) -> torch.dtype:
    """The dtype of a kind of state, equal on all ranks."""
    found = (optimizer.state.get(parameter, {}).get(kind) for parameter in bucket.parameters)
    return next((local_tensor(value).dtype for value in found if value is not None), bucket.master_state.dtype)


# ---- what is read ------------------------------------------------------------------------------------------------


def _check_compatible(found: Checkpoint, root: FSDPRoot, optimizer: Optimizer | None) -> None:
    check_model(root.module, [slot for bucket in root.buckets for slot in bucket.layout.slots], found)
    if optimizer is not None:
        kind = found.shared_state["optimizer"]
        if kind != type(optimizer).__name__:
            raise CheckpointError(f"{found.label} holds the optimizer state of {kind}, not of "
                                  f"{type(optimizer).__name__}; give optimizer=None to load the weights alone")
        check_param_groups(found.shared_state.get("param_groups", ()), optimizer.param_groups, found.label)


def _read_bucket(found: Checkpoint, bucket: FlatBucket, kind: str, out: Tensor) -> Tensor:
    """Read this rank's shard of one kind into `out`, and return it."""
    for _, slot, here, offset in local_params(bucket):
        if here.start < here.stop:
            found.read_slice(kind, slot.name, TPSlice(slot.shape, slot.partition), offset, out[here])
    return out


def _load_optimizer(found: Checkpoint, root: FSDPRoot, optimizer: Optimizer) -> None:
    engine = found.shared_state["engine"]
    scalars_by_param = engine.get("rule", {}).get("parameters", {})
    number = {id(one): index for index, one in enumerate(params_of(optimizer))}
    state: dict[int, OptimState] = {}
    kinds = [kind for kind in found.kinds if kind != WEIGHT]
    # in the masters' dtype, as torch's optimizers keep state in the parameter's
    shards = all_succeed_or_raise(lambda: [
        {kind: _read_bucket(found, bucket, kind, torch.zeros(
            bucket.layout.shard_numel, dtype=bucket.master_state.dtype, device=bucket.update_device)) for kind in kinds}
        for bucket in root.trained], root.dp)
    for bucket, flats in zip(root.trained, shards, strict=True):
        for one in local_params(bucket):
            counts = (scalars_by_param.get(one.slot.name) if scalars_by_param
                      else {"step": float(engine.get("optimizer_steps", 0))})
            if id(one.parameter) in number and counts is not None and kinds:
                state[number[id(one.parameter)]] = {
                    **{name: torch.tensor(value) if name == "step" else value for name, value in counts.items()},
                    **{kind: make_segment(flat[one.range].clone(), one.location) for kind, flat in flats.items()}}
    restore_param_groups(optimizer.param_groups, found.shared_state.get("param_groups", ()))
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
