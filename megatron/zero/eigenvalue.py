"""The largest Hessian eigenvalue of each block, for MoQ: by differences of gradients, at any stage.

    H v = (g(w+) - g(w-)) / (v . (w+ - w-)),   w+ and w- are the weights moved by s v and -s v

The first direction is random; each further one is the residual of the steepest so far, orthogonal to the known ones.
It ends when the eigenvalue changes by less than `tol`, or after `max_iter` directions. Gradient differences need no
double backward, so tensor parallelism and recomputation work. Weights move by way of their rounding (bucket.py) and
are restored afterwards; masters do not move. The step size s adapts to how much gradients change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket, ParamRounding, publish_masters
from megatron.zero.layout import Segment
from megatron.zero.offload.storage import WEIGHT, StoredShard
from mpu.collectives import all_reduce, broadcast_into
from mpu.groups import Groups
from mpu.weight_init import NormalInitializer, rng_key, strided_segments_of

TARGET_GRADIENT_CHANGE = {torch.float32: 1e-3, torch.float16: 1.5e-2, torch.bfloat16: 4e-2}
"""Target for the relative change of gradients from w- to w+: large against their rounding error."""
MIN_STEP, FIRST_STEP, MAX_STEP = 1e-4, 1e-3, 1e-2
"""s, relative to the norm of the weights. Small, because a direction may concentrate on few weights."""
MAX_DIRECTIONS = 4
"""Directions that are kept at a time."""

ShardedVector = Mapping[FlatBucket, Tensor]
"""This rank's part of a direction: fp32 [shard_numel] for each bucket of the block, 0 outside of the block."""
BlockSegments = Mapping[FlatBucket, list[Segment]]
"""This rank's segments of the parameters of a block."""


@dataclass(frozen=True)
class ShiftedRounding:
    """Replaces a bucket's rounding while its weights are shifted."""

    bucket: FlatBucket
    inner: ParamRounding | None
    shift: Tensor

    def __call__(self) -> None:
        if self.inner is not None:
            self.inner()
        master_state, param_shard = self.bucket.master_state, self.bucket.param_shard
        for chunk in master_state.chunks:
            with master_state.open(chunk, [WEIGHT]) as opened:
                cast_error = opened[WEIGHT] - opened[WEIGHT].to(param_shard.dtype)
            shifted = torch.empty_like(cast_error, dtype=torch.float32)
            param_shard.read(WEIGHT, chunk.start, shifted)
            param_shard.write(WEIGHT, chunk.start, shifted.add_(cast_error).add_(self.shift[chunk].to(shifted.device)))

    def round_masters(self, chunk: slice, masters: Tensor) -> Tensor:
        raise AssertionError("nothing is checked while weights are moved")


@dataclass(frozen=True)
class HessianDirection:
    """A direction, of norm 1 and orthogonal to the others, and H times it."""

    direction: ShardedVector
    hessian_product: ShardedVector


