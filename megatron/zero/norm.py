"""The global gradient norm and what follows from it: clip factor and overflow.

Every element of the model is counted once: shards are disjoint over data parallel, tensor-parallel slices over tensor
parallel, and what tensor parallelism replicates is counted by its first rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

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
        counts = segment.slot.partition is not None or tp.rank == 0
        # What another rank counts is still looked at: 0 times a number that is not finite is not a number.
        total = total.to(grad.device) + sum_of_squares(grad) * (1.0 if counts else 0.0)
    return total


class Exchange(NamedTuple):
    """What all ranks know after one exchange."""

    norm: float
    """Over every rank's share; inf or nan when any element anywhere is."""
    alike: bool
    """All gave the same trace."""
    objections: bool
    """Some rank objects to the step."""


def global_norm(local: Tensor, shard: Group, replicas: Group, tp: Group, trace: int = 0, objects: bool = False,
                ) -> Exchange:
    numbers = torch.tensor([0.0, trace, trace * trace, objects], dtype=torch.float64, device=local.device)
    numbers[0] = local
    numbers = all_reduce(all_reduce(numbers, shard), tp)
    if not replicas.is_solo:  # they have the same norm, and opinions of their own
        numbers[3] = all_reduce(numbers[3:], replicas)[0]
    squares, traces, squared_traces, objections = numbers.tolist()
    return Exchange(math.sqrt(squares), squared_traces * shard.size * tp.size == traces * traces, objections > 0)


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most `limit` (0: no limit)."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0
