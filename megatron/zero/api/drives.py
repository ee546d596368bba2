"""This rank's folders on drives, and what the drives are expected to do, before the model is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from torch import nn

from megatron.config.tree import Config, flag_name
from megatron.launch.distributed import read_environment
from megatron.optim.rule import Rule
from megatron.zero.holders import shape_of
from megatron.zero.homes.preflight import examine
from megatron.zero.homes.swapfolder import SwapFolder, tidy
from megatron.zero.precision import DTYPES
from mpu.groups import Groups


@dataclass(frozen=True)
class _Use:
    """What of one rank is on a drive, in bytes, and those it reads and writes in a step."""

    name: str
    kept: int
    read: int
    written: int


def expected_of_drives(config: Config, rule: Rule, model: nn.Module, dp_size: int) -> dict[str, _Use]:
    """By kind of state, but for the padding of shards, and what a share of whole shards is beside it."""
    sizes = [shape_of(parameter).numel() for parameter in model.parameters()]
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
