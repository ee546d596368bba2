"""The process groups of a run: which ranks communicate with which.

`tp` ranks hold slices of one model and see the same batch; `dp` ranks hold equal slices and see different batches. tp
groups are consecutive ranks, so that they are on one node; dp groups are strided. Eight ranks with tp size 2:

    tp groups   [0 1] [2 3] [4 5] [6 7]      dp groups   [0 2 4 6] [1 3 5 7]

A group of one needs no process group: every collective of this package is the identity on it. Each group has a
*control* group of the same ranks, gloo on the host: the group itself if its backend serves CPU tensors, otherwise
(NCCL) a second one, which lives as long as the default process group and is found again by its description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from mpu.collective_tracker import track_collective
from mpu.split import ParallelError, rank_grid


@dataclass(frozen=True)
class Group:
    """A set of ranks and this process's rank in it. `ranks` are world ranks, in group order. Holds names of process
    groups, which torch.distributed owns, so that destroying them ends their threads even if a Group is still
    referenced. A remaining thread could abort the interpreter at exit."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    name: GroupName | None = field(default=None, repr=False, compare=False)
    control_name: GroupName | None = field(default=None, repr=False, compare=False)
    # Whether GPU tensors are communicated by gloo.
    gpu_tensors_use_gloo: bool = field(default=False, repr=False, compare=False)

    @property
    def process_group_or_none(self) -> dist.ProcessGroup | None:
        """torch's process group; None for a group of one."""
        return None if self.name is None else distributed_c10d._resolve_process_group(self.name)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group. For a group of one, this rank creates it alone on first use."""
        if not dist.is_initialized() or dist.get_rank() not in self.ranks:
            raise ParallelError(
                f"there is no process group of rank {self.rank} of {self.size}: torch.distributed was not initialised "
                "when the groups were made; call torch.distributed.init_process_group before "
                "mpu.initialize_model_parallel, on one rank too (the layers and functions of mpu need neither there)")
        own, world = self.process_group_or_none, dist.group.WORLD
        assert world is not None
        if own is not None or world.size() == 1:
            return own or world
        return _find_or_create_process_group(f"rank {dist.get_rank()} alone", (dist.get_rank(),))

    @property
    def control_process_group(self) -> dist.ProcessGroup | None:
        """The gloo process group for host tensors; None for a group of one."""
        return None if self.control_name is None else distributed_c10d._resolve_process_group(self.control_name)

    def group_name_for(self, x: Tensor) -> GroupName:
        """Name of the process group that communicates x."""
        name = self.control_name if x.device.type == "cpu" else self.name
        assert name is not None, "a group of one sends nothing"
        return name

    @property
    def own_backend_serves_cpu(self) -> bool:
        """Whether the group's own backend communicates CPU tensors."""
        return self.name == self.control_name

    @property
    def is_destroyed(self) -> bool:
        return not self.is_solo and not dist.is_initialized()

    @property
    def is_solo(self) -> bool:
        return self.size == 1


SOLO = Group(rank=0, size=1, ranks=(0,))


@dataclass(frozen=True)
class Groups:
    """The groups of one run; `world` holds every rank."""

    world: Group = SOLO
    tp: Group = SOLO
    dp: Group = SOLO


def build(tp_size: int = 1, timeout: timedelta | None = None) -> Groups:
    """Create the groups of a tp_size x (world / tp_size) grid; without torch.distributed the world is one rank.
    Collective. `timeout` applies to all three, even to a process group that an earlier run of this process created."""
    if not (dist.is_available() and dist.is_initialized()):
        if tp_size != 1:
            raise ParallelError(f"tensor-parallel size {tp_size} needs {tp_size} ranks and there is 1: start them with "
                                "torchrun, or choose size 1")
        return Groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    tp_groups, dp_groups = rank_grid(size, tp_size)
    world = _wrap_process_group(rank, tuple(range(size)), dist.group.WORLD, timeout)
    groups = Groups(world, _axis_group(tp_groups, world, timeout), _axis_group(dp_groups, world, timeout))
    if timeout is not None:
        set_timeout(groups, timeout)
    return groups


def set_timeout(groups: Groups, timeout: timedelta) -> None:
    """Set the timeout of all later operations of these groups and of their subgroups."""
    handles = {handle for group in (groups.world, groups.tp, groups.dp)
               for handle in (group.process_group_or_none, group.control_process_group) if handle is not None}
    for _ in range(2):  # subgroups, then their control groups: a description ends with the name of the other group
        names = {handle.group_name for handle in handles}
        handles |= {one for one in distributed_c10d._world.pg_map if one.group_desc.rpartition(" of ")[2] in names}
    for handle in handles:
        distributed_c10d._set_pg_timeout(timeout, handle)


