"""OwnExchange: what travels of the gradients where an optimizer's rule decides that, in the place of their sum.

Where it is not the sum that travels, backwards leave gradients on the rank that made them. A step then asks the rule
what each rank says of them, has the mean of that over data parallel taken at one bit a number (mpu/one_bit.py), and
puts this rank's part of it where the update finds a gradient. The server of a chunk is the rank that owns it from stage
1 on; at stage 0, where everybody owns everything, it is the rank that writes it to checkpoints.

What a rank owes lasts from step to step: it is in checkpoints, whole for each rank, and of each server. On another
number of ranks every one takes the mean of what the ranks owed, so that what they owe on average is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optim.rule import ParamGroup, Rule, Saying
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import FlatLayout
from megatron.zero.state import State
from megatron.zero.verdict import clip_factor
from mpu.collectives import all_gather_into, all_reduce
from mpu.grads import NORM_ROW
from mpu.groups import Groups
from mpu.one_bit import SIGNS_PER_BYTE, AddInputs, CompressedAllReduce, pack_bits, unpack_bits

OWED, OWED_TO_ALL = "worker_error", "server_error"
"""Kinds of state in a checkpoint, by their published names."""

NEGLIGIBLE = 1e-6
"""Of the mean of a parameter: a variance that is smaller counts as none. One bit says of a number what is usual in its
parameter, and an update divides that by the root of its own variance: by a thousandth of the usual one at least."""


class OwnExchange:
    """Of an engine whose rule has one. Everything but the properties is collective over the world."""

    def __init__(self, state: State, groups: Groups, rule: Rule, param_groups: Sequence[ParamGroup]) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        self.lines: list[Line] = []
        """One for each bucket, once the rule is compressed."""
        self._rests = False

    @property
    def is_on(self) -> bool:
        return self._rule.is_compressed

    def follow(self) -> None:
        """The rule was told another state: be as it wants it, and know nothing of before."""
        self.lines = [Line(bucket, self._groups, self._rule) for bucket in self._state.buckets
                      ] if self._rule.is_compressed else []
        self._leave_gradients()

    def _leave_gradients(self) -> None:
        for bucket in self._state.buckets:
            bucket.grads.stays = self.is_on and not self._rests
            bucket.has_said = bool(self.lines)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Between two steps: backwards inside sum their gradients, whatever travels in a step."""
        self._rests = True
        self._leave_gradients()
        try:
            yield
        finally:
            self._rests = False
            self._leave_gradients()

    def begin_step(self) -> str | None:
        """Before the first backward of a step. A remark, where the rule takes over."""
        self._rule.begin_step(self._state.counters.optimizer_steps, self._param_groups, self._size_of)
        if self._rule.is_compressed and not self.lines:
            self.follow()
            return self._remark()
        self._leave_gradients()
        return None

    def _size_of(self, kind: str) -> float:
        """The sum of a state, over the whole model."""
        total = torch.zeros((), dtype=torch.float64, device=self._state.buckets[0].device)
        for bucket in self._state.buckets:
            for segment in bucket.layout.segments(bucket.shard_group.rank):
                if segment.slot.partition is not None or self._groups.tp.rank == 0:
                    run = _at_hand(bucket, kind)[segment.shard_offset : segment.shard_offset + segment.count]
                    total += run.sum(dtype=torch.float64)
        return float(all_reduce(all_reduce(total, self._state.buckets[0].shard_group), self._groups.tp))

    def _remark(self) -> str:
        numbers = sum(slot.numel for line in self.lines for slot in line.layout.slots)
        silent = sum(line.silent for line in self.lines)
        quiet = f"; {silent} numbers that never had a gradient are left out" if silent else ""
        step = self._state.counters.optimizer_steps + 1
        return (f" {self._rule.name}: from step {step} on {self._rule.remark}: {numbers} on each tensor parallel "
                f"rank{quiet}")

    def __call__(self, factor: float, limit: float) -> tuple[float, float]:
        """What the gradient that the update finds is multiplied by, and the norm of what came, which is clipped to
        `limit`. `factor` makes a rank's own gradient."""
        norm = float(all_reduce(self._exchange(factor), self._groups.tp)) ** 0.5
        clipped = clip_factor(norm, limit)
        for line in self.lines:
            line.put(clipped)
        return clipped, norm

    def _exchange(self, factor: float) -> Tensor:
        """The square of the norm of what came, as far as this tensor parallel rank counts it."""
        for line in self.lines:
            line.mean.send_to_servers(line.sayings(self._rule, self._param_groups, factor))
        for line in self.lines:
            line.mean.reduce_and_send()
        square = torch.zeros((), dtype=torch.float64, device=self._state.buckets[0].device)
        for line in self.lines:
            line.mean.wait_for_result()
            square += (line.mean.squared_norms() * line.counted).sum()
        return square


