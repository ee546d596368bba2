"""Where the state of an engine lives, by the configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import nn

from megatron.checkpoint.agree import all_succeed_or_raise
from megatron.config.offload import unused_offload_settings
from megatron.config.tree import Config, OffloadConfig, flag_name
from megatron.launch import exits
from megatron.launch.distributed import read_environment
from megatron.optim.adam import MAX_TILE_NUMEL
from megatron.optim.rule import UpdateRule
from megatron.zero.api.update import UpdateSide, choose_update_side
from megatron.zero.holders import full_shape
from megatron.zero.homes.ferry import CopyStreams, create_copy_streams
from megatron.zero.homes.here import DeviceStorage
from megatron.zero.homes.host import HostStorage
from megatron.zero.homes.nvme import NvmeSettings, NvmeStorage
from megatron.zero.homes.parts import (HOST_CHUNK_NUMEL, STEP_BUFFER_SETS, OffloadRatio, param_buffer_sets,
                                       param_chunk_numel, step_chunk_numel)
from megatron.zero.homes.preflight import probe_nvme
from megatron.zero.homes.room import check_host_memory
from megatron.zero.homes.shelf import EngineStorage, StorageBackend
from megatron.zero.homes.streamed import StreamingHostStorage
from megatron.zero.homes.swapfolder import SwapDir, close_all_swap_dirs, remove_stale_swap_dirs
from megatron.zero.homes.tilefile import AioSettings
from megatron.zero.layout import align
from megatron.zero.precision import DTYPES
from mpu.groups import Groups


def create_engine_storage(config: Config, rule: UpdateRule, model: nn.Module, device: torch.device, groups: Groups,
                          ) -> tuple[EngineStorage, list[str]]:
    """And what to say of them. Collective: what one rank cannot have is an error of all."""
    offload = config.offload
    places = offload.offload_optimizer_device, offload.offload_param_device
    copy_streams = create_copy_streams(device) if places != ("none", "none") else None
    if copy_streams is not None:
        all_succeed_or_raise(lambda: _check_host_memory(config, rule, model, groups.dp.size), groups.world)
    update, notes = choose_update_side(config, rule, model, device, groups, copy_streams)
    nvme_dirs = NvmeDirs(config, groups)
    if "nvme" not in places:
        return _create_storage(config, rule, device, nvme_dirs, copy_streams, update), notes
    exits.before_exit(close_all_swap_dirs)
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
    here = DeviceStorage(device) if optimizer.is_offloaded and offload.offload_optimizer_ratio < 1 else None
    return EngineStorage(optimizer, _create_param_storage(config, device, nvme_dirs, copy_streams, part), copy_streams,
                         pins, delays, here, OffloadRatio(offload.offload_optimizer_ratio))


def _create_optimizer_storage(config: Config, rule: UpdateRule, device: torch.device, nvme_dirs: NvmeDirs,
                              copy_streams: CopyStreams | None,
                              update: UpdateSide) -> tuple[StorageBackend, int | None]:
    """And how much of it a step takes at a time."""
    offload, on_gpu = config.offload, device.type == "cuda"
    tile = min(MAX_TILE_NUMEL, align(config.zero.sub_group_size))
    if offload.offload_optimizer_device == "nvme":
        part = step_chunk_numel(tile, offload.offload_optimizer_buffer_count, 1 + len(rule.states))
        return NvmeStorage(
            nvme_dirs.swap_dir("optimizer"), "optimizer", rule.states,
            NvmeSettings(chunk_numel=part,
                         buffer_sets=STEP_BUFFER_SETS,
                         keeps_shards_whole=not rule.elementwise,
                         device_is_separate=copy_streams is not None,
                         pinned=on_gpu and offload.offload_optimizer_pin_memory,
                         pipeline_read=offload.offload_optimizer_pipeline_read,
                         pipeline_write=offload.offload_optimizer_pipeline_write,
                         aio=_aio_settings(offload))), part
    if offload.offload_optimizer_device == "none" or copy_streams is None:
        return DeviceStorage(device), None
    part = min(HOST_CHUNK_NUMEL, tile)
    host = HostStorage(torch.float32,
                       part if rule.elementwise else 0,
                       pinned=on_gpu and offload.offload_optimizer_pin_memory)
    return (StreamingHostStorage(host, copy_streams, device) if update == "device" else host), part


def _create_param_storage(config: Config, device: torch.device, nvme_dirs: NvmeDirs, copy_streams: CopyStreams | None,
                          step_chunk: int | None) -> StorageBackend:
    offload, work = config.offload, DTYPES[config.precision.name]
    pinned = device.type == "cuda" and offload.offload_param_pin_memory
    if offload.offload_param_device == "nvme":
        size, buffers = offload.offload_param_buffer_size, offload.offload_param_buffer_count
        part = param_chunk_numel(size, step_chunk)
        return NvmeStorage(
            nvme_dirs.swap_dir("param"), "param", (),
            NvmeSettings(chunk_numel=part,
                         write_chunk_numel=step_chunk,
                         buffer_sets=param_buffer_sets(size, buffers, part),
                         dtype=work,
                         device_is_separate=copy_streams is not None,
                         host_numel=offload.offload_param_max_in_cpu,
                         pinned=pinned,
                         aio=_aio_settings(offload)))
    if offload.offload_param_device == "none" or copy_streams is None:
        return DeviceStorage(device, work)
    return HostStorage(work, 0, pinned=pinned)


def _check_host_memory(config: Config, rule: UpdateRule, model: nn.Module, dp_size: int) -> None:
    """Of a rank's part, as far as it is to be on the host."""
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
    """Of an engine that is built: what a setting has come to, and a line for each that does less here than its name
    says. `splits`: there are weights that come and go."""
    offload = config.offload
    found = [f" note: {sentence}" for sentence in unused_offload_settings(offload, config.key_names.keys_of_given)]
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(offload, name) == "cpu" and storage.copy_streams is None:
            found.append(f" note: {flag_name(name)} cpu has no effect here: the device is the host")
    is_asked = offload.offload_optimizer_device != "none"
    if is_asked and offload.offload_update != "auto" and not storage.optimizer.is_offloaded:
        found.append(f" note: --offload-update {offload.offload_update} has no effect here: the optimizer's state is "
                     "where the model is")
    ratio = f"{flag_name('offload_optimizer_ratio')} {offload.offload_optimizer_ratio}"
    if storage.device_optimizer is not None:
        found.append(
            f" offload: {storage.offload_ratio.achieved:.2f} of the optimizer's state leaves the device, by whole blocks "
            f"({ratio})")
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
    """What of one rank is on a drive, in bytes, and those it reads and writes in a step."""

    contents: str
    kept: int
    read: int
    written: int


