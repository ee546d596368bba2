"""The largest Hessian eigenvalue of each block, for MoQ: by differences of gradients, at any stage.

    H v = (g(w+) - g(w-)) / (v . (w+ - w-)),   w+ and w- are the weights moved by s v and -s v

The first direction is random; each further one is the residual of the steepest so far, orthogonal to the known ones.
It ends when the eigenvalue changes by less than `tol`, or after `max_iter` directions. Gradient differences need no
double backward, so tensor parallelism and recomputation work. Weights move by way of their rounding (bucket.py) and
are restored afterwards; masters do not move. The step size s adapts to how much gradients change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket, ParamRounding, publish_masters
from megatron.zero.layout import Segment
from megatron.zero.offload.storage import WEIGHT, StoredShard
from mpu.collectives import all_reduce, broadcast_into
from mpu.groups import Group, Groups
from mpu.weight_init import NormalInitializer, rng_key, strided_segments_of

# Target for the relative change of gradients from w- to w+: large against their rounding error.
TARGET_GRADIENT_CHANGE = {torch.float32: 1e-3, torch.float16: 1.5e-2, torch.bfloat16: 4e-2}
# s, relative to the norm of the weights. Small, because a direction may concentrate on few weights.
MIN_STEP, FIRST_STEP, MAX_STEP = 1e-4, 1e-3, 1e-2
MAX_DIRECTIONS = 4  # directions that are kept at a time


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


class HessianEigensolver:
    def __init__(self, buckets: Sequence[FlatBucket], groups: Groups, *, max_iter: int, tol: float,
                 stability: float) -> None:
        self._buckets, self._tp, self._world = buckets, groups.tp, groups.world
        self._max_iter, self._tol, self._stability = max_iter, tol, stability

    def eigenvalue(self, block: str, key: str, run: Callable[[], None]) -> float:
        """The eigenvalue of largest magnitude for the parameters whose names begin with `block`. Collective.

        `run` computes the reduced gradients of the loss at the current weights. `key` seeds the first direction.
        Returns nan if gradients are not finite."""
        vectors = BlockVectors(self._buckets, block, self._tp)
        v = self._normalized(vectors, vectors.random(key))
        unit = vectors.norm(vectors.read(lambda bucket: bucket.master_state)) or 1.0
        target, s, eigenvalue = TARGET_GRADIENT_CHANGE[self._buckets[0].param_shard.dtype], FIRST_STEP * unit, 0.0
        known: list[Tensor] = []  # [2, numel] each: a direction, of norm 1 and orthogonal to the others; and H times it
        for _ in range(self._max_iter):
            product, change = self._hessian_vector_product(vectors, v, s, run)
            known.append(torch.stack([v, product]))
            products = torch.tensor([[vectors.dot(one[0], other[1]) for other in known] for one in known],
                                    dtype=torch.float64, device=self._buckets[0].device)
            broadcast_into(products, 0, self._world).wait()  # so that all ranks stop at the same iteration
            matrix = (products + products.T).cpu() / 2  # H projected on the known directions, [n, n], symmetric
            if not bool(matrix.isfinite().all()):
                return math.nan
            values, shares = torch.linalg.eigh(matrix)  # ascending: the largest magnitude is the first or the last
            place = int(values.abs().argmax())
            before, eigenvalue = eigenvalue, float(values[place])
            if eigenvalue == 0 or abs(eigenvalue - before) < self._tol * abs(eigenvalue):
                break
            steepest = _linear_combination(shares[:, place].tolist(), known)
            if len(known) == MAX_DIRECTIONS:
                known = [_linear_combination(shares[:, end].tolist(), known) for end in (0, -1)]
            residual = _linear_combination([1.0, -eigenvalue], [steepest[1], steepest[0]])
            for one in known:
                residual = _linear_combination([1.0, -vectors.dot(one[0], residual)], [residual, one[0]])
            v = self._normalized(vectors, residual)
            del product, residual  # shards of fp32, before the next product
            s = min(max(s * target / (change or target), MIN_STEP * unit), MAX_STEP * unit)
        return eigenvalue

    def _hessian_vector_product(self, vectors: BlockVectors, v: Tensor, length: float,
                                run: Callable[[], None]) -> tuple[Tensor, float]:
        """H v from gradients at weights shifted by `length` to both sides, and the relative change of the gradients."""
        shift, change, size = torch.zeros_like(v), torch.zeros_like(v), 0.0
        for sign in (1, -1):
            with vectors.shifted_params(v * (sign * length)):
                run()
                shift.add_(vectors.read(lambda bucket: bucket.param_shard), alpha=sign)
            gradient = vectors.mean_gradient()
            size += vectors.norm(gradient) / 2
            change.add_(gradient, alpha=sign)
        distance = vectors.dot(v, shift)
        return (change / distance if distance else torch.zeros_like(v)), vectors.norm(change) / size if size else 0.0

    def _normalized(self, vectors: BlockVectors, v: Tensor) -> Tensor:
        length = vectors.norm(v) + self._stability
        return v / length if length else v


class BlockVectors:
    """Vectors over the parameters of one block: this rank's shards of its buckets, concatenated, in fp32 [numel]; 0
    outside of the block."""

    def __init__(self, buckets: Sequence[FlatBucket], block: str, tp: Group) -> None:
        self._tp, self._device, self._segments = tp, buckets[0].device, dict[FlatBucket, list[Segment]]()
        for bucket in buckets:
            if any(slot.name.startswith(f"{block}.") for slot in bucket.layout.slots):
                self._segments[bucket] = [one for one in bucket.layout.segments(bucket.shard_group.rank)
                                          if one.slot.name.startswith(f"{block}.")]

    def _by_bucket(self, v: Tensor) -> Iterator[tuple[FlatBucket, Tensor]]:
        return zip(self._segments, v.split([bucket.layout.shard_numel for bucket in self._segments]), strict=True)

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(bucket.layout.shard_numel for bucket in self._segments), device=self._device)

    def random(self, key: str) -> Tensor:
        v = self._zeros()
        for bucket, own in self._by_bucket(v):
            for one in self._segments[bucket]:
                blocks = strided_segments_of(one.slot.shape, one.slot.partition, self._tp.rank, self._tp.size)
                draw = NormalInitializer(rng_key(0, f"{key} {one.slot.name}"), 1.0, blocks)
                draw(own[one.shard_range], one.slot_offset)
        return v

    def read(self, shard_of: Callable[[FlatBucket], StoredShard]) -> Tensor:
        """The weights; other blocks of the same buckets included."""
        v = self._zeros()
        for bucket, own in self._by_bucket(v):
            shard_of(bucket).read(WEIGHT, 0, own)
        return v

    def mean_gradient(self) -> Tensor:
        v = self._zeros()
        for bucket, own in self._by_bucket(v):
            for one in self._segments[bucket]:
                own[one.shard_range] = bucket.grads.shard[one.shard_range]
            own.mul_(bucket.grad_mean_factor())
        return v

    def norm(self, v: Tensor) -> float:
        return math.sqrt(self.dot(v, v))

    def dot(self, one: Tensor, other: Tensor) -> float:
        """The dot product over all elements of the block; parameters replicated over tensor parallel count once."""
        total = 0.0
        for (bucket, mine), (_, theirs) in zip(self._by_bucket(one), self._by_bucket(other), strict=True):
            sums = torch.zeros(2, dtype=torch.float64, device=bucket.device)
            for part in self._segments[bucket]:
                product = mine[part.shard_range].double() @ theirs[part.shard_range].double()
                sums[int(part.slot.partition is not None)] += product
            replicated, sharded = all_reduce(sums, bucket.shard_group)
            total += float(replicated) + float(all_reduce(sharded, self._tp))
        return total

    @contextmanager
    def shifted_params(self, by: Tensor) -> Iterator[None]:
        before = {bucket: bucket.rounding for bucket in self._segments}
        try:
            for bucket, shift in self._by_bucket(by):
                bucket.rounding = ShiftedRounding(bucket, before[bucket], shift)
            publish_masters(list(before))
            yield
        finally:
            for bucket, rounding in before.items():
                bucket.rounding = rounding
            publish_masters(list(before))


def _linear_combination(shares: Sequence[float], vectors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(vectors[0])
    for share, vector in zip(shares, vectors, strict=True):
        total.add_(vector, alpha=share)
    return total
