"""Compressed gradient exchange with error feedback, for 1-bit Adam and 1-bit LAMB; it replaces the all-reduce.

Once the rule is compressed, backward leaves gradients on each rank. A step asks the rule for its compression inputs,
exchanges their mean at one bit per element (mpu/compressed_all_reduce.py), and stores this rank's part as the gradient.
The errors (`worker_error`, `server_error`) are in checkpoints; on another number of ranks each takes the mean of the
old worker errors. Elements whose variance is negligible are masked: one bit cannot represent zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.optim.one_bit import OneBitRule
from megatron.optim.rule import ParamGroup
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import FlatLayout
from megatron.zero.state import EngineState
from megatron.zero.step_result import clip_factor
from mpu.collectives import all_gather_into, all_reduce
from mpu.compressed_all_reduce import SIGNS_PER_BYTE, AddInputs, CompressedAllReduce, pack_bits, unpack_bits
from mpu.grads import NORM_ROW
from mpu.groups import Groups

# Kinds of state in a checkpoint, by their published names.
WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"

# A variance below this share of the parameter's mean variance counts as zero. One bit gives each element the typical
# magnitude of its parameter; the update divides it by the element's sqrt(variance), so by at least 1/1000 of typical.
NEGLIGIBLE_VARIANCE = 1e-6


class CompressedGradExchange:
    """The exchange of one engine. All methods are collective over the world; properties are local."""

    def __init__(self, state: EngineState, groups: Groups, rule: OneBitRule,
                 param_groups: Sequence[ParamGroup]) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        # One for each bucket, once the rule is compressed.
        self.bucket_exchanges: list[CompressedBucketExchange] = []

    def sync_with_rule(self) -> None:
        """The state of the rule was replaced: drop all history, and set up the exchange if the rule is compressed."""
        self.bucket_exchanges = [CompressedBucketExchange(bucket, self._groups)
                                 for bucket in self._state.buckets] if self._rule.is_compressed else []
        self._set_skip_reduction()

    def _set_skip_reduction(self, *, is_paused: bool = False) -> None:
        for bucket in self._state.buckets:
            bucket.grads.skip_reduction = self._rule.is_compressed and not is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Between two steps: backward passes inside reduce their gradients as without compression."""
        self._set_skip_reduction(is_paused=True)
        try:
            yield
        finally:
            self._set_skip_reduction()

    def begin_step(self) -> str | None:
        """Call it before the first backward of a step. Returns a note if compression begins with this step."""
        self._rule.begin_step(self._state.counters.optimizer_steps, self._param_groups, self._state_sum)
        if self._rule.is_compressed and not self.bucket_exchanges:
            self.sync_with_rule()
            numbers = sum(slot.numel for exchange in self.bucket_exchanges for slot in exchange.layout.slots)
            masked = sum(exchange.masked_numel for exchange in self.bucket_exchanges)
            masked_note = f"; {masked} numbers that never had a gradient are left out" if masked else ""
            return (f" {self._rule.name}: from step {self._state.counters.optimizer_steps + 1} on "
                    "the variance is frozen and the momentum travels at one bit a number: "
                    f"{numbers} on each tensor parallel rank{masked_note}")
        self._set_skip_reduction()
        return None

    def _state_sum(self, kind: str) -> float:
        """The sum of an optimizer state over the whole model."""
        total = torch.zeros((), dtype=torch.float64, device=self._state.buckets[0].device)
        for bucket in self._state.buckets:
            for segment in bucket.layout.segments(bucket.shard_group.rank):
                if segment.slot.partition is not None or self._groups.tp.rank == 0:
                    total += _state_on_device(bucket, kind)[segment.shard_range].sum(dtype=torch.float64)
        return float(all_reduce(all_reduce(total, self._state.buckets[0].shard_group), self._groups.tp))

    def __call__(self, grad_multiplier: float, max_norm: float) -> tuple[float, float]:
        """Exchange and store the mean gradient of each bucket. Returns (factor for the update to apply, norm).

        `grad_multiplier` unscales a rank's own gradient. The factor clips the norm of the result to `max_norm`."""
        # Three loops: the sends of all buckets overlap.
        for exchange in self.bucket_exchanges:
            exchange.one_bit_mean.send_to_servers(
                exchange.compression_inputs(self._rule, self._param_groups, grad_multiplier))
        for exchange in self.bucket_exchanges:
            exchange.one_bit_mean.reduce_and_send()
        square = torch.zeros((), dtype=torch.float64, device=self._state.buckets[0].device)
        for exchange in self.bucket_exchanges:
            exchange.one_bit_mean.wait_for_result()
            square += (exchange.one_bit_mean.squared_norms() * exchange.counts_in_norm).sum()
        norm = float(all_reduce(square, self._groups.tp)) ** 0.5  # each rank has summed what the others do not count
        clip = clip_factor(norm, max_norm)
        for exchange in self.bucket_exchanges:
            exchange.set_mean_gradient(clip)
        return clip, norm


