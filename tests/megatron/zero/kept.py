"""What an engine keeps of a bucket, wherever it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.shelf import WEIGHT


def kept(bucket: FlatBucket, kind: str) -> Tensor:
    """A copy of all numbers of one kind."""
    out = torch.empty(bucket.kept.numel, dtype=bucket.kept.dtype)
    bucket.kept.read(kind, 0, out)
    return out


def master(bucket: FlatBucket) -> Tensor:
    return kept(bucket, WEIGHT)


def work(bucket: FlatBucket) -> Tensor:
    """A copy of the rank's part of the weights at work."""
    out = torch.empty(bucket.work.numel, dtype=bucket.work.dtype)
    bucket.work.read(WEIGHT, 0, out)
    return out


def states(bucket: FlatBucket) -> list[Tensor]:
    """Of the optimizer."""
    return [kept(bucket, kind) for kind in bucket.kept.kinds if kind != WEIGHT]


def change(bucket: FlatBucket, kind: str, how: Callable[[Tensor], object]) -> None:
    """Do something to all numbers of one kind, in place."""
    for part in bucket.kept.parts:
        with bucket.kept.open(part, [kind], writes=True) as numbers:
            how(numbers[kind])
