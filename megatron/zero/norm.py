"""The global gradient norm of flat shards, and where in them a number is not finite.

Every element of the model is counted once: shards are disjoint over data parallel, tensor-parallel slices over tensor
parallel, and what tensor parallelism replicates is counted by its first rank alone. Slots begin at rows (layout.py), so
the norms of rows are all that is needed of a gradient: they tell the norm, and which parameter is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import FlatLayout
from mpu.grads import NORM_ROW
from mpu.groups import Groups


class GradNorm:
    """Of the reduced gradients that this rank owns; with `whole`, of all that it has made itself."""

    def __init__(self, buckets: Sequence[FlatBucket], groups: Groups, *, unreduced: bool = False) -> None:
        self._buckets, self._unreduced = buckets, unreduced
        device = buckets[0].device if buckets else None  # of an engine that only evaluates
        shards = {bucket: range(bucket.layout.shards) if unreduced else [bucket.shard_group.rank] for bucket in buckets}
        self._shards = shards
        lengths = [len(shards[bucket]) * bucket.layout.shard_numel // NORM_ROW for bucket in buckets]
        self._row_norms = torch.zeros(sum(lengths), device=device)
        """The norm of each row of each shard, of the last step that was asked about."""
        self._row_norms_by_bucket = self._row_norms.split(lengths)
        self._row_is_counted = None if groups.tp.rank == 0 or not buckets else torch.cat(
            [_rows_counted_here(bucket.layout, rank) for bucket in buckets for rank in shards[bucket]]).to(device)

    def norm_squared(self) -> Tensor:
        """The square of the norm of what this rank counts, a 0-dimensional fp64 tensor; not finite where any of its
        gradients is not."""
        for bucket, rows in zip(self._buckets, self._row_norms_by_bucket, strict=True):
            assert bucket.grads.skip_reduction == self._unreduced, f"the gradients of {bucket.name} are of another kind"
            bucket.grads.row_norms(rows)
        # What another rank counts is still looked at: 0 times a number that is not finite is not a number.
        counted = self._row_norms if self._row_is_counted is None else self._row_norms * self._row_is_counted
        norm: Tensor = torch.linalg.vector_norm(counted, dtype=torch.float64)
        return norm.square()

    def first_nonfinite_param(self) -> str | None:
        """The first parameter with a gradient here that was not finite when `square` was last called."""
        on_host = self._row_norms.cpu().split([len(rows) for rows in self._row_norms_by_bucket])
        for bucket, rows in zip(self._buckets, on_host, strict=True):
            for rank, of_shard in zip(self._shards[bucket], rows.view(len(self._shards[bucket]), -1), strict=True):
                for segment in bucket.layout.segments(rank):
                    stop = segment.shard_offset + segment.count
                    if not of_shard[segment.shard_offset // NORM_ROW : -(-stop // NORM_ROW)].isfinite().all():
                        return segment.slot.name
        return None


def _rows_counted_here(layout: FlatLayout, rank: int) -> Tensor:
    """1 for each row of a shard that is a slice of a split parameter, 0 for those that tp rank 0 counts."""
    counts = torch.zeros(layout.shard_numel // NORM_ROW)
    for segment in layout.segments(rank):
        if segment.slot.partition is not None:
            counts[segment.shard_offset // NORM_ROW : -(-(segment.shard_offset + segment.count) // NORM_ROW)] = 1.0
    return counts
