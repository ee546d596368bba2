"""The global gradient norm and what follows from it: clip factor and overflow.

Every element of the model is counted once: shards are disjoint over data parallel, tensor-parallel slices over tensor
parallel, and what tensor parallelism replicates is counted by its first rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.zero.layout import Segment
from mpu.collectives import all_reduce
from mpu.grads import sum_of_squares
from mpu.groups import Group


def square_sum(parts: Iterable[tuple[Segment, Tensor]], tp: Group) -> Tensor:
    """fp64 sum of squares of this rank's share: (segment, its run of the gradient shard) pairs."""
    total = torch.zeros((), dtype=torch.float64)
    for segment, grad in parts:
        if segment.slot.partition is not None or tp.rank == 0:
            total = total.to(grad.device) + sum_of_squares(grad)
    return total


def global_norm(local: Tensor, shard: Group, tp: Group) -> float:
    """The norm over every rank's share; inf or nan when any element anywhere is."""
    return math.sqrt(all_reduce(all_reduce(local, shard), tp).item())


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most `limit` (0: no limit)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0
