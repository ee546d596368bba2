"""The optimizer step: gradient norm, clipping, overflow check, and the update or a skipped step.

In the order of `OptimizerStep.__call__`, with what each part sends (P parameters, N data parallel ranks):

    reduce   backward has reduced the gradients: each rank holds its shard of their sum, with the loss scale on it
    norm     one all-reduce over the world of a dozen numbers: squared norm, overflow, consistency, loss, stop requests
    clip     nothing: unscaling, averaging and clipping are one factor, which the update applies
    update   nothing, for elementwise rules: each rank updates the fp32 masters of its shard (update.py)
    cast     nothing: the update also writes the shard in working precision
    gather   one all-gather of parameters a bucket (P/N from each rank), started as soon as the bucket is updated; at
             stage 3 the next forward does it, but for the small parameters that stay gathered

The norm counts each element of the model once; row norms also tell which parameter is not finite.

A *deferred* step takes the step result on the device (step_result.py), and the host reads the result later:
`read_step_result` is local, `finish_step` is collective and raises the errors of the step. Steps are deferred on an
accelerator, unless the loss scale is dynamic or the rule needs numbers on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from megatron.distributed.collective_log import AFTER_STEP, STEP, CollectiveLog
from megatron.distributed.rank_text import format_ranks
from megatron.errors import ConfigError, NumericsError
from megatron.optim.loss_scale import LossScaleRule
from megatron.optim.one_bit import OneBitRule
from megatron.optim.rule import ParamGroup, StepScalars, UpdateRule
from megatron.zero.bucket import FlatBucket
from megatron.zero.compression import CompressedGradExchange
from megatron.zero.layout import FlatLayout
from megatron.zero.offload.storage import EngineStorage
from megatron.zero.state import EngineState
from megatron.zero.step_result import (MAX_EXTRA_SCALARS, StepReport, clip_factor, different_settings_error,
                                       diverged_blocks_error, make_step_settings, scalars_on_device, settings_digest)
from megatron.zero.update import DelayedOptimizerUpdate, OptimizerUpdate
from mpu.collectives import all_gather_json, all_reduce_into
from mpu.grads import NORM_ROW
from mpu.groups import Groups


class GradNorm:
    """The norm of the reduced gradients in this rank's shards; with `unreduced`, of its full local gradients."""

    def __init__(self, buckets: Sequence[FlatBucket], groups: Groups, *, unreduced: bool = False) -> None:
        self._buckets, self._unreduced = buckets, unreduced
        device = buckets[0].device if buckets else None  # an engine without optimizer has no trainable buckets
        self._shards = {bucket: range(bucket.layout.shards) if unreduced else [bucket.shard_group.rank]
                        for bucket in buckets}
        lengths = [len(self._shards[bucket]) * bucket.layout.shard_numel // NORM_ROW for bucket in buckets]
        self._row_norms = torch.zeros(sum(lengths), device=device)
        """The norm of each row of NORM_ROW elements of each shard, from the last `norm_squared`."""
        self._row_norms_by_bucket = self._row_norms.split(lengths)
        self._row_is_counted = None if groups.tp.rank == 0 or not buckets else torch.cat(
            [_rows_counted_here(bucket.layout, rank) for bucket in buckets for rank in self._shards[bucket]]).to(device)

    def norm_squared(self) -> Tensor:
        """The squared norm of the rows that this rank counts, a 0-dimensional fp64 tensor. It is not finite if any
        gradient on this rank is not."""
        for bucket, rows in zip(self._buckets, self._row_norms_by_bucket, strict=True):
            assert bucket.grads.skip_reduction == self._unreduced, f"the gradients of {bucket.name} are of another kind"
            bucket.grads.row_norms(rows)
        # Rows that another rank counts are multiplied by 0, not dropped: 0 * inf is nan, so overflows still show.
        counted = self._row_norms if self._row_is_counted is None else self._row_norms * self._row_is_counted
        norm: Tensor = torch.linalg.vector_norm(counted, dtype=torch.float64)
        return norm.square()

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


MAX_OVERFLOWS_IN_A_ROW = 20
"""Steps in a row that may be skipped at a loss scale that cannot shrink. After that the run ends: it would never
train again."""

STRICT_FIRST_STEPS, MAX_SKIPS_IN_A_ROW = 10, 3
"""Without a loss scale a non-finite gradient is a fault. In the first STRICT_FIRST_STEPS the settings are to blame, and
the run ends. Later the cause may be one chip in a thousand or one batch: up to MAX_SKIPS_IN_A_ROW steps are skipped."""


class OptimizerStep:
    """Takes optimizer steps. Call it when the gradients of all buckets have been reduced."""

    def __init__(self, state: EngineState, engine_storage: EngineStorage, groups: Groups, rule: UpdateRule,
                 param_groups: Sequence[ParamGroup], scale_rule: LossScaleRule, log: CollectiveLog, *, clip_grad: float,
                 divisor: float, max_skipped: int | None) -> None:
        self._state, self._groups, self._rule, self._param_groups = state, groups, rule, param_groups
        self._scale_rule, self._log, self._clip_grad = scale_rule, log, clip_grad
        self._divisor = divisor  # what turns the sums over ranks into means
        self._skips_in_a_row, self._max_skipped = 0, max_skipped
        self._norm = GradNorm(state.buckets, groups)
        self.update = (DelayedOptimizerUpdate if engine_storage.delays_update
                       else OptimizerUpdate)(state, engine_storage, groups, rule, param_groups)
        self.compressed_exchange = CompressedGradExchange(state, groups, rule,
                                                          param_groups) if isinstance(rule, OneBitRule) else None
        """The optimizer's compressed communication, which replaces the gradient reduction (1-bit Adam and the like)."""
        self.is_deferred = self.update.is_batched and not rule.needs_host_scalars and not scale_rule.dynamic and \
            self.compressed_exchange is None and state.moq is None  # MoQ counts bits on the host
        self._next_note: str | None = None  # note of the next report
        self._losses: list[Tensor] = []  # losses of the current step, or the last one
        self._loss_divisors = Counter[str]()  # "1/divisor" of each loss -> how many
        self._unread_report: StepReport | None = None  # the last step, until the host has read its result
        self._report_to_explain: StepReport | None = None  # the last step, if its error or warning is still to come
        self._steps_on_device = torch.zeros((), device=state.device)
        self._steps_on_host = 0  # as the host last read it
        self._is_paused = False
        for bucket in state.buckets:
            bucket.grad_mean_factor = self._mean_factor

    def before_backward(self, loss: Tensor, *, first: bool, divisor: int = 1) -> None:
        """Record `loss`, already divided by `divisor`, before its backward. `first` begins the gradients of a step."""
        if self._is_paused:
            return
        if first:
            self._losses = []
            self._loss_divisors.clear()
            if self.compressed_exchange is not None:
                self._next_note = self.compressed_exchange.begin_step() or self._next_note
        self._losses.append(loss.detach())
        self._loss_divisors[f"1/{divisor}"] += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside this context do not count for a step."""
        self._is_paused = True
        try:
            with nullcontext() if self.compressed_exchange is None else self.compressed_exchange.paused():
                yield
        finally:
            self._is_paused = False

    def __call__(self, run_digest: int, veto_error: str | None, extra_scalars: Sequence[Tensor | float],
                 engine_scalars: Sequence[float], accumulation: int, micro_batch: int | None) -> StepReport:
        """Update the weights, or skip the step if a gradient is not finite, and discard the gradients. Collective.

        All ranks must agree on `run_digest` (what a rank ran), the hyper-parameters and the batch sizes. A `veto_error`
        of one rank raises on all. `extra_scalars` and `engine_scalars` are summed over the world in the same
        all-reduce as the norm."""
        self.finish_step()
        self._log.record_barrier(STEP)
        self._log.purpose = AFTER_STEP
        # First the norm: the device computes it while the host digests the settings.
        square: Tensor | int = self._norm_in_use.norm_squared()
        if not self._rule.is_compressed and self._state.buckets[0].replica_group.rank > 0:
            square = 0  # the first replica counts it
        counters, world = self._state.counters, self._groups.world
        settings, digest = None, 0
        if not world.is_solo:
            settings = make_step_settings(counters.global_steps + 1, self._loss_divisors, accumulation, micro_batch,
                                          self._param_groups)
            digest = settings_digest(settings, run_digest, world.size)  # so few bits that the sums are exact
        sums = scalars_on_device(self._state.device, (
            square, digest, digest * digest, veto_error is not None, *extra_scalars,
            *[0.0] * (MAX_EXTRA_SCALARS - len(extra_scalars)), *engine_scalars))
        all_reduce_into(sums, world).wait()  # [4 + MAX_EXTRA_SCALARS + engine scalars], in place
        report = StepReport(sums, world.size, self._mean_factor(), self._clip_grad, veto_error,
                            number=counters.global_steps + 1, settings=settings, loss_scale=counters.scaler.scale,
                            lr=self._param_groups[0]["lr"], note=self._next_note,
                            losses=self._losses,  # not reset: a refused step may be called again
                            given_scalar_count=len(extra_scalars))
        self._next_note = None
        if self.is_deferred:  # the host does not know yet whether the step is applied: count it on the device
            if self._steps_on_host != counters.optimizer_steps:  # another state was loaded
                self._steps_on_device.fill_(counters.optimizer_steps)
            self._steps_on_device += report.is_applied
            self.update(StepScalars(self._steps_on_device, report.grad_divisor(),
                                    report.is_applied.logical_not().float()))
        elif self._applied_or_raise(report):
            factor = report.mean_factor * clip_factor(report.grad_norm, report.max_norm)
            if self._rule.is_compressed:
                assert self.compressed_exchange is not None
                factor, report.grad_norm = self.compressed_exchange(self._mean_factor() * self._divisor,
                                                                    self._clip_grad)
            if self._state.moq is not None:
                self._state.moq.advance(counters.applied_steps + 1)
            self.update(factor)
        for bucket in self._state.buckets:
            bucket.grads.discard()
        counters.global_steps += 1
        self._unread_report = report
        if not self.is_deferred:
            self.finish_step()
        return report

    @cached_property
    def _unreduced_norm(self) -> GradNorm:
        return GradNorm(self._state.buckets, self._groups, unreduced=True)

    @property
    def _norm_in_use(self) -> GradNorm:
        return self._unreduced_norm if self._rule.is_compressed else self._norm

    def _mean_factor(self) -> float:
        """The factor that turns a sum of scaled gradients into their mean."""
        return 1.0 / (self._state.counters.scaler.scale * self._divisor)

    # ---- the result ---------------------------------------------------------------------------------------------

    def read_step_result(self) -> None:
        """Wait for the last step, and count it as applied or skipped. Local; raises nothing."""
        report, self._unread_report = self._unread_report, None
        if report is None:
            return
        counters = self._state.counters
        if not report.ranks_agree:
            self._report_to_explain = report
            return
        if report.applied:
            counters.optimizer_steps += 1
            self._steps_on_host = counters.optimizer_steps
            self._skips_in_a_row = 0
        else:
            counters.skipped_steps += 1
            if not self._scale_rule.is_enabled or self._scale_rule.is_exhausted(counters.scaler):
                self._skips_in_a_row += 1
                self._report_to_explain = report
        counters.scaler = self._scale_rule.next_state(counters.scaler, overflow=not report.applied)

    def finish_step(self) -> None:
        """Read the result of the last step and raise its error, if any. All ranks must call it at the same place: it
        is collective if there was an error."""
        self.read_step_result()
        report, self._report_to_explain = self._report_to_explain, None
        if report is None:
            return
        self._applied_or_raise(report)
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

    def _applied_or_raise(self, report: StepReport) -> bool:
        """`report.applied`. Raises ConfigError if the ranks disagree, and is collective then."""
        if report.has_veto:
            texts = all_gather_json(report.veto_error, self._groups.world)
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            raise ConfigError(text if None not in texts else f"{text} (so on rank {rank}, not on all)")
        if not report.ranks_agree:
            assert report.settings is not None
            raise different_settings_error(report.settings, self._groups.world) or \
                diverged_blocks_error(self._log, self._groups.world)
        return report.applied

    def _describe_first_nonfinite_param(self, report: StepReport) -> str:
        """Gathered over all ranks, so that all raise the same message. Reduced gradients do not tell which rank had the
        bad one; the losses do, if the forward was at fault."""
        tp = self._groups.tp
        finite = all(bool(loss.isfinite().all()) for loss in report.losses)
        rank_findings = all_gather_json([self._norm_in_use.first_nonfinite_param(), tp.rank, finite],
                                        self._groups.world)
        bad = [rank for rank, (_, _, is_finite) in enumerate(rank_findings) if not is_finite]
        where = f" on {format_ranks(bad)}" if len(rank_findings) > 1 else ""
        loss = f"the loss{where} is not finite" if bad else "every loss is finite"
        for number, (name, rank, _) in enumerate(rank_findings):
            if name is not None:
                whose = "" if self._groups.dp.is_solo else \
                    f", in the gradient of rank {number}" if self._rule.is_compressed else ", in the sum over the ranks"
                return f"first in {name}" + (f" on tensor parallel rank {rank}" if not tp.is_solo else "") + \
                    f"{whose} ({loss})"
        return f"the sum of finite gradients overflowed ({loss})"
