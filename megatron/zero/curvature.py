"""Curvature of blocks: the largest eigenvalue of the loss's second derivative by the parameters of each block alone.

    w+, w-       the weights, moved by s v and by -s v
    H v        = (g(w+) - g(w-)) / (v . (w+ - w-))    g: the gradients of one forward and backward
    directions   the first is random, drawn by the place of each element; each other one is what the steepest so far
                 lacks to be an eigenvector, orthogonal to those that are known
    lambda       the eigenvalue of largest magnitude of H between the known directions, until it changes by less than
                 `tol`, or `max_iter` times. Where there are many, those of the largest and the smallest are kept

A difference of gradients asks nothing of the model but what a step does, so it works at every stage, with tensor
parallel layers, with recomputation, and with functions that torch cannot differentiate twice. The weights at work are
moved by way of their rounding (bucket.py), and are afterwards what they were; masters do not move.

Weights of 16 bits do not move by less than their last digit. So the digits that they lack beside their masters are
added before they are moved: then as many move as should, and the quotient is by how far they did. Gradients have few
digits as well, and where a loss is steep it bends within a short way: s follows what gradients do (`CHANGE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.bucket import FlatBucket, Rounds, publish
from megatron.zero.homes.shelf import WEIGHT, Shelf
from megatron.zero.layout import Segment
from mpu.collectives import all_reduce, broadcast_into
from mpu.draws import NormalInitializer, rng_key, strided_segments_of
from mpu.groups import Groups

CHANGE = {torch.float32: 1e-3, torch.float16: 1.5e-2, torch.bfloat16: 4e-2}
"""From w- to w+ gradients are to change by this share of their length: enough beside their own rounding."""
NEAREST, FIRST, FARTHEST = 1e-4, 1e-3, 1e-2
"""s, in the length of the weights: a direction may lie in few of them, for which that is far."""
ROOM = 4
"""Directions that are known at a time."""

Vector = Mapping[FlatBucket, Tensor]
"""This rank's part of a direction, fp32: [shard] of each bucket that the block has parameters in, 0 elsewhere."""
Parts = Mapping[FlatBucket, list[Segment]]
"""Where the parameters of a block are."""


@dataclass(frozen=True)
class Shifted:
    """A bucket's rounding for as long as its weights are moved."""

    bucket: FlatBucket
    inner: Rounds | None
    by: Tensor

    def __call__(self) -> None:
        if self.inner is not None:
            self.inner()
        kept, work = self.bucket.kept, self.bucket.work
        for part in kept.parts:
            with kept.open(part, [WEIGHT]) as found:
                lacking = found[WEIGHT] - found[WEIGHT].to(work.dtype)
            moved = torch.empty_like(lacking, dtype=torch.float32)
            work.read(WEIGHT, part.start, moved)
            work.write(WEIGHT, part.start, moved.add_(lacking).add_(self.by[part].to(moved.device)))

    def of_masters(self, part: slice, masters: Tensor) -> Tensor:
        raise AssertionError("nothing is checked while weights are moved")


@dataclass(frozen=True)
class Known:
    """A direction, of length 1 and orthogonal to others, and H times it."""

    direction: Vector
    image: Vector