def expected_nvme_usage(config: Config, rule: UpdateRule, model: nn.Module, dp_size: int) -> dict[str, _NvmeUsage]:
    """By kind of state, but for the padding of shards, and what a share of whole shards is beside it."""
    sizes = [full_shape(parameter).numel() for parameter in model.parameters()]
    numel = -(-sum(sizes) // dp_size)
    state = int(4 * numel * (1 + len(rule.states)) * config.offload.offload_optimizer_ratio)
    split = -(-sum(size for size in sizes if size >= config.zero.stage3_param_persistence_threshold) // dp_size)
    on_drive = max(0, split - config.offload.offload_param_max_in_cpu) * DTYPES[config.precision.name].itemsize
    return {"optimizer": _NvmeUsage("optimizer state", state, state, state),
            "param": _NvmeUsage("weights", on_drive, 2 * on_drive * config.accumulation(dp_size), on_drive)}


class NvmeDirs:
    """This rank's folders on drives, one for each path."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._offload, self._run, self._rank = config.offload, _run_name(config), groups.world.rank
        self._node = read_environment()
        self._folders: dict[str, SwapDir] = {}
        self._kinds_by_path: dict[str, list[str]] = {}

    def swap_dir(self, kind: str) -> SwapDir:
        """Of the setting of this kind of state."""
        name = f"offload_{kind}_nvme_path"
        path: str = getattr(self._offload, name)
        self._kinds_by_path.setdefault(path, []).append(kind)
        if path not in self._folders:
            self._folders[path] = SwapDir(path, self._run, self._rank, flag=flag_name(name))
            if self._node.local_rank == 0:
                remove_stale_swap_dirs(path, self._run, range(self._rank, self._rank + self._node.local_world_size))
        return self._folders[path]

    def close(self) -> None:
        """There will be no engine."""
        for folder in self._folders.values():
            folder.close()

    def probe(self, expected: Mapping[str, _NvmeUsage]) -> list[str]:
        """What each drive is expected to do, measured by one rank of a node; the others wait for it."""
        if self._node.local_rank != 0:
            return []
        return [self._probe_line(path, [expected[kind] for kind in kinds if expected[kind].kept], expected)
                for path, kinds in self._kinds_by_path.items()]

    def _probe_line(self, path: str, uses: Sequence[_NvmeUsage], expected: Mapping[str, _NvmeUsage]) -> str:
        """Of one folder, which keeps so much of each rank."""
        if not uses:
            return f" nvme {path}: nothing of this run will be there"
        ranks = self._node.local_world_size
        needed, read, written = (ranks * sum(getattr(use, what) for use in uses)
                                 for what in ("kept", "read", "written"))
        beside = ranks * sum(expected[kind].kept for other, kinds in self._kinds_by_path.items() for kind in kinds
                             if other != path and os.stat(other).st_dev == os.stat(path).st_dev)
        return str(
            probe_nvme(path,
                       contents=" and ".join(use.contents for use in uses),
                       needed=needed,
                       read_per_step=read,
                       written_per_step=written,
                       flag=self._folders[path].flag,
                       other_needed=beside))


def _run_name(config: Config) -> str:
    """The same for the next start of a run, which finds what a killed one left: by the folder it saves into, or the
    command."""
    return command_hash() if config.save.save is None else _hash_name(os.path.abspath(config.save.save))


def command_hash() -> str:
    return _hash_name(" ".join([os.getcwd(), *sys.argv]))


def _hash_name(what: str) -> str:
    return f"zero-{crc32(what.encode(errors='replace')):08x}"
