"""Curvature of blocks: the largest eigenvalue of the loss's second derivative by the parameters of each block alone.

    v <- a random direction of length 1, drawn by the place of each element
    H v = (g(w + s v) - g(w - s v)) / 2 s        g: the gradients of one forward and backward
    lambda = v . H v,  v <- H v / |H v|          until lambda changes by less than `tol`, or `max_iter` times

A difference of gradients asks nothing of the model but what a step does, so it works at every stage, with tensor
parallel layers, with recomputation, and with functions that torch cannot differentiate twice. The weights at work are
moved by way of their rounding (bucket.py), and are afterwards what they were; masters do not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket, Rounds, publish
from megatron.zero.homes.shelf import WEIGHT
from megatron.zero.layout import Segment
from mpu.collectives import all_reduce
from mpu.draws import Normal, blocks_of, key_of
from mpu.groups import Group

SHIFT = {torch.float32: 1e-4}
"""How far weights are moved, in their length: a direction may lie in few of them, for which that is far."""
SHIFT_16 = 1e-3
"""Where they are 16 bits, in which less would be lost."""

Vector = Mapping[FlatBucket, Tensor]
"""This rank's part of a direction, fp32: [shard] of each bucket that the block has parameters in, 0 elsewhere."""


@dataclass(frozen=True)
class Shifted:
    """A bucket's rounding for as long as its weights are moved."""

    bucket: FlatBucket
    inner: Rounds | None
    by: Tensor
    is_ranks_own = False

    def __call__(self) -> None:
        if self.inner is not None:
            self.inner()
        work = self.bucket.work
        for part in work.parts:
            with work.open(part, [WEIGHT], writes=True) as kept:
                kept[WEIGHT].copy_(kept[WEIGHT].float() + self.by[part].to(kept[WEIGHT].device))

    def of_masters(self, part: slice, masters: Tensor) -> Tensor:
        raise AssertionError("nothing is checked while weights are moved")


class Curvature:
    """Of blocks, each with the parameters whose names begin with its own."""

    def __init__(self, buckets: Sequence[FlatBucket], tp: Group, *, max_iter: int, tol: float,
                 stability: float) -> None:
        self._buckets, self._tp = buckets, tp
        self._max_iter, self._tol, self._stability = max_iter, tol, stability

    def eigenvalue(self, block: str, key: str, run: Callable[[], None]) -> float:
        """The one of largest magnitude. `run` makes the gradients of the loss with the weights as they are, and leaves
        them summed; `key` is what the first direction is drawn by. Collective."""
        parts = {bucket: [one for one in bucket.layout.segments(bucket.shard_group.rank)
                          if one.slot.name.startswith(f"{block}.")] for bucket in self._buckets
                 if any(slot.name.startswith(f"{block}.") for slot in bucket.layout.slots)}
        v = self._unit(parts, {bucket: self._drawn(bucket, segments, key) for bucket, segments in parts.items()})
        weights = {bucket: self._masters(bucket, segments) for bucket, segments in parts.items()}
        length = SHIFT.get(self._buckets[0].work.dtype, SHIFT_16) * math.sqrt(self._dot(parts, weights, weights))
        found = 0.0
        for _ in range(self._max_iter):
            image = self._image(parts, v, length or 1.0, run)
            before, found = found, self._dot(parts, v, image)
            if found == 0 or not math.isfinite(found) or abs(found - before) < self._tol * abs(found):
                break
            v = self._unit(parts, image)
        return found

    def _image(self, parts: Mapping[FlatBucket, list[Segment]], v: Vector, length: float,
               run: Callable[[], None]) -> Vector:
        """H v."""
        found = {bucket: torch.zeros_like(values) for bucket, values in v.items()}
        for sign in (1, -1):
            with self._moved({bucket: values * (sign * length) for bucket, values in v.items()}):
                run()
            for bucket, segments in parts.items():
                factor = sign * bucket.gradient_unit() / (2 * length)
                for one in segments:
                    place = slice(one.shard_offset, one.shard_offset + one.count)
                    found[bucket][place] += bucket.grads.sums[place].to(found[bucket].device).float() * factor
        return found

    @contextmanager
    def _moved(self, by: Vector) -> Iterator[None]:
        before = {bucket: bucket.rounding for bucket in by}
        try:
            for bucket, values in by.items():
                bucket.rounding = Shifted(bucket, before[bucket], values)
            publish(list(by))
            yield
        finally:
            for bucket, rounding in before.items():
                bucket.rounding = rounding
            publish(list(by))

    def _drawn(self, bucket: FlatBucket, segments: Sequence[Segment], key: str) -> Tensor:
        out = torch.zeros(bucket.layout.shard_numel, device=bucket.device)
        for one in segments:
            place = out[one.shard_offset : one.shard_offset + one.count]
            blocks = blocks_of(one.slot.shape, one.slot.partition, self._tp.rank, self._tp.size)
            Normal(key_of(0, f"{key} {one.slot.name}"), 1.0, blocks)(place, one.slot_offset)
        return out

    def _masters(self, bucket: FlatBucket, segments: Sequence[Segment]) -> Tensor:
        out = torch.zeros(bucket.layout.shard_numel, device=bucket.device)
        for one in segments:
            bucket.kept.read(WEIGHT, one.shard_offset, out[one.shard_offset : one.shard_offset + one.count])
        return out

    def _unit(self, parts: Mapping[FlatBucket, list[Segment]], v: Vector) -> Vector:
        length = math.sqrt(self._dot(parts, v, v)) + self._stability
        return {bucket: values / length if length else values for bucket, values in v.items()}

    def _dot(self, parts: Mapping[FlatBucket, list[Segment]], one: Vector, other: Vector) -> float:
        """Over all elements of the block; what tensor parallel ranks all have counts once."""
        total = 0.0
        for bucket, segments in parts.items():
            sums = torch.zeros(2, dtype=torch.float64, device=bucket.device)
            for part in segments:
                place = slice(part.shard_offset, part.shard_offset + part.count)
                product = one[bucket][place].double() @ other[bucket][place].double()
                sums[int(part.slot.partition is not None)] += product
            whole, cut = all_reduce(sums, bucket.shard_group)
            total += float(whole) + float(all_reduce(cut, self._tp))
        return total