class Line:
    """The exchange of one bucket."""

    def __init__(self, bucket: FlatBucket, groups: Groups, rule: Rule) -> None:
        self.bucket, self._first, self._dp = bucket, rule.states[0], groups.dp
        self.layout = FlatLayout(bucket.layout.slots, groups.dp.size)
        """A shard is a server's chunk, at stage 0 as well."""
        segments = [list(self.layout.segments(rank)) for rank in range(groups.dp.size)]
        rows = [_rows([segment.shard_offset for segment in each], self.layout.shard_numel) for each in segments]
        self.mean = CompressedAllReduce(groups.dp, rows, bucket.device)
        numbers = max(map(len, rows))
        self.counted = torch.tensor(
            [[float(groups.tp.rank == 0 or segment.slot.partition is not None) for segment in each] +
             [0.0] * (numbers - len(each)) for each in segments], dtype=torch.float64, device=bucket.device)
        """Segments that this tensor parallel rank counts in a norm."""
        self.hush(rule)
        self._clipped: float | None = None
        """What was said last, times this, is the first state; None: it is not known here."""

    def look_again(self, rule: Rule) -> None:
        """States have been changed by hand."""
        self._clipped = None
        self.hush(rule)

    def hush(self, rule: Rule) -> None:
        """Be silent of what never had a gradient worth speaking of, which that state is 0 for from now on."""
        own = _at_hand(self.bucket, rule.speaks_where)
        self._forget_negligible(own)
        spoken = pack_bits(own != 0)
        if not self.bucket.shard_group.is_solo:
            mine, spoken = spoken, spoken.new_empty(self.layout.numel // SIGNS_PER_BYTE)
            all_gather_into(spoken, mine, self._dp).wait()
        silent = pad(unpack_bits(spoken).logical_not(), (0, self.layout.numel - SIGNS_PER_BYTE * len(spoken)),
                     value=True)
        self.mean.exclude(silent)
        self.silent = int(silent.sum()) - (len(silent) - sum(slot.numel for slot in self.layout.slots))
        """Numbers of parameters that are not spoken of."""

    def _forget_negligible(self, own: Tensor) -> None:
        bucket, number = self.bucket, {slot.name: index for index, slot in enumerate(self.bucket.layout.slots)}
        runs = [(number[segment.slot.name], own[segment.shard_offset : segment.shard_offset + segment.count])
                for segment in bucket.layout.segments(bucket.shard_group.rank)]
        sums = torch.zeros(len(number), dtype=torch.float64, device=own.device)
        for index, run in runs:
            sums[index] += run.sum(dtype=torch.float64)
        sums = all_reduce(sums, bucket.shard_group)
        for index, run in runs:
            run.masked_fill_(run <= NEGLIGIBLE / bucket.layout.slots[index].numel * sums[index], 0.0)

    def _whole(self, kind: str) -> Tensor:
        """A state, of all chunks."""
        own = _at_hand(self.bucket, kind)
        if self.bucket.shard_group.is_solo:
            return pad(own, (0, self.layout.numel - len(own))) if len(own) < self.layout.numel else own
        whole = torch.empty(self.layout.numel, dtype=own.dtype, device=own.device)
        all_gather_into(whole, own, self._dp).wait()
        return whole

    def sayings(self, rule: Rule, param_groups: Sequence[ParamGroup], factor: float) -> AddInputs:
        """Has the rule say what this rank's gradients are, a place at a time."""
        before, everything = self._before(), FlatLayout(self.layout.slots)
        spans = [slice(*everything.group_span(0, number)) for number in range(len(param_groups))]

        def give(place: slice, owed: Tensor) -> None:
            for group, span in zip(param_groups, spans):
                start, stop = max(place.start, span.start), min(place.stop, span.stop)
                if start < stop:
                    here, within = slice(start, stop), slice(start - place.start, stop - place.start)
                    what = Saying(owed[within], self.bucket.grads.shard[here], partial(before, place, within))
                    rule.say(what, group, factor=factor)

        return give

    def _before(self) -> Callable[[slice, slice], Tensor]:
        """The first state, of what is within a place."""
        if self.bucket.shard_group.is_solo:
            own = _at_hand(self.bucket, self._first)
            return lambda place, within: own[place][within]
        if self._clipped is None:
            whole = self._whole(self._first)
            return lambda place, within: whole[place][within]
        said, clipped = self.mean.previous_result(), self._clipped
        return lambda place, within: said(place)[within].mul_(clipped)

    def put(self, clipped: float) -> None:
        """This rank's part is the gradient now."""
        self._clipped = clipped
        own = self.bucket.grads.shard[: self.bucket.layout.shard_numel]  # spent
        said = own if own.dtype == torch.float32 else torch.empty_like(own, dtype=torch.float32)
        self.mean.copy_result_to(said, None if self.bucket.shard_group.is_solo else self._dp.rank)
        self.bucket.grads.put(said)


def _at_hand(bucket: FlatBucket, kind: str) -> Tensor:
    found = bucket.kept.at_hand(kind)
    assert found is not None, "a rule with an exchange of its own keeps its states on the device"
    return found


def _rows(starts: Sequence[int], numel: int) -> list[int]:
    """Rows of segments that begin there; the first begins at 0, and padding belongs to the one before it."""
    ends = [*starts[1:], numel]
    return [(end - (start if number else 0)) // NORM_ROW for number, (start, end) in enumerate(zip(starts, ends))] \
        or [numel // NORM_ROW]
