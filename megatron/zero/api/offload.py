"""Where the state of an engine lives, by the configuration."""

from __future__ import annotations

import os
import sys
from zlib import crc32

import torch

from megatron.checkpoint.agree import agree
from megatron.config.tree import Config, OffloadConfig, flag_name
from megatron.launch import exits
from megatron.launch.distributed import read_environment
from megatron.optim.adam import LARGEST_TILE
from megatron.optim.rule import Rule
from megatron.zero.homes.here import Here
from megatron.zero.homes.nvme import Nvme, NvmeSettings
from megatron.zero.homes.parts import STEP_SETS, part_of_step, part_of_weights, sets_of_weights
from megatron.zero.homes.shelf import Home, Homes
from megatron.zero.homes.swapfolder import SwapFolder, tidy
from megatron.zero.homes.tilefile import AioSettings
from megatron.zero.precision import DTYPES
from mpu.groups import Groups


def homes_of(config: Config, rule: Rule, device: torch.device, groups: Groups) -> Homes:
    """Collective: what one rank cannot have is an error of all."""
    config.offload.check_available("cuda" if device.type == "cuda" else "cpu")
    homes = agree(lambda: _homes(config, rule, device, groups), groups.world)
    for home in (homes.optimizer, homes.params):
        if isinstance(home, Nvme):
            exits.before_failing(home.close)
    return homes


def _homes(config: Config, rule: Rule, device: torch.device, groups: Groups) -> Homes:
    offload, work = config.offload, DTYPES[config.precision.name]
    optimizer: Home = Here(device)
    params: Home = Here(device, work)
    folders = Folders(config, groups)
    of_step = None
    if offload.offload_optimizer_device == "nvme":
        tile = min(LARGEST_TILE, config.zero.sub_group_size)
        of_step = part_of_step(tile, offload.offload_optimizer_buffer_count, 1 + len(rule.states))
        optimizer = Nvme(folders.get("optimizer"), "optimizer", rule.states, NvmeSettings(
            part=of_step, sets=STEP_SETS, whole=not rule.elementwise, pinned=offload.offload_optimizer_pin_memory,
            reads_ahead=offload.offload_optimizer_pipeline_read,
            writes_behind=offload.offload_optimizer_pipeline_write, aio=_aio(offload)))
    if offload.offload_param_device == "nvme":
        size, buffers = offload.offload_param_buffer_size, offload.offload_param_buffer_count
        part = part_of_weights(size, of_step)
        params = Nvme(folders.get("param"), "param", (), NvmeSettings(
            part=part, sets=sets_of_weights(size, buffers, part), dtype=work,
            in_memory=offload.offload_param_max_in_cpu, pinned=offload.offload_param_pin_memory, aio=_aio(offload)))
    return Homes(optimizer, params)


class Folders:
    """This rank's folders on drives, one for each path."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self._offload, self._run, self._rank = config.offload, _name(config), groups.world.rank
        self._made: dict[str, SwapFolder] = {}

    def get(self, kind: str) -> SwapFolder:
        """Of the setting of this kind of state."""
        name = f"offload_{kind}_nvme_path"
        path: str = getattr(self._offload, name)
        if path not in self._made:
            self._made[path] = SwapFolder(path, self._run, self._rank, flag=flag_name(name))
            ranks = read_environment()
            if ranks.local_rank == 0:
                tidy(path, self._run, range(self._rank, self._rank + ranks.local_world_size))
        return self._made[path]


def _name(config: Config) -> str:
    """The same for the next start of a run, which finds what a killed one left: by the folder it saves into, or the
    command."""
    what = os.path.abspath(config.save.save) if config.save.save else " ".join([os.getcwd(), *sys.argv])
    return f"zero-{crc32(what.encode(errors='replace')):08x}"


def _aio(offload: OffloadConfig) -> AioSettings:
    return AioSettings(block_size=offload.aio_block_size, queue_depth=offload.aio_queue_depth,
                       intra_op_parallelism=offload.aio_intra_op_parallelism,
                       single_submit=offload.aio_single_submit, overlap_events=offload.aio_overlap_events)
