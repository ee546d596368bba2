"""Where the state of an engine lives, by the configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import nn

from megatron.checkpoint.agree import agree
from megatron.config.offload import idle
from megatron.config.tree import Config, OffloadConfig, flag_name
from megatron.launch import exits
from megatron.launch.distributed import read_environment
from megatron.optim.adam import LARGEST_TILE
from megatron.optim.rule import Rule
from megatron.zero.api.update import Side, choose_update
from megatron.zero.holders import full_shape
from megatron.zero.homes.ferry import Ferry, ferry_for
from megatron.zero.homes.here import Here
from megatron.zero.homes.host import Host
from megatron.zero.homes.nvme import Nvme, NvmeSettings
from megatron.zero.homes.parts import PART_ON_HOST, STEP_SETS, Share, part_of_step, part_of_weights, sets_of_weights
from megatron.zero.homes.preflight import examine
from megatron.zero.homes.room import check_room_on_host
from megatron.zero.homes.shelf import Home, Homes
from megatron.zero.homes.streamed import Streamed
from megatron.zero.homes.swapfolder import SwapFolder, close_all, tidy
from megatron.zero.homes.tilefile import AioSettings
from megatron.zero.layout import align
from megatron.zero.precision import DTYPES
from mpu.groups import Groups


def homes_of(config: Config, rule: Rule, model: nn.Module, device: torch.device, groups: Groups,
             ) -> tuple[Homes, list[str]]:
    """And what to say of them. Collective: what one rank cannot have is an error of all."""
    offload = config.offload
    places = offload.offload_optimizer_device, offload.offload_param_device
    ferry = ferry_for(device) if places != ("none", "none") else None
    if ferry is not None:
        agree(lambda: _check_room(config, rule, model, groups.dp.size), groups.world)
    update, told = choose_update(config, rule, model, device, groups, ferry)
    drives = Drives(config, groups)
    if "nvme" not in places:
        return _homes(config, rule, device, drives, ferry, update), told
    exits.before_leaving(close_all)
    try:
        homes = agree(lambda: _homes(config, rule, device, drives, ferry, update), groups.world)
        expected = expected_of_drives(config, rule, model, groups.dp.size)
        return homes, told + agree(lambda: drives.examine(expected), groups.world)
    except BaseException:
        drives.close()
        raise


def _homes(config: Config, rule: Rule, device: torch.device, drives: Drives, ferry: Ferry | None,
           update: Side) -> Homes:
    optimizer, part = _optimizer_home(config, rule, device, drives, ferry, update)
    offload = config.offload
    pins = device.type == "cuda" and offload.offload_optimizer_pin_memory
    delays = offload.delayed_param_update and isinstance(optimizer, Host) and rule.elementwise
    here = Here(device) if optimizer.is_elsewhere and offload.offload_optimizer_ratio < 1 else None
    return Homes(optimizer, _params_home(config, device, drives, ferry, part), ferry, pins, delays, here,
                 Share(offload.offload_optimizer_ratio))


def _optimizer_home(config: Config, rule: Rule, device: torch.device, drives: Drives, ferry: Ferry | None,
                    update: Side) -> tuple[Home, int | None]:
    """And how much of it a step takes at a time."""
    offload, on_gpu = config.offload, device.type == "cuda"
    tile = min(LARGEST_TILE, align(config.zero.sub_group_size))
    if offload.offload_optimizer_device == "nvme":
        part = part_of_step(tile, offload.offload_optimizer_buffer_count, 1 + len(rule.states))
        return Nvme(drives.folder("optimizer"), "optimizer", rule.states, NvmeSettings(
            part=part, sets=STEP_SETS, whole=not rule.elementwise, apart=ferry is not None,
            pinned=on_gpu and offload.offload_optimizer_pin_memory, reads_ahead=offload.offload_optimizer_pipeline_read,
            writes_behind=offload.offload_optimizer_pipeline_write, aio=_aio(offload))), part
    if offload.offload_optimizer_device == "none" or ferry is None:
        return Here(device), None
    part = min(PART_ON_HOST, tile)
    host = Host(torch.float32, part if rule.elementwise else 0, pinned=on_gpu and offload.offload_optimizer_pin_memory)
    return (Streamed(host, ferry, device) if update == "device" else host), part


def _params_home(config: Config, device: torch.device, drives: Drives, ferry: Ferry | None,
                 part_of_step: int | None) -> Home:
    offload, work = config.offload, DTYPES[config.precision.name]
    pinned = device.type == "cuda" and offload.offload_param_pin_memory
    if offload.offload_param_device == "nvme":
        size, buffers = offload.offload_param_buffer_size, offload.offload_param_buffer_count
        part = part_of_weights(size, part_of_step)
        return Nvme(drives.folder("param"), "param", (), NvmeSettings(
            part=part, within=part_of_step, sets=sets_of_weights(size, buffers, part), dtype=work,
            apart=ferry is not None, in_memory=offload.offload_param_max_in_cpu, pinned=pinned, aio=_aio(offload)))
    if offload.offload_param_device == "none" or ferry is None:
        return Here(device, work)
    return Host(work, 0, pinned=pinned)


def _check_room(config: Config, rule: Rule, model: nn.Module, dp_size: int) -> None:
    """Of a rank's part, as far as it is to be on the host."""
    offload, work = config.offload, DTYPES[config.precision.name].itemsize
    share = offload.offload_optimizer_ratio * (offload.offload_optimizer_device == "cpu")
    each = share * (4 * (1 + len(rule.states)) + work)
    each += work * (offload.offload_param_device == "cpu")
    numel = -(-sum(full_shape(parameter).numel() for parameter in model.parameters()) // dp_size)
    flags = " ".join(f"{flag_name(name)} cpu" for name in ("offload_optimizer_device", "offload_param_device")
                     if getattr(offload, name) == "cpu")
    check_room_on_host(int(each * numel), read_environment().local_world_size, flags)


def _aio(offload: OffloadConfig) -> AioSettings:
    return AioSettings(block_size=offload.aio_block_size, queue_depth=offload.aio_queue_depth,
                       intra_op_parallelism=offload.aio_intra_op_parallelism,
                       single_submit=offload.aio_single_submit, overlap_events=offload.aio_overlap_events)


def offload_notes(config: Config, homes: Homes, *, splits: bool) -> list[str]:
    """Of an engine that is built: what a setting has come to, and a line for each that does less here than its name
    says. `splits`: there are weights that come and go."""
    offload = config.offload
    found = [f" note: {sentence}" for sentence in idle(offload, config.words.given)]
    for name in ("offload_optimizer_device", "offload_param_device"):
        if getattr(offload, name) == "cpu" and homes.ferry is None:
            found.append(f" note: {flag_name(name)} cpu has no effect here: the device is the host")
    is_asked = offload.offload_optimizer_device != "none"
    if is_asked and offload.offload_update != "auto" and not homes.optimizer.is_elsewhere:
        found.append(f" note: --offload-update {offload.offload_update} has no effect here: the optimizer's state is "
                     "where the model is")
    ratio = f"{flag_name('offload_optimizer_ratio')} {offload.offload_optimizer_ratio}"
    if homes.here is not None:
        found.append(f" offload: {homes.share.reached:.2f} of the optimizer's state leaves the device, by whole blocks "
                     f"({ratio})")
    elif is_asked and offload.offload_optimizer_ratio != 1:
        found.append(f" note: {ratio} has no effect here: the optimizer's state is where the model is")
    if is_asked and offload.delayed_param_update and not homes.delays:
        found.append(" note: --delayed-param-update has no effect here: it is for Adam and its like with "
                     "--offload-optimizer-device cpu of a GPU, updated by the host")
    on_host_already = offload.offload_param_device == "cpu" and homes.ferry is None
    if offload.offload_param_device != "none" and not splits and not on_host_already:
        found.append(f" note: {flag_name('offload_param_device')} {offload.offload_param_device} has no effect here: "
                     f"every parameter is smaller than {flag_name('stage3_param_persistence_threshold')} "
                     f"{config.zero.stage3_param_persistence_threshold}, and stays whole")
    elif isinstance(homes.params, Nvme) and not homes.params.holds_anything:
        found.append(f" note: all weights of a rank are within {flag_name('offload_param_max_in_cpu')} "
                     f"{offload.offload_param_max_in_cpu}, and stay on the host")
    if homes.are_elsewhere and config.save.async_save:
        found.append(" note: --async-save has no effect here: state that is offloaded is not copied, and saved at once")
    return found


@dataclass(frozen=True)
class _Use:
    """What of one rank is on a drive, in bytes, and those it reads and writes in a step."""

    name: str
    kept: int
    read: int
    written: int


def expected_of_drives(config: Config, rule: Rule, model: nn.Module, dp_size: int) -> dict[str, _Use]:
    """By kind of state, but for the padding of shards, and what a share of whole shards is beside it."""
    sizes = [full_shape(parameter).numel() for parameter in model.parameters()]
    numel = -(-sum(sizes) // dp_size)
    state = int(4 * numel * (1 + len(rule.states)) * config.offload.offload_optimizer_ratio)
    split = -(-sum(size for size in sizes if size >= config.zero.stage3_param_persistence_threshold) // dp_size)
    on_drive = max(0, split - config.offload.offload_param_max_in_cpu) * DTYPES[config.precision.name].itemsize
    return {"optimizer": _Use("optimizer state", state, state, state),
            "param": _Use("weights", on_drive, 2 * on_drive * config.accumulation(dp_size), on_drive)}


class Drives:
    """This rank's folders on drives, one for each path."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._offload, self._run, self._rank = config.offload, _name(config), groups.world.rank
        self._node = read_environment()
        self._folders: dict[str, SwapFolder] = {}
        self._kinds: dict[str, list[str]] = {}

    def folder(self, kind: str) -> SwapFolder:
        """Of the setting of this kind of state."""
        name = f"offload_{kind}_nvme_path"
        path: str = getattr(self._offload, name)
        self._kinds.setdefault(path, []).append(kind)
        if path not in self._folders:
            self._folders[path] = SwapFolder(path, self._run, self._rank, flag=flag_name(name))
            if self._node.local_rank == 0:
                tidy(path, self._run, range(self._rank, self._rank + self._node.local_world_size))
        return self._folders[path]

    def close(self) -> None:
        """There will be no engine."""
        for folder in self._folders.values():
            folder.close()

    def examine(self, expected: Mapping[str, _Use]) -> list[str]:
        """What each drive is expected to do, measured by one rank of a node; the others wait for it."""
        if self._node.local_rank != 0:
            return []
        return [self._told(path, [expected[kind] for kind in kinds if expected[kind].kept], expected)
                for path, kinds in self._kinds.items()]

    def _told(self, path: str, uses: Sequence[_Use], expected: Mapping[str, _Use]) -> str:
        """Of one folder, which keeps so much of each rank."""
        if not uses:
            return f" nvme {path}: nothing of this run will be there"
        ranks = self._node.local_world_size
        needed, read, written = (ranks * sum(getattr(use, what) for use in uses)
                                 for what in ("kept", "read", "written"))
        beside = ranks * sum(expected[kind].kept for other, kinds in self._kinds.items() for kind in kinds
                             if other != path and os.stat(other).st_dev == os.stat(path).st_dev)
        return str(examine(path, keeps=" and ".join(use.name for use in uses), needed=needed, read_a_step=read,
                           written_a_step=written, flag=self._folders[path].flag, beside=beside))


def _name(config: Config) -> str:
    """The same for the next start of a run, which finds what a killed one left: by the folder it saves into, or the
    command."""
    return name_of_command() if config.save.save is None else _hashed(os.path.abspath(config.save.save))


def name_of_command() -> str:
    return _hashed(" ".join([os.getcwd(), *sys.argv]))


def _hashed(what: str) -> str:
    return f"zero-{crc32(what.encode(errors='replace')):08x}"
