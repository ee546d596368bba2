"""The result of an optimizer step, all-reduced once: gradient norm, overflow, and whether all ranks agree.

Each rank contributes the squared norm of its gradients, a digest of what it ran and of its hyper-parameters
(distributed/step_consistency.py), a veto flag, and extra scalars of the caller (a loss, a stop request). The sums are
on the device at once, so the optimizer step follows without a wait; the host reads them later (`StepReport`), counts
the step, and raises its errors (`StepResultReader`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_text import format_ranks
from megatron.distributed.step_consistency import different_settings_error, diverged_blocks_error
from megatron.errors import ConfigError, NumericsError
from megatron.optim.loss_scale import LossScaleRule
from megatron.optim.rule import StepScalars
from megatron.zero.bucket import FlatBucket
from megatron.zero.layout import FlatLayout
from megatron.zero.state import EngineState
from mpu.collectives import all_gather_json
from mpu.device import HostScalars
from mpu.grads import NORM_ROW
from mpu.groups import Groups

# Extra scalars in the all-reduce of a step. Fewer are padded, so that its size is equal on all ranks even if their
# callers give different numbers of scalars.
MAX_EXTRA_SCALARS = 8


class GradNorm:
    """The norm of the reduced gradients in this rank's shards; with `unreduced`, of its full local gradients. It counts
    each element of the model once; row norms also tell which parameter is not finite."""

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


@dataclass(eq=False)
class StepReport:
    """What one optimizer step did. The device has the result at once; to read it on the host may wait for the device,
    but never for another rank."""

    # [4 + scalars], fp64, on the device: the squared norm, the digest, its square and the veto, then the extra scalars
    # and the engine's, each summed over the world.
    sums: Tensor
    ranks: int
    mean_factor: float  # turns the sum of gradients into their mean
    max_norm: float  # the norm is clipped to it; 0: no clipping
    veto_error: str | None
    number: int
    loss_scale: float
    lr: float  # learning rate of the first param group
    settings: Mapping[str, str] | None  # the settings of this rank for the step; None on a single rank
    # Of this rank's micro-batches. Read only if a gradient is not finite.
    losses: Sequence[Tensor]
    norm: GradNorm  # names the first parameter whose gradient is not finite
    norm_limit: float  # a larger norm is a spike, and the step is skipped
    note: str | None  # what changes from this step on
    given_scalar_count: int  # how many extra scalars this rank gave; the rest of MAX_EXTRA_SCALARS is padding
    # Why the step was skipped, if that is unusual. Set by `StepResultReader.finish`.
    skip_warning: str | None = None

    def __post_init__(self) -> None:
        squares, digests, squared_digests, vetoes = self.sums[:4].unbind()  # extra scalars follow
        self._device_norm = squares.sqrt() * self.mean_factor
        # n * sum(d^2) == sum(d)^2 only if all n digests d are equal
        digests_match = squared_digests * self.ranks == digests * digests
        self.applied_on_device = self._device_norm.isfinite() & digests_match & (vetoes == 0)
        if self.norm_limit < math.inf:
            self.applied_on_device &= self._device_norm <= self.norm_limit
        self._host_scalars = HostScalars(torch.cat([self._device_norm.view(1), self.sums]))

    def deferred_scalars(self, steps_taken: int, device: torch.device) -> StepScalars:
        """The scalars of a step that the device applies or skips before the host knows which; the device counts it."""
        norm = self._device_norm
        if self.max_norm:
            clipped = torch.where(norm > self.max_norm, self.max_norm / (norm + 1e-6), 1.0)
            divisor = (clipped * self.mean_factor).reciprocal().float()
        else:
            divisor = torch.full((), 1.0 / self.mean_factor, dtype=torch.float32, device=norm.device)
        return StepScalars(self.applied_on_device + float(steps_taken), divisor,
                           skip=self.applied_on_device.logical_not().float())

    @cached_property
    def grad_norm(self) -> float:
        """The norm of the mean gradient before clipping, or of the optimizer's compressed gradient. Not finite if the
        step was skipped."""
        return self._host_scalars.values[0]

    @property
    def ranks_agree(self) -> bool:
        """All ranks gave the same digest, and none refuses the step."""
        digests, squared_digests, vetoes = self._host_scalars.values[2:5]
        return squared_digests * self.ranks == digests * digests and not vetoes

    @property
    def is_spike(self) -> bool:
        return math.isfinite(self.grad_norm) and self.grad_norm > self.norm_limit

    @property
    def applied(self) -> bool:
        norm = self.grad_norm
        return math.isfinite(norm) and norm <= self.norm_limit and self.ranks_agree

    @property
    def extra_scalars(self) -> tuple[float, ...]:
        """The caller's extra scalars, summed over the world; as many as this rank gave."""
        return tuple(self._host_scalars.values[5:][:self.given_scalar_count])

    @property
    def engine_scalars(self) -> tuple[float, ...]:
        """The engine's extra scalars, summed over the world."""
        return tuple(self._host_scalars.values[5 + MAX_EXTRA_SCALARS:])


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that limits the norm of gradients to `max_norm` (0: no limit)."""
    return max_norm / (norm + 1e-6) if max_norm and norm > max_norm else 1.0


SPIKE_WINDOW = 128  # gradient norms that a norm is compared with; while there are fewer than half, none is a spike


def spike_limit(norms: Sequence[float], sigmas: float | None) -> float:
    """The mean of the norms plus `sigmas` standard deviations; infinite for None or too few norms. Norms of skipped
    steps count too: where all become larger, the limit follows."""
    if sigmas is None or len(norms) < SPIKE_WINDOW // 2:
        return math.inf
    mean = math.fsum(norms) / len(norms)
    return mean + sigmas * math.sqrt(math.fsum((norm - mean) ** 2 for norm in norms) / len(norms))


# Steps in a row that may be skipped at a loss scale that cannot shrink. After that the run ends: it would never train
# again.
MAX_OVERFLOWS_IN_A_ROW = 20

# Without a loss scale a non-finite gradient is a fault. In the first STRICT_FIRST_STEPS the settings are to blame, and
# the run ends. Later the cause may be one chip in a thousand or one batch: up to MAX_SKIPS_IN_A_ROW steps are skipped.
STRICT_FIRST_STEPS, MAX_SKIPS_IN_A_ROW = 10, 3


class StepResultReader:
    """Reads the result of the last step, counts the step as applied or skipped, and raises its errors."""

    def __init__(self, state: EngineState, groups: Groups, scale_rule: LossScaleRule, log: CollectiveLog,
                 max_skipped: int | None, spike_sigmas: float | None) -> None:
        self._state, self._groups, self._scale_rule, self._log = state, groups, scale_rule, log
        self._skips_in_a_row, self._max_skipped, self._spike_sigmas = 0, max_skipped, spike_sigmas
        self.unread: StepReport | None = None  # the last step, until the host has read its result
        self._to_explain: StepReport | None = None  # the last step, if its error or warning is still to come

    @property
    def norm_limit(self) -> float:
        """Of the next step; `read` has counted the last one."""
        return spike_limit(self._state.counters.recent_norms, self._spike_sigmas)

    def read(self) -> None:
        """Wait for the last step, and count it. Local; raises nothing."""
        report, self.unread = self.unread, None
        if report is None:
            return
        counters = self._state.counters
        if not report.ranks_agree:
            self._to_explain = report
            return
        if report.applied:
            counters.optimizer_steps += 1
            self._skips_in_a_row = 0
        else:
            counters.skipped_steps += 1
            if report.is_spike:
                self._to_explain = report
            elif not self._scale_rule.is_enabled or self._scale_rule.is_exhausted(counters.scaler):
                self._skips_in_a_row += 1
                self._to_explain = report
        overflow = not math.isfinite(report.grad_norm)
        if self._spike_sigmas is not None and not overflow:
            counters.recent_norms = (*counters.recent_norms, report.grad_norm)[-SPIKE_WINDOW:]
        counters.scaler = self._scale_rule.next_state(counters.scaler, overflow=overflow)

    def finish(self) -> None:
        """`read`, and raise the error of the step. All ranks must call it at the same place: it is collective if there
        was an error."""
        self.read()
        report, self._to_explain = self._to_explain, None
        if report is None:
            return
        self.applied_or_raise(report)
        if report.is_spike:
            report.skip_warning = (
                f"gradient norm is {report.grad_norm:.4g} at step {report.number}, above {report.norm_limit:.4g} "
                f"(--skip-step-on-spike {self._spike_sigmas:g}); the step was skipped, weights are unchanged")
            return
        is_scaled = self._scale_rule.is_enabled
        if is_scaled:
            allowed = MAX_OVERFLOWS_IN_A_ROW
        elif self._max_skipped is not None:
            allowed = self._max_skipped
        else:
            allowed = MAX_SKIPS_IN_A_ROW if report.number > STRICT_FIRST_STEPS else 0
        too_many = self._skips_in_a_row > allowed
        if is_scaled and too_many:
            raise NumericsError(
                f"{self._skips_in_a_row} overflows in a row at loss scale {report.loss_scale:g}, which cannot shrink, "
                f"last at step {report.number}: {self._describe_first_nonfinite_param(report)}; resume from the last "
                "checkpoint with --bf16 or a lower --lr")
        if not is_scaled:
            what = (f"gradient norm is {report.grad_norm} at step {report.number}: "
                    f"{self._describe_first_nonfinite_param(report)}")
            if too_many:
                why = f"{self._skips_in_a_row} in a row, --max-skipped-in-a-row is {allowed}"
                if self._max_skipped is None and not allowed:
                    why = (f"in the first {STRICT_FIRST_STEPS} steps this ends the run, unless --max-skipped-in-a-row "
                           "allows it")
                raise NumericsError(f"{what}; weights are unchanged; {why}; resume from the last checkpoint with a "
                                    "lower --lr or other data")
            report.skip_warning = f"{what}; the step was skipped, weights are unchanged"

    def applied_or_raise(self, report: StepReport) -> bool:
        """`report.applied`. Raises ConfigError if the ranks disagree, and is collective then."""
        if not report.ranks_agree:
            texts = all_gather_json(report.veto_error, self._groups.world)
            for rank, text in enumerate(texts):
                if text is not None:
                    raise ConfigError(text if None not in texts else f"{text} (so on rank {rank}, not on all)")
            assert report.settings is not None
            raise different_settings_error(report.settings, self._groups.world) or \
                diverged_blocks_error(self._log, self._groups.world)
        return report.applied

    def _describe_first_nonfinite_param(self, report: StepReport) -> str:
        """Gathered over all ranks, so that all raise the same message. Reduced gradients do not tell which rank had the
        bad one; the losses do, if the forward was at fault."""
        tp = self._groups.tp
        finite = all(bool(loss.isfinite().all()) for loss in report.losses)
        rank_findings = all_gather_json([report.norm.first_nonfinite_param(), tp.rank, finite],
                                        self._groups.world)
        bad = [rank for rank, (_, _, is_finite) in enumerate(rank_findings) if not is_finite]
        where = f" on {format_ranks(bad)}" if len(rank_findings) > 1 else ""
        loss = f"the loss{where} is not finite" if bad else "every loss is finite"
        for number, (name, rank, _) in enumerate(rank_findings):
            if name is not None:
                whose = "" if self._groups.dp.is_solo else \
                    f", in the gradient of rank {number}" if report.norm.unreduced else ", in the sum over the ranks"
                return f"first in {name}" + (f" on tensor parallel rank {rank}" if not tp.is_solo else "") + \
                    f"{whose} ({loss})"
        return f"the sum of finite gradients overflowed ({loss})"
