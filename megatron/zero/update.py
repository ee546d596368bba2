"""Update: the rule over the tiles of all shards, and new weights published.

    Update           the weights are new when the call returns
    DelayedUpdate    the host updates beside the next forward and backward, which use the weights of before; those the
                     call made are published when the one after it begins (or when something has to be whole). Inexact:
                     a step's gradients are of weights that lack the step before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.optim.rule import ParamGroup, Part, Rule, Span, StepScalars
from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.ferry import Mark
from megatron.zero.homes.host import HostShelf
from megatron.zero.homes.memory import numbers
from megatron.zero.homes.shelf import HOST, WEIGHT, Home, Homes, Walk
from megatron.zero.renewal import Renewal, Tile
from megatron.zero.state import State
from megatron.zero.wholes import wholes
from mpu.collectives import all_reduce
from mpu.device import on_accelerator
from mpu.groups import Groups
from mpu.wire.interface import Op

Hypers = Sequence[Mapping[str, Any]]
"""The hyper-parameters of each group, as they are at this step."""


Scalars = Callable[[torch.device], StepScalars]
"""The numbers of a step, for one side."""


@dataclass(frozen=True)
class _Round:
    """Of a step through one home."""

    home: Home
    device: torch.device
    """Where its arithmetic is."""
    is_together: bool
    tiles: Sequence[Sequence[tuple[FlatBucket, slice]]]
    """What is updated at a time: everything where launches count, one part where it stays in the cache."""

    def walk(self) -> Walk:
        return self.home.walk([(bucket.kept, part) for bucket, part in tiles] for tiles in self.tiles)


class Update:
    def __init__(self, state: State, homes: Homes, groups: Groups, rule: Rule,
                 param_groups: Sequence[ParamGroup]) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        self._renewal = Renewal(homes, state.buckets)
        self._rounds = [self._round(home, [bucket for bucket in state.buckets if bucket.home is home])
                        for home in sorted({bucket.home for bucket in state.buckets}, key=lambda it: it.is_elsewhere)]
        """What is on the device comes first: it works at that beside the host."""
        self.is_together = all(each.is_together for each in self._rounds)
        self._is_split = {bucket: torch.tensor([slot.partition is not None for slot in bucket.layout.slots],
                                               device=bucket.device) for bucket in state.buckets}

    def _round(self, home: Home, buckets: Sequence[FlatBucket]) -> _Round:
        together = on_accelerator(buckets[0].device) and not home.is_elsewhere and \
            not any(map(self._renewal.crosses, buckets))
        parts = [(bucket, part) for bucket in buckets for part in bucket.kept.parts]
        return _Round(home, buckets[0].updates_on, together, [parts] if together else [[part] for part in parts])

    def __call__(self, scalars: Scalars, factor: float | None = None) -> None:
        """`factor` is 1 / divisor, where the host knows it: a rule that waits needs it."""
        self._state.changing = "step"
        for bucket in self._state.buckets:
            bucket.await_parameters()  # of a step before, in blocks that no forward has used since
        hypers, taken = self._hypers(), self._state.counters.optimizer_steps
        for each in self._rounds:
            at = scalars(each.device)
            with closing(each.walk()) as walk:
                for tiles, kept in zip(each.tiles, walk, strict=True):
                    new = [self._renewal.tile(bucket, part, numbers, bucket.grads.shard[part])
                           for (bucket, part), numbers in zip(tiles, kept, strict=True)]
                    self._renewal(new, written=self._step(new, hypers, at, factor, taken))
                    self._send([tile.bucket for tile in new if tile.part.stop == tile.bucket.layout.shard_numel])
        self._state.changing = None

    def _send(self, done: Sequence[FlatBucket]) -> None:
        if done:
            self._renewal.settle()
        for bucket in done:
            bucket.send()

    @property
    def is_under_way(self) -> bool:
        return False

    def finish(self) -> None:
        """It has."""

    def _hypers(self) -> Hypers:
        return [{name: value for name, value in group.items() if name != "params"} for group in self._param_groups]

    def _step(self, tiles: Sequence[Tile], hypers: Hypers, at: StepScalars, factor: float | None, taken: int) -> bool:
        """True: the new weights are where the tiles want them, too."""
        written = not self._rule.waits
        for number, hyper in enumerate(hypers):
            spans = [span for tile in tiles for span in self._spans(tile, number)]
            if not self._rule.waits:
                written &= not spans or self._rule.step_many(spans, hyper, at)
                continue
            assert factor is not None, "the step of a rule that waits is not deferred"
            for span in spans:
                self._rule.step(span, hyper, factor=factor, steps_taken=taken)
        return written

    def _spans(self, tile: Tile, group: int) -> Iterator[Span]:
        """The work of a rule on a tile for one hyper-parameter group: a span, or none."""
        start, stop = tile.bucket.layout.group_span(tile.bucket.shard_group.rank, group)
        start, stop = max(start, tile.part.start), min(stop, tile.part.stop)
        if start < stop:
            yield self._span(tile, group, slice(start, stop))
        elif not self._rule.elementwise:
            yield self._span(tile, group, slice(tile.part.start, tile.part.start))

    def _span(self, tile: Tile, group: int, span: slice) -> Span:
        bucket = tile.bucket
        parts = [] if self._rule.elementwise else [
            Part(index, start - span.start, stop - span.start)
            for index, start, stop in bucket.layout.slot_spans(bucket.shard_group.rank)
            if span.start <= start < span.stop]
        names = () if self._rule.elementwise else tuple(slot.name for slot in bucket.layout.slots)
        here = slice(span.start - tile.part.start, span.stop - tile.part.start)
        states = {kind: values[here] for kind, values in tile.kept.items() if kind != WEIGHT}
        narrow = None if tile.narrow is None else tile.narrow[here]
        return Span(group, tile.kept[WEIGHT][here], tile.grads[here], states, parts, len(bucket.layout.slots),
                    partial(self._of_slots, bucket, "sum"), narrow, partial(self._of_slots, bucket, "max"), names,
                    partial(wholes, bucket, self._groups.tp, group))

    def _of_slots(self, bucket: FlatBucket, op: Op, of_parts: Tensor) -> Tensor:
        """Sums or maxima over this rank's part of each parameter -> over the whole parameter."""
        if bucket.shard_group.is_solo and self._groups.tp.is_solo:
            return of_parts
        here = all_reduce(of_parts.to(bucket.device), bucket.shard_group, op)
        return torch.where(self._is_split[bucket], all_reduce(here, self._groups.tp, op), here).to(of_parts.device)