class Curvature:
    """Of blocks, each with the parameters whose names begin with its own."""

    def __init__(self, buckets: Sequence[FlatBucket], groups: Groups, *, max_iter: int, tol: float,
                 stability: float) -> None:
        self._buckets, self._tp, self._world = buckets, groups.tp, groups.world
        self._max_iter, self._tol, self._stability = max_iter, tol, stability

    def eigenvalue(self, block: str, key: str, run: Callable[[], None]) -> float:
        """The one of largest magnitude. `run` makes the gradients of the loss with the weights as they are, and leaves
        them summed; `key` is what the first direction is drawn by. Collective."""
        parts = {bucket: [one for one in bucket.layout.segments(bucket.shard_group.rank)
                          if one.slot.name.startswith(f"{block}.")] for bucket in self._buckets
                 if any(slot.name.startswith(f"{block}.") for slot in bucket.layout.slots)}
        v = self._unit(parts, {bucket: self._drawn(bucket, segments, key) for bucket, segments in parts.items()})
        unit = self._length(parts, {bucket: _numbers(bucket, bucket.kept) for bucket in parts}) or 1.0
        wanted, s, found = CHANGE[self._buckets[0].work.dtype], FIRST * unit, 0.0
        known: list[Known] = []
        for _ in range(self._max_iter):
            image, change = self._image(parts, v, s, run)
            known.append(Known(v, image))
            matrix = self._between(parts, known)
            if not bool(matrix.isfinite().all()):
                return math.nan
            values, vectors = torch.linalg.eigh(matrix)  # in ascending order: the steepest is at an end
            place = int(values.abs().argmax())
            before, found = found, float(values[place])
            if found == 0 or abs(found - before) < self._tol * abs(found):
                break
            steepest = _mixed(known, vectors[:, place])
            if len(known) == ROOM:
                known = [_mixed(known, vectors[:, end]) for end in (0, -1)]
            v = self._unit(parts, self._lacking(parts, known, steepest, found))
            s = min(max(s * wanted / (change or wanted), NEAREST * unit), FARTHEST * unit)
        return found

    def _between(self, parts: Parts, known: Sequence[Known]) -> Tensor:
        """H between the known directions, [n, n], and symmetric. All ranks go on by what the first one finds, so that
        all end at once."""
        products = torch.tensor([[self._dot(parts, one.direction, other.image) for other in known] for one in known],
                                dtype=torch.float64, device=self._buckets[0].device)
        broadcast_into(products, 0, self._world).wait()
        return (products + products.T).cpu() / 2

    def _lacking(self, parts: Parts, known: Sequence[Known], steepest: Known, eigenvalue: float) -> Vector:
        rest = _sum([1.0, -eigenvalue], [steepest.image, steepest.direction])
        for one in known:
            rest = _sum([1.0, -self._dot(parts, one.direction, rest)], [rest, one.direction])
        return rest

    def _image(self, parts: Parts, v: Vector, length: float, run: Callable[[], None]) -> tuple[Vector, float]:
        """H v, by going so far to both sides; and by which share of their length gradients changed."""
        moved, turned = ({bucket: torch.zeros_like(values) for bucket, values in v.items()} for _ in range(2))
        size = 0.0
        for sign in (1, -1):
            with self._moved({bucket: values * (sign * length) for bucket, values in v.items()}):
                run()
                for bucket, values in moved.items():
                    values.add_(_numbers(bucket, bucket.work), alpha=sign)
            gradients = {bucket: _sums(bucket, segments) for bucket, segments in parts.items()}
            size += self._length(parts, gradients) / 2
            for bucket, values in turned.items():
                values.add_(gradients[bucket], alpha=sign)
        way = self._dot(parts, v, moved)
        return ({bucket: values / way if way else torch.zeros_like(values) for bucket, values in turned.items()},
                self._length(parts, turned) / size if size else 0.0)

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
            blocks = strided_segments_of(one.slot.shape, one.slot.partition, self._tp.rank, self._tp.size)
            NormalInitializer(rng_key(0, f"{key} {one.slot.name}"), 1.0, blocks)(place, one.slot_offset)
        return out

    def _unit(self, parts: Parts, v: Vector) -> Vector:
        length = self._length(parts, v) + self._stability
        return {bucket: values / length if length else values for bucket, values in v.items()}

    def _length(self, parts: Parts, v: Vector) -> float:
        return math.sqrt(self._dot(parts, v, v))

    def _dot(self, parts: Parts, one: Vector, other: Vector) -> float:
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


def _numbers(bucket: FlatBucket, shelf: Shelf) -> Tensor:
    """This rank's part of the weights on a shelf, of other blocks too."""
    out = torch.empty(bucket.layout.shard_numel, device=bucket.device)
    shelf.read(WEIGHT, 0, out)
    return out


def _sums(bucket: FlatBucket, segments: Sequence[Segment]) -> Tensor:
    """This rank's part of the mean gradient of a block."""
    out = torch.zeros(bucket.layout.shard_numel, device=bucket.device)
    for one in segments:
        place = slice(one.shard_offset, one.shard_offset + one.count)
        out[place] = bucket.grads.sums[place]
    return out.mul_(bucket.gradient_unit())


def _mixed(known: Sequence[Known], shares: Tensor) -> Known:
    return Known(_sum(shares.tolist(), [one.direction for one in known]),
                 _sum(shares.tolist(), [one.image for one in known]))


def _sum(shares: Sequence[float], vectors: Sequence[Vector]) -> Vector:
    found = {bucket: torch.zeros_like(values) for bucket, values in vectors[0].items()}
    for share, vector in zip(shares, vectors, strict=True):
        for bucket, values in found.items():
            values.add_(vector[bucket], alpha=share)
    return found