class CompressedBucketExchange:
    def __init__(self, bucket: FlatBucket, groups: Groups) -> None:
        self.bucket, self._dp = bucket, groups.dp
        # Cut into one shard per rank at every stage: each rank is the server of one chunk.
        self.layout = FlatLayout(bucket.layout.slots, groups.dp.size)
        segments = [list(self.layout.segments(rank)) for rank in range(groups.dp.size)]
        rows = []  # of NORM_ROW elements, per segment; padding belongs to the segment before it
        for each in segments:
            bounds = [0, *(segment.shard_offset for segment in each[1:]), self.layout.shard_numel]
            rows.append([(stop - start) // NORM_ROW for start, stop in pairwise(bounds)])
        self.one_bit_mean = CompressedAllReduce(groups.dp, rows, bucket.device)
        numbers = max(map(len, rows))
        # [ranks, segments]: 1 for segments that this tensor parallel rank counts in a norm, otherwise 0.
        self.counts_in_norm = torch.tensor(
            [[float(groups.tp.rank == 0 or segment.slot.partition is not None) for segment in each] +
             [0.0] * (numbers - len(each)) for each in segments], dtype=torch.float64, device=bucket.device)
        self.mask_unused_elements()
        # The last result times this is the momentum of all ranks. None: unknown, it has to be gathered.
        self._last_clip: float | None = None

    def mask_unused_elements(self) -> None:
        """Exclude elements whose variance is negligible, and set their variance to 0."""
        own = _state_on_device(self.bucket, "exp_avg_sq")
        segments = [(index, own[start:stop])
                    for index, start, stop in self.bucket.layout.slot_ranges(self.bucket.shard_group.rank)]
        sums = torch.zeros(len(self.layout.slots), dtype=torch.float64, device=own.device)
        for index, values in segments:
            sums[index] += values.sum(dtype=torch.float64)
        sums = all_reduce(sums, self.bucket.shard_group)
        for index, values in segments:
            values.masked_fill_(values <= NEGLIGIBLE_VARIANCE / self.layout.slots[index].numel * sums[index], 0.0)
        packed_mask = pack_bits(own != 0)
        if not self.bucket.shard_group.is_solo:
            mine, packed_mask = packed_mask, packed_mask.new_empty(self.layout.numel // SIGNS_PER_BYTE)
            all_gather_into(packed_mask, mine, self._dp).wait()
        masked = pad(unpack_bits(packed_mask).logical_not(), (0, self.layout.numel - SIGNS_PER_BYTE * len(packed_mask)),
                     value=True)
        self.one_bit_mean.exclude(masked)
        # Excluded elements of parameters, without padding.
        self.masked_numel = int(masked.sum()) - (len(masked) - sum(slot.numel for slot in self.layout.slots))

    def compression_inputs(self, rule: OneBitRule, param_groups: Sequence[ParamGroup],
                           grad_multiplier: float) -> AddInputs:
        """A function that adds the rule's inputs for one slice of the bucket, made from this rank's gradients."""
        momentum, unsharded = self._momentum_reader(), FlatLayout(self.layout.slots)
        group_ranges = [slice(*unsharded.group_range(0, number)) for number in range(len(param_groups))]

        def add_inputs(place: slice, error: Tensor) -> None:
            for group, group_range in zip(param_groups, group_ranges):
                start, stop = max(place.start, group_range.start), min(place.stop, group_range.stop)
                if start < stop:
                    within = slice(start - place.start, stop - place.start)
                    rule.add_compression_input(error[within], momentum(place, within),
                                               self.bucket.grads.shard[start:stop], group, factor=grad_multiplier)

        return add_inputs

    def _momentum_reader(self) -> Callable[[slice, slice], Tensor]:
        """A function (slice of the bucket, slice within it) -> momentum. May gather it: collective."""
        own = _state_on_device(self.bucket, "exp_avg")
        if self.bucket.shard_group.is_solo:
            return lambda place, within: own[place][within]
        if self._last_clip is None:
            gathered = torch.empty(self.layout.numel, dtype=own.dtype, device=own.device)
            all_gather_into(gathered, own, self._dp).wait()
            return lambda place, within: gathered[place][within]
        previous_result, clip = self.one_bit_mean.previous_result(), self._last_clip
        return lambda place, within: previous_result(place)[within].mul_(clip)

    def set_mean_gradient(self, clip: float) -> None:
        """Store this rank's part of the result as the reduced gradient."""
        self._last_clip = clip
        own = self.bucket.grads.shard[: self.bucket.layout.shard_numel]  # gradients have been sent: reuse the memory
        mean = own if own.dtype == torch.float32 else torch.empty_like(own, dtype=torch.float32)
        self.one_bit_mean.copy_result_to(mean, None if self.bucket.shard_group.is_solo else self._dp.rank)
        self.bucket.grads.set_reduced_shard(mean)


def _state_on_device(bucket: FlatBucket, kind: str) -> Tensor:
    assert bucket.master_state.is_on_device, "rules with compressed communication keep their states on the device"
    return bucket.master_state.view(kind)