class DelayedUpdate(Update):
    """Of state on the host beside the device, by a rule that looks at one weight at a time."""

    def __init__(self, state: State, homes: Homes, groups: Groups, rule: Rule,
                 param_groups: Sequence[ParamGroup]) -> None:
        super().__init__(state, homes, groups, rule, param_groups)
        self._worker = ThreadPoolExecutor(1, "update")
        self._under_way: Future[None] | None = None
        self._fresh = {bucket: numbers(bucket.kept.numel, bucket.work.dtype, pinned=homes.pins)
                       for bucket in state.buckets}
        """New weights, until nobody uses the ones before."""
        self._leaving: list[Mark] = []
        """On their way to the device."""

    def __call__(self, scalars: Scalars, factor: float | None = None) -> None:
        assert self._under_way is None, "an update is under way"
        shelves = [bucket.kept for bucket in self._state.buckets if isinstance(bucket.kept, HostShelf)]
        for mark in self._leaving:
            mark.wait()
        tiles = []
        for bucket, shelf in zip(self._state.buckets, shelves, strict=True):
            grads = bucket.grads.hand_over()
            tiles += [Tile(bucket, part, shelf.taken(part), grads[part], self._fresh[bucket][part])
                      for part in shelf.parts]
        self._under_way = self._worker.submit(self._run, tiles, _kept(self._hypers()), scalars(HOST), factor,
                                              self._state.counters.optimizer_steps)
        for shelf in shelves:
            shelf.wait_for(self._under_way)

    def _run(self, tiles: Sequence[Tile], hypers: Hypers, at: StepScalars, factor: float | None, taken: int) -> None:
        for tile in tiles:
            if not self._step([tile], hypers, at, factor, taken):
                assert tile.narrow is not None
                tile.narrow.copy_(tile.kept[WEIGHT])

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    def finish(self) -> None:
        if self._under_way is None:
            return
        self._state.changing = "step"
        under_way, self._under_way = self._under_way, None
        under_way.result()
        marks = []
        for bucket in self._state.buckets:
            bucket.await_parameters()  # of the update before, if no forward came between
            marks.append(self._renewal.bring(bucket, self._fresh[bucket]))
            self._send([bucket])
        self._leaving = [mark for mark in marks if mark is not None]
        self._state.changing = None


def _kept(hypers: Hypers) -> Hypers:
    """As they are now: a learning rate may be a tensor, which schedulers change in place."""
    return [{name: value.clone() if isinstance(value, Tensor) else value for name, value in hyper.items()}
            for hyper in hypers]
