"""Where the state of an engine is stored (device, host, NVMe), and whether the host or the device updates it.

A host update moves 16-bit gradients down and 16-bit weights up, 2 bytes each way; a device update moves all fp32 state,
12 bytes each way. Which is faster depends on cores, memory and bus, so both are timed on a small shard, on all ranks at
once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megatron import host_memory
from megatron.config.tree import Config, OffloadConfig, flag_name
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.distributed.process_group import read_environment
from megatron.errors import ConfigError
from megatron.optim.adam import MAX_TILE_NUMEL, AdamW
from megatron.optim.rule import StepScalars, UpdateRule, UpdateSegment
from megatron.zero.flat_buffers import DTYPES
from megatron.zero.layout import align
from megatron.zero.offload.chunk_sizes import (HOST_CHUNK_NUMEL, STEP_BUFFER_SETS, OffloadRatio, param_chunks,
                                               step_chunk_numel)
from megatron.zero.offload.copy_streams import CopyStreams, StagingDoubleBuffer, create_copy_streams
from megatron.zero.offload.direct_io import page_aligned_zeros
from megatron.zero.offload.nvme import NvmeSettings, NvmeStorage
from megatron.zero.offload.storage import (WEIGHT, DeviceStorage, EngineStorage, HostShard, HostStorage, Location,
                                           StorageBackend, StreamingHostStorage)
from megatron.zero.offload.swap_drive import AioSettings, SwapDrive, probe_drive
from megatron.zero.partitioned_param import full_shape
from megatron.zero.stages import gradient_precisions, stage_policy
from mpu.collectives import all_reduce_scalar
from mpu.groups import Group, Groups

UpdateSide = Literal["host", "device"]

TRIAL_CHUNKS = 4  # chunks of the shard that is timed
TRIAL_SECONDS = 0.4  # duration of the trial for each side
# The buffers of a device update may use at most this fraction (1/4) of free device memory.
DEVICE_MEMORY_DIVISOR = 4


def choose_update_side(config: Config, rule: UpdateRule, model: nn.Module, device: torch.device, groups: Groups,
                       copy_streams: CopyStreams | None) -> tuple[UpdateSide, list[str]]:
    """The side, and notes that give the reason if there was a choice. Collective: all ranks choose the same."""
    offload = config.offload
    if copy_streams is None or offload.offload_optimizer_device == "none" or offload.offload_update == "device":
        return "device", []
    if device.type == "cuda":
        set_cpu_threads()
    threads = f"{torch.get_num_threads()} threads"
    if offload.delayed_param_update and rule.elementwise and offload.offload_optimizer_device == "cpu":
        return "host", [f" offload: the host updates a step behind, with {threads} a rank"]
    if offload.offload_update == "host" or offload.offload_optimizer_device == "nvme":
        return "host", [f" offload: the host updates, with {threads} a rank"]
    if device.type != "cuda" or not isinstance(rule, AdamW):
        return "host", [f" offload: the host updates, with {threads} a rank: only Adam is tried on both sides"]
    numel = int(sum(full_shape(parameter).numel() for parameter in model.parameters()) / groups.dp.size
                * offload.offload_optimizer_ratio)
    on_host, on_device = (numel * seconds for seconds in time_both_sides(
        rule, device, copy_streams, DTYPES[config.precision.name], groups.world,
        pinned=offload.offload_optimizer_pin_memory))
    sums = gradient_precisions(stage_policy(config.zero.zero_stage), config.precision,
                               config.accumulation(groups.dp.size))[1]
    # a device update needs the sums of the gradients, and the chunk buffers
    needed = numel * DTYPES[sums].itemsize + STEP_BUFFER_SETS * 3 * 4 * HOST_CHUNK_NUMEL
    fits = all_reduce_scalar(needed * DEVICE_MEMORY_DIVISOR <= torch.cuda.mem_get_info(device)[0], groups.world, "min")
    side: UpdateSide = "device" if on_device < on_host and fits else "host"
    why = "" if fits or on_device >= on_host else f", which would keep {needed / 2**30:.1f} GiB there"
    return side, [f" offload: the {side} updates; a step's update takes about {on_host:.2f} s by the host with "
                  f"{threads} a rank, {on_device:.2f} s on the device{why} (--offload-update)"]


def set_cpu_threads() -> None:
    """Divide the cores equally among the ranks of a node, as launchers set one thread each. OMP_NUM_THREADS above 1
    wins."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = read_environment().local_world_size
        is_bound = cores * ranks <= (os.cpu_count() or 1)  # the ranks are already bound to disjoint cores
        torch.set_num_threads(cores if is_bound else max(1, cores // ranks))


def time_both_sides(rule: AdamW, device: torch.device, copy_streams: CopyStreams, work: torch.dtype, world: Group, *,
                    pinned: bool, chunk: int = HOST_CHUNK_NUMEL) -> tuple[float, float]:
    """Seconds per element of an update by the host and on the device, on the slowest rank. Collective: all ranks run at
    once, as in training."""
    host = HostStorage(torch.float32, chunk, pinned=pinned)
    shard = host.allocate_shard("trial", chunk * TRIAL_CHUNKS)
    shard.add_kinds(rule.states)
    on_device = torch.zeros(chunk, dtype=work, device=device)
    seconds = []
    for storage, update_device in ((host, torch.device("cpu")),
                                   (StreamingHostStorage(torch.float32, chunk, copy_streams, device, pinned=pinned),
                                    device)):
        rule.bind_device(update_device, world)
        run_step = partial(_run_trial_step, update_device, rule, storage, shard, copy_streams, on_device, pinned)
        run_step()  # to warm up
        best, end = float("inf"), time.monotonic() + TRIAL_SECONDS
        while best == float("inf") or time.monotonic() < end:
            start = time.monotonic()
            run_step()
            best = min(best, time.monotonic() - start)
        seconds.append(all_reduce_scalar(best, world, "max") / shard.numel)
    return seconds[0], seconds[1]


def _run_trial_step(update_device: torch.device, rule: AdamW, storage: StorageBackend, shard: HostShard,
                    copy_streams: CopyStreams, on_device: Tensor, pinned: bool) -> None:
    """One update of all chunks, including the copy of new weights to the device, but not that of gradients to the host:
    in training that one overlaps backward."""
    on_host = storage.update_location is Location.HOST
    grads = page_aligned_zeros(len(on_device), on_device.dtype, pinned=pinned) if on_host else on_device
    staging = StagingDoubleBuffer(len(on_device) if on_host else 0, on_device.dtype, None, pinned=pinned)
    at = StepScalars.for_applied_step(0.5, 1, update_device)
    for tensors, in storage.iter_chunks([(shard, chunk)] for chunk in shard.chunks):
        lp_out = staging.acquire(len(on_device)) if on_host else on_device
        states = {kind: tensors[kind] for kind in rule.states}
        segment = UpdateSegment(0, tensors[WEIGHT], grads, states, (), 1, lambda sums: sums, lp_out)
        if not rule.step([segment], {"lr": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}, at):
            lp_out.copy_(tensors[WEIGHT])
        if on_host:
            staging.mark_sent(last := copy_streams.to_device.copy(on_device, lp_out))
    if on_host:
        last.wait_on_host()
    shard.wait_for_pending()


def create_engine_storage(config: Config, rule: UpdateRule, model: nn.Module, device: torch.device, groups: Groups,
                          ) -> tuple[EngineStorage, list[str]]:
    """The storage, and notes for the user. Collective: an error of one rank is raised on all."""
    offload = config.offload
    places = offload.offload_optimizer_device, offload.offload_param_device
    copy_streams = create_copy_streams(device) if places != ("none", "none") else None
    if copy_streams is not None:
        all_succeed_or_raise(lambda: check_host_memory(config, rule, model, groups.dp.size), groups.world)
    update, notes = choose_update_side(config, rule, model, device, groups, copy_streams)
    if "nvme" not in places:
        return _create_storage(config, rule, device, {}, copy_streams, update), notes
    drives = all_succeed_or_raise(lambda: open_drives(config), groups.world)
    notes += all_succeed_or_raise(lambda: probe_drives(config, rule, model, groups.dp.size, drives), groups.world)
    return _create_storage(config, rule, device, drives, copy_streams, update), notes


def _create_storage(config: Config, rule: UpdateRule, device: torch.device, drives: Mapping[str, SwapDrive],
                    copy_streams: CopyStreams | None, update: UpdateSide) -> EngineStorage:
    offload, work = config.offload, DTYPES[config.precision.name]
    pins_optimizer = device.type == "cuda" and offload.offload_optimizer_pin_memory
    pins_params = device.type == "cuda" and offload.offload_param_pin_memory
    nvme_settings = partial(NvmeSettings, device_is_separate=copy_streams is not None)

    place = offload.offload_optimizer_device
    if copy_streams is None and place == "cpu":
        place = "none"  # the device is the host
    step_chunk = step_chunk_numel(place, min(MAX_TILE_NUMEL, align(config.zero.sub_group_size)),
                                  offload.offload_optimizer_buffer_count, 1 + len(rule.states))
    update_chunk = (step_chunk or 0) if rule.elementwise else 0
    optimizer: StorageBackend = DeviceStorage(device)
    if place == "nvme":
        optimizer = NvmeStorage(drives["optimizer"], "optimizer", rule.states, nvme_settings(
            chunk_numel=update_chunk, buffer_sets=STEP_BUFFER_SETS, pinned=pins_optimizer,
            pipeline_read=offload.offload_optimizer_pipeline_read,
            pipeline_write=offload.offload_optimizer_pipeline_write))
    elif place == "cpu" and copy_streams is not None:
        optimizer = (HostStorage(torch.float32, update_chunk, pinned=pins_optimizer) if update == "host" else
                     StreamingHostStorage(torch.float32, update_chunk, copy_streams, device, pinned=pins_optimizer))

    params: StorageBackend = DeviceStorage(device, work)
    if offload.offload_param_device == "nvme":
        chunk, sets = param_chunks(offload.offload_param_buffer_size, offload.offload_param_buffer_count, step_chunk)
        params = NvmeStorage(drives["param"], "param", (), nvme_settings(
            chunk_numel=chunk, write_chunk_numel=step_chunk, buffer_sets=sets,
            dtype=work, host_numel=offload.offload_param_max_in_cpu, pinned=pins_params))
    elif offload.offload_param_device == "cpu" and copy_streams is not None:
        params = HostStorage(work, 0, pinned=pins_params)

    delays = offload.delayed_param_update and type(optimizer) is HostStorage and rule.elementwise
    splits = optimizer.location is not Location.DEVICE and offload.offload_optimizer_ratio < 1
    return EngineStorage(optimizer, params, copy_streams, pins_optimizer, delays,
                         DeviceStorage(device) if splits else None, OffloadRatio(offload.offload_optimizer_ratio))


def check_host_memory(config: Config, rule: UpdateRule, model: nn.Module, dp_size: int) -> None:
    """Raise ConfigError if this node's share of the state offloaded to the host exceeds the available memory (if it is
    known): the kernel's OOM killer would end a process without a message."""
    offload, work = config.offload, DTYPES[config.precision.name].itemsize
    share = offload.offload_optimizer_ratio * (offload.offload_optimizer_device == "cpu")
    each = share * (4 * (1 + len(rule.states)) + work)
    each += work * (offload.offload_param_device == "cpu")
    shards = config.zero.shard_ranks(dp_size)
    numel = -(-sum(full_shape(parameter).numel() for parameter in model.parameters()) // shards)
    available, ranks = host_memory.available_bytes(), read_environment().local_world_size
    needed = int(each * numel) * ranks
    if available is not None and needed > available:
        flags = " ".join(f"{flag_name(name)} cpu" for name in ("offload_optimizer_device", "offload_param_device")
                         if getattr(offload, name) == "cpu")
        raise ConfigError(f"{flags}: the {ranks} ranks of this node keep {needed / 2**30:.1f} GiB on the host, and "
                          f"{host_memory.describe_owner('it')} has {available / 2**30:.1f} GiB available: use more "
                          "nodes, or --offload-optimizer-device nvme")


def offload_notes(config: Config, storage: EngineStorage, *, params_are_sharded: bool) -> list[str]:
    """After the engine is built: the achieved offload ratio, and a note for each setting that has no or less effect
    here. `params_are_sharded`: the engine has sharded parameters."""
    offload, device_is_host = config.offload, storage.copy_streams is None
    names = [name for name in ("offload_optimizer_device", "offload_param_device") if getattr(offload, name) == "cpu"]
    if "offload_optimizer_device" in names:
        names += [name for name in ("offload_update", "offload_optimizer_ratio")
                  if getattr(offload, name) != getattr(OffloadConfig, name)]
    notes = [f" note: {flag_name(name)} {getattr(offload, name)} has no effect here: the device is the host"
             for name in names if device_is_host]
    if storage.device_optimizer is not None:
        notes.append(f" offload: {storage.offload_ratio.achieved:.2f} of the optimizer's state leaves the device, by "
                     f"whole blocks (--offload-optimizer-ratio {offload.offload_optimizer_ratio})")
    if offload.offload_optimizer_device == "cpu" and offload.delayed_param_update and not storage.delays_update:
        notes.append(" note: --delayed-param-update has no effect here: it is for Adam and its like with "
                     "--offload-optimizer-device cpu of a GPU, updated by the host")
    place = offload.offload_param_device
    if place != "none" and not params_are_sharded and not (place == "cpu" and device_is_host):
        notes.append(f" note: --offload-param-device {place} has no effect here: every parameter is smaller than "
                     f"--stage3-param-persistence-threshold {config.zero.stage3_param_persistence_threshold}, and "
                     "stays whole")
    elif isinstance(storage.params, NvmeStorage) and not storage.params.has_nvme_shards:
        notes.append(f" note: all weights of a rank are within --offload-param-max-in-cpu "
                     f"{offload.offload_param_max_in_cpu}, and stay on the host")
    if storage.has_offloaded_state and config.save.async_save:
        notes.append(" note: --async-save has no effect here: state that is offloaded is not copied, and saved at once")
    return notes


def open_drives(config: Config) -> dict[str, SwapDrive]:
    """Kind of state ("optimizer" or "param") -> its drive on this rank, one for each path."""
    offload = config.offload
    aio = AioSettings(**{name: getattr(offload, f"aio_{name}") for name in AioSettings.__dataclass_fields__})
    by_path: dict[str, SwapDrive] = {}
    drives = {}
    for kind in ("optimizer", "param"):
        if getattr(offload, f"offload_{kind}_device") == "nvme":
            name = f"offload_{kind}_nvme_path"
            path: str = getattr(offload, name)
            drives[kind] = by_path[path] = by_path.get(path) or SwapDrive(path, flag=flag_name(name), aio=aio)
    return drives


def probe_drives(config: Config, rule: UpdateRule, model: nn.Module, dp_size: int, drives: Mapping[str, SwapDrive],
                 ) -> list[str]:
    """One line per drive with the expected load of this node's ranks, measured by local rank 0; empty on the others.
    Ignores padding, and that the offload ratio applies to whole buckets."""
    env = read_environment()
    if env.local_rank != 0:
        return []
    sizes = [full_shape(parameter).numel() for parameter in model.parameters()]
    shards = config.zero.shard_ranks(dp_size)
    state = int(4 * -(-sum(sizes) // shards) * (1 + len(rule.states)) * config.offload.offload_optimizer_ratio)
    sharded = -(-sum(size for size in sizes if size >= config.zero.stage3_param_persistence_threshold) // shards)
    weights = max(0, sharded - config.offload.offload_param_max_in_cpu) * DTYPES[config.precision.name].itemsize
    state, weights = env.local_world_size * state, env.local_world_size * weights
    loads = {"optimizer": ("optimizer state", state, state, state),
             "param": ("weights", weights, 2 * weights * config.accumulation(dp_size), weights)}
    lines = []
    for drive in dict.fromkeys(drives.values()):
        names, *nbytes = zip(*(loads[kind] for kind in drives if drives[kind] is drive))
        contents = " and ".join(name for name, stored in zip(names, nbytes[0]) if stored)
        lines.append(probe_drive(drive, contents, *map(sum, nbytes)))
    return lines
