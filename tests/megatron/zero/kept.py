"""What an engine keeps of a bucket, wherever it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket
from megatron.zero.offload.storage import WEIGHT


def kept(bucket: FlatBucket, kind: str) -> Tensor:
    """A copy of all numbers of one kind."""
    out = torch.empty(bucket.master_state.numel, dtype=bucket.master_state.dtype)
    bucket.master_state.read(kind, 0, out)
    return out


def master(bucket: FlatBucket) -> Tensor:
    return kept(bucket, WEIGHT)


def work(bucket: FlatBucket) -> Tensor:
    """A copy of the rank's part of the weights at work."""
    out = torch.empty(bucket.param_shard.numel, dtype=bucket.param_shard.dtype)
    bucket.param_shard.read(WEIGHT, 0, out)
    return out


def states(bucket: FlatBucket) -> list[Tensor]:
    """Of the optimizer."""
    return [kept(bucket, kind) for kind in bucket.master_state.kinds if kind != WEIGHT]


def change(bucket: FlatBucket, kind: str, how: Callable[[Tensor], object]) -> None:
    """Do something to all numbers of one kind, in place."""
    for part in bucket.master_state.chunks:
        with bucket.master_state.open(part, [kind], writes=True) as numbers:
            how(numbers[kind])
