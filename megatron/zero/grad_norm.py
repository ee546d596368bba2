"""The norm of the gradients in a step. It counts each element of the model once; row norms also tell which parameter is
not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import FlatLayout
from mpu.grads import NORM_ROW
from mpu.groups import Groups


class GradNorm:
    """The norm of the reduced gradients in this rank's shards; with `unreduced`, of its full local gradients."""

    def __init__(self, buckets: Sequence[FlatBucket], groups: Groups, *, unreduced: bool = False) -> None:
        self._buckets, self.unreduced = buckets, unreduced
        # Replicas hold equal gradients, which the first one counts.
        self._counts_here = unreduced or not buckets or buckets[0].replica_group.rank == 0
        device = buckets[0].device if buckets else None  # an engine without optimizer has no trainable buckets
        self._shards = {bucket: range(bucket.layout.shards) if unreduced else [bucket.shard_group.rank]
                        for bucket in buckets}
        lengths = [len(self._shards[bucket]) * bucket.layout.shard_numel // NORM_ROW for bucket in buckets]
        # The norm of each row of NORM_ROW elements of each shard, from the last `norm_squared`.
        self._row_norms = torch.zeros(sum(lengths), device=device)
        self._row_norms_by_bucket = self._row_norms.split(lengths)
        self._row_is_counted = None if groups.tp.rank == 0 or not buckets else torch.cat(
            [_rows_counted_here(bucket.layout, rank) for bucket in buckets for rank in self._shards[bucket]]).to(device)

    def norm_squared(self) -> Tensor | float:
        """The squared norm of the rows that this rank counts, a 0-dimensional fp64 tensor. It is not finite if any
        gradient on this rank is not. 0.0 if another replica counts them."""
        for bucket, rows in zip(self._buckets, self._row_norms_by_bucket, strict=True):
            assert bucket.grads.skip_reduction == self.unreduced, f"the gradients of {bucket.name} are of another kind"
            bucket.grads.row_norms(rows)
        # Rows that another rank counts are multiplied by 0, not dropped: 0 * inf is nan, so overflows still show.
        counted = self._row_norms if self._row_is_counted is None else self._row_norms * self._row_is_counted
        norm: Tensor = torch.linalg.vector_norm(counted, dtype=torch.float64)
        return norm.square() if self._counts_here else 0.0

    def first_nonfinite_param(self) -> str | None:
        """The first parameter whose gradient on this rank was not finite at the last `norm_squared`."""
        on_host = self._row_norms.cpu().split([len(rows) for rows in self._row_norms_by_bucket])
        for bucket, rows in zip(self._buckets, on_host, strict=True):
            for rank, of_shard in zip(self._shards[bucket], rows.view(len(self._shards[bucket]), -1), strict=True):
                for segment in bucket.layout.segments(rank):
                    stop = segment.shard_offset + segment.count
                    if not of_shard[segment.shard_offset // NORM_ROW : -(-stop // NORM_ROW)].isfinite().all():
                        return segment.slot.name
        return None


def _rows_counted_here(layout: FlatLayout, rank: int) -> Tensor:
    """[rows of the shard]: 1 for slices of tensor-parallel parameters, 0 for replicated ones, which tp rank 0
    counts."""
    counts = torch.zeros(layout.shard_numel // NORM_ROW)
    for segment in layout.segments(rank):
        if segment.slot.partition is not None:
            counts[segment.shard_offset // NORM_ROW : -(-(segment.shard_offset + segment.count) // NORM_ROW)] = 1.0
    return counts
