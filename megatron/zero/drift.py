"""Drift: weights at work of ranks that step by themselves for a while (optim/zero_one.py), made of masters that all of
them have in common and of what the steps of this one have come to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.optim.rule import ParamGroup, Rule
from megatron.zero.bucket import FlatBucket
from megatron.zero.homes.shelf import WEIGHT
from mpu.device import on_accelerator

IN_CACHE = 2**18
"""Weights that a CPU works on at a time."""
AT_A_TIME = 2**24
"""Others, so that what is between them and the masters takes little memory."""


class Drift:
    """Of one bucket, whose states are whole and on the device."""

    def __init__(self, bucket: FlatBucket, rule: Rule, param_groups: Sequence[ParamGroup]) -> None:
        self._bucket, self._rule, self._param_groups = bucket, rule, param_groups
        self._tile = AT_A_TIME if on_accelerator(bucket.device) else IN_CACHE

    @property
    def is_ranks_own(self) -> bool:
        return self._rule.has_drifted

    def __call__(self) -> None:
        """Make this rank's weights at work of the masters."""
        kept = self._bucket.kept
        for part in kept.parts if self.is_ranks_own else ():
            with kept.open(part, [WEIGHT]) as found:
                for start in range(part.start, part.stop, self._tile):
                    tile = slice(start, min(start + self._tile, part.stop))
                    masters = found[WEIGHT][tile.start - part.start : tile.stop - part.start]
                    self._bucket.work.write(WEIGHT, start, self.of_masters(tile, masters))

    def of_masters(self, part: slice, masters: Tensor) -> Tensor:
        """What a part of the masters is at work."""
        dtype = self._bucket.work.dtype
        if not self.is_ranks_own:
            return masters.to(dtype)
        weights = masters.to(dtype, copy=True)
        for number, group in enumerate(self._param_groups):
            start, stop = self._bucket.layout.group_span(self._bucket.shard_group.rank, number)
            span = slice(max(start, part.start), min(stop, part.stop))
            if span.start < span.stop:
                here = slice(span.start - part.start, span.stop - part.start)
                states = {kind: self._state(kind)[span] for kind in self._rule.states}
                weights[here] = self._rule.at_work(number, masters[here], states, group)
        return weights

    def _state(self, kind: str) -> Tensor:
        found = self._bucket.kept.at_hand(kind)
        assert found is not None, "a rule whose steps may be a rank's own keeps its states on the device"
        return found