def _timeout_of(group: Group) -> timedelta | None:
    """The present timeout of a group."""
    handle = group.control_process_group
    options = None if handle is None else getattr(handle._get_backend(torch.device("cpu")), "options", None)
    return None if options is None else cast(timedelta, options._timeout)


def group_from_process_group(process_group: dist.ProcessGroup | None) -> Group:
    """The Group of an existing process group; None is a group of one. Collective over its ranks."""
    if process_group is None or not dist.is_initialized():
        return SOLO
    return _wrap_process_group(dist.get_rank(), tuple(dist.get_process_group_ranks(process_group)), process_group, None)


def subgroup(group: Group, size: int) -> Group:
    """This rank's block of `size` consecutive ranks of a group. Collective over the group; a second call finds the same
    group."""
    # Consecutive ranks usually share a node, so that a block communicates over its fastest links.
    blocks = [group.ranks[at : at + size] for at in range(0, group.size, size)]
    mine = blocks[group.rank // size]
    return _subgroup_of(group, f"{size} neighbours", mine)


def duplicate_group(group: Group) -> Group:
    """Another process group of the same ranks, whose collectives an accelerator runs beside those of the first.
    Collective over the group; a second call finds the same group."""
    return _subgroup_of(group, "all", group.ranks)


def _subgroup_of(group: Group, which: str, ranks: tuple[int, ...]) -> Group:
    timeout = _timeout_of(group)
    handle = _find_or_create_process_group(f"{which} of {group.name}", ranks, timeout) if len(ranks) > 1 else None
    return _wrap_process_group(group.ranks[group.rank], ranks, handle, timeout)


def split_into_replicas(group: Group, size: int) -> tuple[Group, Group]:
    """(this rank's block of `size` consecutive ranks, the ranks at its place in all blocks). Collective over the group,
    which `size` divides; both are found again by a second call."""
    place = group.rank % size
    return subgroup(group, size), _subgroup_of(group, f"place {place} in blocks of {size}", group.ranks[place::size])


def _find_or_create_process_group(purpose: str, ranks: tuple[int, ...], timeout: timedelta | None = None,
                                  backend: str | None = None) -> dist.ProcessGroup:
    """The process group with this description. Collective over its ranks if it is created."""
    # torch keeps the descriptions of all groups: every caller with the same purpose finds the first one's group.
    known = next((one for one in distributed_c10d._world.pg_map if one.group_desc == purpose), None)
    return known or _create_process_group(ranks, timeout, backend, purpose)


@track_collective
def _create_process_group(ranks: tuple[int, ...], timeout: timedelta | None, backend: str | None = None,
                          purpose: str | None = None) -> dist.ProcessGroup:
    """Collective over the new group's ranks only."""
    world = dist.group.WORLD
    assert world is not None
    # With bound devices NCCL would split the world, which every rank would have to call.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True,
                                                      group_desc=purpose))
    finally:
        world.bound_device_id = bound


def groups_from_process_groups(tp: dist.ProcessGroup | None, dp: dist.ProcessGroup | None) -> Groups:
    """The groups of an existing grid."""
    return Groups(group_from_process_group(dist.group.WORLD if dist.is_initialized() else None),
                  group_from_process_group(tp), group_from_process_group(dp))


def _axis_group(groups: list[tuple[int, ...]], world: Group, timeout: timedelta | None) -> Group:
    """The one of `groups`, which partition the world, that contains this rank."""
    mine = next(ranks for ranks in groups if world.rank in ranks)
    if len(mine) == world.size:
        return world
    if len(mine) == 1:
        handle = None
    elif world.process_group.bound_device_id is not None:  # a connected world is split once for all `groups`
        handle = track_collective(dist.split_group)(split_ranks=[list(ranks) for ranks in groups], timeout=timeout)
    else:  # the ranks of each group connect among themselves
        handle = _create_process_group(mine, timeout)
    return _wrap_process_group(world.rank, mine, handle, timeout)


def _wrap_process_group(rank: int, ranks: tuple[int, ...], handle: dist.ProcessGroup | None,
                        timeout: timedelta | None) -> Group:
    """The Group of a process group that contains this rank."""
    if handle is None or len(ranks) == 1:  # a group of one never communicates
        return Group(ranks.index(rank), len(ranks), ranks)
    name = handle.group_name
    by_device = backend_by_device(handle)
    control = handle if "cpu" in by_device else _find_or_create_process_group(f"control of {name}", ranks, timeout,
                                                                              "gloo")
    return Group(ranks.index(rank), len(ranks), ranks, name, control.group_name, by_device.get("cuda") == "gloo")


def backend_by_device(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend: {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}, ... (`get_backend` may return
    "undefined" for a script's own group.)"""
    pairs = distributed_c10d._world.pg_backend_config.get(process_group, "").split(",")
    return dict(pair.split(":", 1) for pair in pairs if ":" in pair)
