"""Where the state of an engine is stored (device, host, NVMe), and whether the host or the device updates it.

A host update moves 16-bit gradients down and 16-bit weights up, 2 bytes each way; a device update moves all fp32 state,
12 bytes each way. Which is faster depends on cores, memory and bus, so both are timed on a small shard, on all ranks at
once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from megatron.config.tree import Config, OffloadConfig, flag_name
from megatron.config.zero_config import unused_offload_settings
from megatron.distributed import exit_codes
from megatron.distributed.consistency import all_succeed_or_raise, all_succeed_or_raise as together
from megatron.distributed.process_group import read_environment
from megatron.optim.adam import MAX_TILE_NUMEL, AdamW
from megatron.optim.rule import StepScalars, UpdateRule, UpdateSegment
from megatron.zero.flat_buffers import DTYPES
from megatron.zero.layout import align
from megatron.zero.offload.async_file import AioSettings
from megatron.zero.offload.capacity_check import check_host_memory, probe_nvme
from megatron.zero.offload.chunk_sizes import (HOST_CHUNK_NUMEL, STEP_BUFFER_SETS, OffloadRatio, param_buffer_sets,
                                               param_chunk_numel, step_chunk_numel)
from megatron.zero.offload.copy_streams import CopyStreams, StagingDoubleBuffer, create_copy_streams
from megatron.zero.offload.direct_io import page_aligned_zeros
from megatron.zero.offload.host import HostShard, HostStorage, StreamingHostStorage
from megatron.zero.offload.nvme import NvmeSettings, NvmeStorage
from megatron.zero.offload.storage import WEIGHT, DeviceStorage, EngineStorage, Location, StorageBackend
from megatron.zero.offload.swap_dir import SwapDir, close_all_swap_dirs, remove_stale_swap_dirs
from megatron.zero.partitioned_param import full_shape
from mpu.collectives import all_reduce_scalar
from mpu.groups import Group, Groups

UpdateSide = Literal["host", "device"]

TRIAL_CHUNKS = 4
"""Chunks of the shard that is timed."""
TRIAL_SECONDS = 0.4
"""Duration of the trial for each side."""
DEVICE_MEMORY_DIVISOR = 4
"""The buffers of a device update may use at most this fraction (1/4) of free device memory."""


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
    work = DTYPES[config.precision.name]
    on_host, on_device = (numel * seconds for seconds in time_both_sides(rule, device, copy_streams, work, groups.world,
                                                                         pinned=offload.offload_optimizer_pin_memory))
    needed = _device_update_bytes(config, numel, groups)
    fits = all_reduce_scalar(needed * DEVICE_MEMORY_DIVISOR <= torch.cuda.mem_get_info(device)[0], groups.world, "min")
    side: UpdateSide = "device" if on_device < on_host and fits else "host"
    why = "" if fits or on_device >= on_host else f", which would keep {needed / 2**30:.1f} GiB there"
    return side, [f" offload: the {side} updates; a step's update takes about {on_host:.2f} s by the host with "
                  f"{threads} a rank, {on_device:.2f} s on the device{why} (--offload-update)"]


def _device_update_bytes(config: Config, numel: int, groups: Groups) -> int:
    """Device memory of a device update: gradients, and the chunk buffers."""
    wide = config.accumulation(groups.dp.size) > 1 or config.precision.name == "fp32"
    return numel * (4 if wide else 2) + STEP_BUFFER_SETS * 3 * 4 * HOST_CHUNK_NUMEL


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
    def prepare() -> tuple[HostStorage, HostShard]:
        host = HostStorage(torch.float32, chunk, pinned=pinned)
        shelf = host.allocate_shard("trial", chunk * TRIAL_CHUNKS)
        shelf.add_kinds(rule.states)
        return host, shelf

    host, shelf = together(prepare, world)
    found = []
    for home, there in ((host, torch.device("cpu")), (StreamingHostStorage(host, copy_streams, device), device)):
        rule.bind_device(there, world)
        trial_step = partial(_run_trial_step, there, rule, home, shelf, copy_streams,
                             torch.zeros(chunk, dtype=work, device=device), pinned)
        found.append(all_reduce_scalar(together(lambda: _best_seconds(trial_step), world), world, "max") / shelf.numel)
    return found[0], found[1]


def _run_trial_step(update_device: torch.device, rule: AdamW, storage: StorageBackend, shard: HostShard,
                    copy_streams: CopyStreams, on_device: Tensor, pinned: bool) -> None:
    """One update of all chunks, including the copy of new weights to the device, but not that of gradients to the host:
    in training that one overlaps backward."""
    on_host = isinstance(storage, HostStorage)
    grads = page_aligned_zeros(len(on_device), on_device.dtype, pinned=pinned) if on_host else on_device
    staging = StagingDoubleBuffer(len(on_device) if on_host else 0, on_device.dtype, None, pinned=pinned)
    at = StepScalars.for_applied_step(0.5, 1, update_device)
    for kept, in storage.iter_chunks([(shard, its)] for its in shard.chunks):
        lp_out = staging.acquire(len(on_device)) if on_host else on_device
        states = {kind: kept[kind] for kind in rule.states}
        span = UpdateSegment(0, kept[WEIGHT], grads, states, (), 1, lambda sums: sums, lp_out)
        if not rule.step_many([span], {"lr": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}, at):
            lp_out.copy_(kept[WEIGHT])
        if on_host:
            staging.mark_sent(last := copy_streams.to_device.copy(on_device, lp_out))
    if on_host:
        last.wait_on_host()
    storage.wait_for_writes()


def _best_seconds(action: Callable[[], None]) -> float:
    """The shortest of several runs, after a warm-up run."""
    action()
    best, end = float("inf"), time.monotonic() + TRIAL_SECONDS
    while True:
        start = time.monotonic()
        action()
        best = min(best, time.monotonic() - start)
        if time.monotonic() >= end:
            return best


def create_engine_storage(config: Config, rule: UpdateRule, model: nn.Module, device: torch.device, groups: Groups,
                          ) -> tuple[EngineStorage, list[str]]:
    """The storage, and notes for the user. Collective: an error of one rank is raised on all."""
    offload = config.offload
    places = offload.offload_optimizer_device, offload.offload_param_device
    copy_streams = create_copy_streams(device) if places != ("none", "none") else None
    if copy_streams is not None:
        all_succeed_or_raise(lambda: _check_host_memory(config, rule, model, groups.dp.size), groups.world)
    update, notes = choose_update_side(config, rule, model, device, groups, copy_streams)
    nvme_dirs = NvmeDirs(config, groups)
    if "nvme" not in places:
        return _create_storage(config, rule, device, nvme_dirs, copy_streams, update), notes
    exit_codes.before_exit(close_all_swap_dirs)
    try:
        storage = all_succeed_or_raise(lambda: _create_storage(config, rule, device, nvme_dirs, copy_streams, update),
                                       groups.world)
        expected = expected_nvme_usage(config, rule, model, groups.dp.size)
        return storage, notes + all_succeed_or_raise(lambda: nvme_dirs.probe(expected), groups.world)
    except BaseException:
        nvme_dirs.close()
        raise


def _create_storage(config: Config, rule: UpdateRule, device: torch.device, nvme_dirs: NvmeDirs,
                    copy_streams: CopyStreams | None, update: UpdateSide) -> EngineStorage:
    optimizer, part = _create_optimizer_storage(config, rule, device, nvme_dirs, copy_streams, update)
    offload = config.offload
    pins = device.type == "cuda" and offload.offload_optimizer_pin_memory
    delays = offload.delayed_param_update and isinstance(optimizer, HostStorage) and rule.elementwise
    splits = optimizer.location is not Location.DEVICE and offload.offload_optimizer_ratio < 1
    return EngineStorage(optimizer, _create_param_storage(config, device, nvme_dirs, copy_streams, part), copy_streams,
                         pins, delays, DeviceStorage(device) if splits else None,
                         OffloadRatio(offload.offload_optimizer_ratio))


def _create_optimizer_storage(config: Config, rule: UpdateRule, device: torch.device, nvme_dirs: NvmeDirs,
                              copy_streams: CopyStreams | None,
                              update: UpdateSide) -> tuple[StorageBackend, int | None]:
    """The backend, and how many elements a step updates at a time (None: the whole shard)."""
    offload, on_gpu = config.offload, device.type == "cuda"
    tile = min(MAX_TILE_NUMEL, align(config.zero.sub_group_size))
    if offload.offload_optimizer_device == "nvme":
        part = step_chunk_numel(tile, offload.offload_optimizer_buffer_count, 1 + len(rule.states))
        return NvmeStorage(nvme_dirs.swap_dir("optimizer"), "optimizer", rule.states, NvmeSettings(
            chunk_numel=part, buffer_sets=STEP_BUFFER_SETS, keeps_shards_whole=not rule.elementwise,
            device_is_separate=copy_streams is not None, pinned=on_gpu and offload.offload_optimizer_pin_memory,
            pipeline_read=offload.offload_optimizer_pipeline_read,
            pipeline_write=offload.offload_optimizer_pipeline_write, aio=_aio_settings(offload))), part
    if offload.offload_optimizer_device == "none" or copy_streams is None:
        return DeviceStorage(device), None
    part = min(HOST_CHUNK_NUMEL, tile)
    host = HostStorage(torch.float32, part if rule.elementwise else 0,
                       pinned=on_gpu and offload.offload_optimizer_pin_memory)
    return (StreamingHostStorage(host, copy_streams, device) if update == "device" else host), part


def _create_param_storage(config: Config, device: torch.device, nvme_dirs: NvmeDirs, copy_streams: CopyStreams | None,
                          step_chunk: int | None) -> StorageBackend:
    offload, work = config.offload, DTYPES[config.precision.name]
    pinned = device.type == "cuda" and offload.offload_param_pin_memory
    if offload.offload_param_device == "nvme":
        size, buffers = offload.offload_param_buffer_size, offload.offload_param_buffer_count
        part = param_chunk_numel(size, step_chunk)
        return NvmeStorage(nvme_dirs.swap_dir("param"), "param", (), NvmeSettings(
            chunk_numel=part, write_chunk_numel=step_chunk, buffer_sets=param_buffer_sets(size, buffers, part),
            dtype=work, device_is_separate=copy_streams is not None, host_numel=offload.offload_param_max_in_cpu,
            pinned=pinned, aio=_aio_settings(offload)))
    if offload.offload_param_device == "none" or copy_streams is None:
        return DeviceStorage(device, work)
    return HostStorage(work, 0, pinned=pinned)


def _check_host_memory(config: Config, rule: UpdateRule, model: nn.Module, dp_size: int) -> None:
    """Raise ConfigError if this node's share of the state offloaded to the host does not fit."""
    offload, work = config.offload, DTYPES[config.precision.name].itemsize
    share = offload.offload_optimizer_ratio * (offload.offload_optimizer_device == "cpu")
    each = share * (4 * (1 + len(rule.states)) + work)
    each += work * (offload.offload_param_device == "cpu")
    numel = -(-sum(full_shape(parameter).numel() for parameter in model.parameters()) // dp_size)
    flags = " ".join(f"{flag_name(name)} cpu" for name in ("offload_optimizer_device", "offload_param_device")
                     if getattr(offload, name) == "cpu")
    check_host_memory(int(each * numel), read_environment().local_world_size, flags)


def _aio_settings(offload: OffloadConfig) -> AioSettings:
    return AioSettings(block_size=offload.aio_block_size, queue_depth=offload.aio_queue_depth,
                       intra_op_parallelism=offload.aio_intra_op_parallelism,
                       single_submit=offload.aio_single_submit, overlap_events=offload.aio_overlap_events)


def offload_notes(config: Config, storage: EngineStorage, *, params_are_sharded: bool) -> list[str]:
    """After the engine is built: the achieved offload ratio, and a note for each setting that has no or less effect
    here. `params_are_sharded`: the engine has sharded parameters."""
    offload = config.offload
    found = [f" note: {sentence}" for sentence in unused_offload_settings(offload, config.key_names.keys_of_given)]
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(offload, name) == "cpu" and storage.copy_streams is None:
            found.append(f" note: {flag_name(name)} cpu has no effect here: the device is the host")
    is_asked = offload.offload_optimizer_device != "none"
    if is_asked and offload.offload_update != "auto" and storage.optimizer.location is Location.DEVICE:
        found.append(f" note: --offload-update {offload.offload_update} has no effect here: the optimizer's state is "
                     "where the model is")
    ratio = f"{flag_name('offload_optimizer_ratio')} {offload.offload_optimizer_ratio}"
    if storage.device_optimizer is not None:
        found.append(f" offload: {storage.offload_ratio.achieved:.2f} of the optimizer's state leaves the device, by "
                     f"whole blocks ({ratio})")
    elif is_asked and offload.offload_optimizer_ratio != 1:
        found.append(f" note: {ratio} has no effect here: the optimizer's state is where the model is")
    if is_asked and offload.delayed_param_update and not storage.delays_update:
        found.append(" note: --delayed-param-update has no effect here: it is for Adam and its like with "
                     "--offload-optimizer-device cpu of a GPU, updated by the host")
    on_host_already = offload.offload_param_device == "cpu" and storage.copy_streams is None
    if offload.offload_param_device != "none" and not params_are_sharded and not on_host_already:
        found.append(f" note: {flag_name('offload_param_device')} {offload.offload_param_device} has no effect here: "
                     f"every parameter is smaller than {flag_name('stage3_param_persistence_threshold')} "
                     f"{config.zero.stage3_param_persistence_threshold}, and stays whole")
    elif isinstance(storage.params, NvmeStorage) and not storage.params.has_nvme_shards:
        found.append(f" note: all weights of a rank are within {flag_name('offload_param_max_in_cpu')} "
                     f"{offload.offload_param_max_in_cpu}, and stay on the host")
    if storage.has_offloaded_state and config.save.async_save:
        found.append(" note: --async-save has no effect here: state that is offloaded is not copied, and saved at once")
    return found


@dataclass(frozen=True)
class _NvmeUsage:
    """Bytes of one rank's state on NVMe, and bytes read and written in a step."""

    contents: str
    kept: int
    read: int
    written: int


def expected_nvme_usage(config: Config, rule: UpdateRule, model: nn.Module, dp_size: int) -> dict[str, _NvmeUsage]:
    """By kind of state. Ignores padding, and that the offload ratio applies to whole buckets."""
    sizes = [full_shape(parameter).numel() for parameter in model.parameters()]
    numel = -(-sum(sizes) // dp_size)
    state = int(4 * numel * (1 + len(rule.states)) * config.offload.offload_optimizer_ratio)
    split = -(-sum(size for size in sizes if size >= config.zero.stage3_param_persistence_threshold) // dp_size)
    on_drive = max(0, split - config.offload.offload_param_max_in_cpu) * DTYPES[config.precision.name].itemsize
    return {"optimizer": _NvmeUsage("optimizer state", state, state, state),
            "param": _NvmeUsage("weights", on_drive, 2 * on_drive * config.accumulation(dp_size), on_drive)}


class NvmeDirs:
    """This rank's swap directories, one for each configured path."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._offload, self._run, self._rank = config.offload, _run_name(config), groups.world.rank
        self._node = read_environment()
        self._folders: dict[str, SwapDir] = {}
        self._kinds_by_path: dict[str, list[str]] = {}

    def swap_dir(self, kind: str) -> SwapDir:
        """The directory for a kind of state ("optimizer" or "param")."""
        name = f"offload_{kind}_nvme_path"
        path: str = getattr(self._offload, name)
        self._kinds_by_path.setdefault(path, []).append(kind)
        if path not in self._folders:
            self._folders[path] = SwapDir(path, self._run, self._rank, flag=flag_name(name))
            if self._node.local_rank == 0:
                remove_stale_swap_dirs(path, self._run, range(self._rank, self._rank + self._node.local_world_size))
        return self._folders[path]

    def close(self) -> None:
        """Remove the directories: building the engine failed."""
        for folder in self._folders.values():
            folder.close()

    def probe(self, expected: Mapping[str, _NvmeUsage]) -> list[str]:
        """One line per drive with its expected load, measured by local rank 0; empty on the others."""
        if self._node.local_rank != 0:
            return []
        return [self._probe_line(path, [expected[kind] for kind in kinds if expected[kind].kept], expected)
                for path, kinds in self._kinds_by_path.items()]

    def _probe_line(self, path: str, uses: Sequence[_NvmeUsage], expected: Mapping[str, _NvmeUsage]) -> str:
        """Probe one path, for all ranks of the node."""
        if not uses:
            return f" nvme {path}: nothing of this run will be there"
        ranks = self._node.local_world_size
        needed, read, written = (ranks * sum(getattr(use, what) for use in uses)
                                 for what in ("kept", "read", "written"))
        beside = ranks * sum(expected[kind].kept for other, kinds in self._kinds_by_path.items() for kind in kinds
                             if other != path and os.stat(other).st_dev == os.stat(path).st_dev)
        return str(probe_nvme(path, contents=" and ".join(use.contents for use in uses), needed=needed,
                              read_per_step=read, written_per_step=written, flag=self._folders[path].flag,
                              other_needed=beside))


def _run_name(config: Config) -> str:
    """Hash of the save folder, or of the command: equal at the next start, which then finds what a killed run left."""
    return command_hash() if config.save.save is None else _hash_name(os.path.abspath(config.save.save))


def command_hash() -> str:
    return _hash_name(" ".join([os.getcwd(), *sys.argv]))


def _hash_name(what: str) -> str:
    return f"zero-{crc32(what.encode(errors='replace')):08x}"
