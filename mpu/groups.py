"""The process groups of a run: who computes with whom.

`tp` ranks hold slices of the same model and see the same batch; `dp` ranks hold the same slices and see
different batches. tp groups are consecutive ranks, so that they sit on one node; dp groups are strided.

Eight ranks with tp size 2 (g0 .. g7, two nodes of four):

    tp groups   [g0 g1] [g2 g3] [g4 g5] [g6 g7]
    dp groups   [g0 g2 g4 g6] [g1 g3 g5 g7]

so rank 5 has tp = Group(rank=1, size=2, ranks=(4, 5)) and dp = Group(rank=2, size=4, ranks=(1, 3, 5, 7)).

A group of one needs no process group and no torch.distributed: every collective on it is the identity.
This file creates groups; it sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from mpu.split import ParallelError, rank_grid


@dataclass(frozen=True)
class Group:
    """A set of ranks and this process's place in it. `ranks` are world ranks, in group order.

    torch.distributed owns its process groups, and this holds the name of one: so destroying a process group ends its
    threads even while somebody holds a Group. A thread left over could abort the interpreter that ends around it.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    name: GroupName | None = field(default=None, repr=False, compare=False)

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """torch's process group; None for a group of one."""
        return None if self.name is None else _resolve_process_group(self.name)

    @property
    def is_solo(self) -> bool:
        return self.size == 1


SOLO = Group(rank=0, size=1, ranks=(0,))


@dataclass(frozen=True)
class Groups:
    """All groups of one run; `world` holds every rank."""

    world: Group = SOLO
    tp: Group = SOLO
    dp: Group = SOLO


def build(tp_size: int = 1, timeout: timedelta | None = None) -> Groups:
    """Create the groups of a tp_size x (world / tp_size) grid; without torch.distributed the world is one rank.

    Collective: every rank of the world calls it, and every rank creates all groups in the same order, its own or
    not, as torch.distributed demands. `timeout` is that of the world (a new group would not inherit it).
    """
    if not (dist.is_available() and dist.is_initialized()):
        if tp_size != 1:
            raise ParallelError(
                f"tensor-parallel size {tp_size} needs {tp_size} ranks and there is 1: "
                "start them with torchrun, or choose size 1"
            )
        return Groups()
    rank, size = dist.get_rank(), dist.get_world_size()
    tp_groups, dp_groups = rank_grid(size, tp_size)
    world = Group(rank, size, tuple(range(size)), _name(dist.group.WORLD) if size > 1 else None)
    return Groups(world, _join(tp_groups, world, timeout), _join(dp_groups, world, timeout))


def of_handle(handle: dist.ProcessGroup | None) -> Group:
    """The group behind a process group made elsewhere; None is a group of one."""
    if handle is None or not dist.is_initialized():
        return SOLO
    ranks = tuple(dist.get_process_group_ranks(handle))
    rank = ranks.index(dist.get_rank())
    return Group(rank, len(ranks), ranks, _name(handle) if len(ranks) > 1 else None)


def of_handles(tp: dist.ProcessGroup | None, dp: dist.ProcessGroup | None) -> Groups:
    """The groups of a grid that was made elsewhere."""
    return Groups(of_handle(dist.group.WORLD if dist.is_initialized() else None), of_handle(tp), of_handle(dp))


def _join(groups: list[tuple[int, ...]], world: Group, timeout: timedelta | None) -> Group:
    """Create every one of `groups`; return the one that holds this rank."""
    mine = world
    for ranks in groups:
        if len(ranks) == world.size:
            return world
        handle = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        if world.rank in ranks:
            mine = Group(ranks.index(world.rank), len(ranks), ranks, _name(handle))
    return mine


def _name(handle: dist.ProcessGroup | None) -> GroupName | None:
    return None if handle is None else handle.group_name