class HessianEigensolver:
    def __init__(self, buckets: Sequence[FlatBucket], groups: Groups, *, max_iter: int, tol: float,
                 stability: float) -> None:
        self._buckets, self._tp, self._world = buckets, groups.tp, groups.world
        self._max_iter, self._tol, self._stability = max_iter, tol, stability

    def eigenvalue(self, block: str, key: str, run: Callable[[], None]) -> float:
        """The eigenvalue of largest magnitude for the parameters whose names begin with `block`. Collective.

        `run` computes the reduced gradients of the loss at the current weights. `key` seeds the first direction.
        Returns nan if gradients are not finite."""
        parts = {bucket: [one for one in bucket.layout.segments(bucket.shard_group.rank)
                          if one.slot.name.startswith(f"{block}.")] for bucket in self._buckets
                 if any(slot.name.startswith(f"{block}.") for slot in bucket.layout.slots)}
        v = self._normalized(parts, {bucket: self._random_direction(bucket, segments, key)
                                     for bucket, segments in parts.items()})
        unit = self._norm(parts, {bucket: _read_weights(bucket, bucket.master_state) for bucket in parts}) or 1.0
        target, s, eigenvalue = TARGET_GRADIENT_CHANGE[self._buckets[0].param_shard.dtype], FIRST_STEP * unit, 0.0
        known: list[HessianDirection] = []
        for _ in range(self._max_iter):
            product, change = self._hessian_vector_product(parts, v, s, run)
            known.append(HessianDirection(v, product))
            products = torch.tensor([[self._dot(parts, one.direction, other.hessian_product) for other in known]
                                     for one in known], dtype=torch.float64, device=self._buckets[0].device)
            broadcast_into(products, 0, self._world).wait()  # so that all ranks stop at the same iteration
            matrix = (products + products.T).cpu() / 2  # H projected on the known directions, [n, n], symmetric
            if not bool(matrix.isfinite().all()):
                return math.nan
            values, vectors = torch.linalg.eigh(matrix)  # ascending: the largest magnitude is the first or the last
            place = int(values.abs().argmax())
            before, eigenvalue = eigenvalue, float(values[place])
            if eigenvalue == 0 or abs(eigenvalue - before) < self._tol * abs(eigenvalue):
                break
            steepest = _combine_directions(known, vectors[:, place])
            if len(known) == MAX_DIRECTIONS:
                known = [_combine_directions(known, vectors[:, end]) for end in (0, -1)]
            residual = _linear_combination([1.0, -eigenvalue], [steepest.hessian_product, steepest.direction])
            for one in known:
                residual = _linear_combination([1.0, -self._dot(parts, one.direction, residual)],
                                               [residual, one.direction])
            v = self._normalized(parts, residual)
            del residual  # a shard of fp32, before the next product
            s = min(max(s * target / (change or target), MIN_STEP * unit), MAX_STEP * unit)
        return eigenvalue

    def _hessian_vector_product(self, parts: BlockSegments, v: ShardedVector, length: float,
                                run: Callable[[], None]) -> tuple[ShardedVector, float]:
        """H v from gradients at weights shifted by `length` to both sides, and the relative change of the gradients."""
        shifts, changes = ({bucket: torch.zeros_like(values) for bucket, values in v.items()} for _ in range(2))
        size = 0.0
        for sign in (1, -1):
            with self._shifted_params({bucket: values * (sign * length) for bucket, values in v.items()}):
                run()
                for bucket, values in shifts.items():
                    values.add_(_read_weights(bucket, bucket.param_shard), alpha=sign)
            gradients = {bucket: _mean_gradient(bucket, segments) for bucket, segments in parts.items()}
            size += self._norm(parts, gradients) / 2
            for bucket, values in changes.items():
                values.add_(gradients[bucket], alpha=sign)
        distance = self._dot(parts, v, shifts)
        return ({bucket: values / distance if distance else torch.zeros_like(values)
                 for bucket, values in changes.items()}, self._norm(parts, changes) / size if size else 0.0)

    @contextmanager
    def _shifted_params(self, by: ShardedVector) -> Iterator[None]:
        before = {bucket: bucket.rounding for bucket in by}
        try:
            for bucket, values in by.items():
                bucket.rounding = ShiftedRounding(bucket, before[bucket], values)
            publish_masters(list(by))
            yield
        finally:
            for bucket, rounding in before.items():
                bucket.rounding = rounding
            publish_masters(list(by))

    def _random_direction(self, bucket: FlatBucket, segments: Sequence[Segment], key: str) -> Tensor:
        out = torch.zeros(bucket.layout.shard_numel, device=bucket.device)
        for one in segments:
            place = out[one.shard_offset : one.shard_offset + one.count]
            blocks = strided_segments_of(one.slot.shape, one.slot.partition, self._tp.rank, self._tp.size)
            NormalInitializer(rng_key(0, f"{key} {one.slot.name}"), 1.0, blocks)(place, one.slot_offset)
        return out

    def _normalized(self, parts: BlockSegments, v: ShardedVector) -> ShardedVector:
        length = self._norm(parts, v) + self._stability
        return {bucket: values / length if length else values for bucket, values in v.items()}

    def _norm(self, parts: BlockSegments, v: ShardedVector) -> float:
        return math.sqrt(self._dot(parts, v, v))

    def _dot(self, parts: BlockSegments, one: ShardedVector, other: ShardedVector) -> float:
        """The dot product over all elements of the block; parameters replicated over tensor parallel count once."""
        total = 0.0
        for bucket, segments in parts.items():
            sums = torch.zeros(2, dtype=torch.float64, device=bucket.device)
            for part in segments:
                place = slice(part.shard_offset, part.shard_offset + part.count)
                product = one[bucket][place].double() @ other[bucket][place].double()
                sums[int(part.slot.partition is not None)] += product
            replicated, sharded = all_reduce(sums, bucket.shard_group)
            total += float(replicated) + float(all_reduce(sharded, self._tp))
        return total


def _read_weights(bucket: FlatBucket, stored: StoredShard) -> Tensor:
    """This rank's shard of the weights in fp32, [shard_numel]; other blocks included."""
    out = torch.empty(bucket.layout.shard_numel, device=bucket.device)
    stored.read(WEIGHT, 0, out)
    return out


def _mean_gradient(bucket: FlatBucket, segments: Sequence[Segment]) -> Tensor:
    """This rank's shard of the mean gradient, [shard_numel]; 0 outside of the block."""
    out = torch.zeros(bucket.layout.shard_numel, device=bucket.device)
    for one in segments:
        place = slice(one.shard_offset, one.shard_offset + one.count)
        out[place] = bucket.grads.shard[place]
    return out.mul_(bucket.grad_mean_factor())


def _combine_directions(known: Sequence[HessianDirection], shares: Tensor) -> HessianDirection:
    return HessianDirection(_linear_combination(shares.tolist(), [one.direction for one in known]),
                            _linear_combination(shares.tolist(), [one.hessian_product for one in known]))


def _linear_combination(shares: Sequence[float], vectors: Sequence[ShardedVector]) -> ShardedVector:
    total = {bucket: torch.zeros_like(values) for bucket, values in vectors[0].items()}
    for share, vector in zip(shares, vectors, strict=True):
        for bucket, values in total.items():
            values.add_(vector[bucket], alpha=share)
    return total
