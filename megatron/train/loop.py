"""The training loop: batches in, weights and metrics out. All parts are built before it starts (pretrain_gpt2.py).

`TrainState` is the loop's own state in a checkpoint (megatron/train/resume.py); the rest belongs to the engine.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from math import inf
from signal import SIGINT
from typing import NamedTuple

import torch

from data.gpt2_dataset import Dataset
from megatron.config.tree import Config
from megatron.distributed.rank_status import EVALUATION, STATUS, TRAINING
from megatron.distributed.signals import StopListener
from megatron.errors import Interrupted, NumericsError, TrainerError
from megatron.layer_drop import kept
from megatron.metrics.step_metrics import LayerDropMetrics, NvmeStats, StepMetrics, StepTimer, max_memory_bytes
from megatron.train.batches import Batch, MicroBatchSampler, batch_stream, samples_digest
from megatron.train.compile import arithmetic_precision
from megatron.train.evaluation import evaluate
from megatron.train.flops import flops_per_token, peak_tflops
from megatron.train.run_log import RunLog
from megatron.zero.api.engine import Engine
from megatron.zero.api.torch_interfaces import LRScheduleAdapter
from megatron.zero.step_result import StepReport
from mpu.collectives import all_reduce_scalar
from mpu.groups import set_timeout


@dataclass
class TrainState:
    """The loop's position. `consumed_samples` is the only state of the data."""

    iteration: int = 0
    consumed_samples: int = 0
    # The evaluation due at this iteration was interrupted, and runs after a resume.
    owes_evaluation: bool = False


class LoopRequests(NamedTuple):
    """Stop requests after a step, combined over ranks: each is true if it is on any rank."""

    stop: bool = False
    by_keyboard: bool = False
    time_is_up: bool = False


@dataclass(frozen=True)
class CompletedStep:
    """A step whose report may still be pending on the device."""

    report: StepReport
    iteration: int
    consumed_samples: int
    global_batch: int
    seconds: float
    drive: NvmeStats | None
    layer_drop: LayerDropMetrics | None


@dataclass
class RunProgress:
    """What the hooks after a step read and change."""

    state: TrainState
    valid: Dataset | None
    first_iteration: int  # iterations before this run
    saved_at: int  # the iteration of the last save
    pending_logs: list[CompletedStep] = field(default_factory=list)
    requests: LoopRequests = LoopRequests()
    stop_reason: str = ""  # why the run stops after this step; empty: it goes on


@dataclass(frozen=True)
class Trainer:
    """One run of the training loop."""

    config: Config
    engine: Engine
    sampler: MicroBatchSampler
    device: torch.device
    log: RunLog
    save: Callable[[TrainState], None] | None = None
    stop: StopListener = field(default_factory=StopListener)
    # [vocab_size]: bytes of text per token id; evaluations then report bits per byte.
    token_bytes: torch.Tensor | None = None

    def run(self, state: TrainState, samples: Dataset, valid: Dataset | None) -> bool:
        """Train until --train-iters (returns True) or until a reason to stop (False). Saves at intervals and at the
        end."""
        STATUS.set_activity(TRAINING)
        STATUS.set_step(state.iteration + 1)
        try:
            with periodic_gc(self.config.train.gc_interval) as collect, self._tracing(state.iteration) as trace:
                reason = self._train(state, samples, valid, [trace, collect])
            self.engine.finish_save()
        except BaseException as error:
            if self.engine.is_saving:  # release the --save folder
                is_solo = self.engine.groups.world.is_solo
                if isinstance(error, NumericsError) or is_solo and isinstance(error, Exception):
                    # every rank is here, and no stop is requested: complete the save
                    with suppress(TrainerError):  # the first error is the one to report
                        self.engine.finish_save()
                else:
                    is_complete = self.engine.abandon_save()
                    self.log.print_line(" the save under way is complete" if is_complete else
                                        " the save under way is not complete; the tag before it is the newest")
            raise
        if reason:
            self.log.print_line(f" {reason}{f', saved {self.config.save.save}' if self.save else ''}")
        return not reason

    def _train(self, state: TrainState, samples: Dataset, valid: Dataset | None,
               between_steps: Sequence[Callable[[int], None]]) -> str:
        """The loop; returns why it stopped early, or "". The last save may still be in progress."""
        train, run = self.config.train, RunProgress(state, valid, state.iteration, saved_at=state.iteration)
        lr_scheduler = lr_scheduler_of(self.engine)
        if warning := zero_lr_warning(self.config, lr_scheduler.schedule, lr_scheduler.steps, state.iteration):
            self.log.print_line(warning)
        # In this order: the log reads the stop requests of the step, an evaluation may find one, and a stop saves.
        hooks = [self._process_finished_steps, self._evaluate_if_due, self._stop_if_asked, self._save_if_due]
        timer = StepTimer(self.engine.drive_use)
        stream = batch_stream(samples, self.sampler, state.consumed_samples, train.train_iters - state.iteration,
                              self.config.data.num_workers)
        self.engine.train()
        if state.owes_evaluation and is_due(state.iteration, train.evaluates_every):
            state.owes_evaluation = not self._evaluate("validation", state, valid)
        try:
            for batches in stream:
                layer_drop = self._layer_drop_of_step()
                report = self.train_step(batches)
                global_batch = self.sampler.global_batch(state.consumed_samples)
                state.iteration += 1
                state.consumed_samples += global_batch
                run.pending_logs.append(CompletedStep(report, state.iteration, state.consumed_samples, global_batch,
                                                      *timer.lap(), layer_drop))
                for hook in hooks:
                    hook(run)
                if run.stop_reason:
                    break
                for action in between_steps:
                    action(state.iteration)
                STATUS.set_step(state.iteration + 1)
                timer.lap()  # exclude evaluation and saving from the step time
        finally:
            stream.close()
        self.engine.finish_step()
        self.engine.wait_for_param_gathers()
        if self.save and state.iteration != run.saved_at:
            self.save(state)
        return run.stop_reason

    def train_step(self, batches: list[Batch]) -> StepReport:
        """One optimizer step: forward and backward of each micro-batch, then the update. The loss sum and the stop
        requests are reduced over the ranks in the all-reduce of the step, as extra scalars."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        if len(batches) != self.engine.core.accumulation_steps:  # --rampup-batch-size
            self.engine.finish_step()  # the last step may be pending, and the size changes between steps only
            self.engine.set_train_batch_size(len(batches) * self.sampler.micro_batch * self.sampler.dp_size)
        for batch in batches:
            # The fused loss computes its gradients in the forward, and needs the scale of the backward there. The loss
            # itself is not scaled.
            loss = self.engine(*batch.to(self.device), grad_scale=self.engine.backward_scale)
            self.engine.backward(loss)
            loss_sum += loss.detach()
            report = self.engine.step(extra_scalars=[loss_sum, *self._requests_of_rank()])  # sent with the last batch
        assert report is not None, "the last micro-batch of a step is the accumulation boundary"
        return report

    def _layer_drop_of_step(self) -> LayerDropMetrics | None:
        """Layer drop metrics of the step that begins now."""
        layer_drop = self.engine.progressive_layer_drop
        if layer_drop is None:
            return None
        model, length, theta = self.config.model, self.config.seq_length, layer_drop.get_theta()
        blocks = len(kept(self.config.train.seed, layer_drop.step, model.num_layers, theta))
        return LayerDropMetrics(theta, blocks, flops_per_token(model, length, blocks) / flops_per_token(model, length))

    # ---- hooks after each step -------------------------------------------------------------------------------------

    def _process_finished_steps(self, run: RunProgress) -> None:
        """Raise the error of a finished step, log it and read its stop requests; the first one ends the start-up. On an
        accelerator the newest step stays pending, since waiting for it would idle the device: a stop request may
        therefore take effect one step late."""
        train, iteration = self.config.train, run.state.iteration
        # the last step, and one with a save, evaluation or exit: the loop must know its result to go on
        needs_result = run.stop_reason or iteration == train.train_iters or any(
            is_due(iteration, interval)
            for interval in (train.evaluates_every, self.config.save.save_interval, train.exit_interval))
        is_deferred, requests = self.engine.core.is_deferred, LoopRequests()
        newest_may_wait = is_deferred and not needs_result
        while len(run.pending_logs) > int(newest_may_wait):
            step = run.pending_logs.pop(0)
            if not run.pending_logs and is_deferred:  # no later step has raised the newest one's error yet
                self.engine.finish_step()
            self.stop.mark_started()  # all ranks have completed a step
            if step.iteration == run.first_iteration + 1:  # end of the start-up timeout
                set_timeout(self.engine.groups,
                            timedelta(seconds=self.config.parallel.distributed_timeout_seconds))
            loss_sum, *request_counts = step.report.extra_scalars
            requests = LoopRequests(*(count > 0 for count in request_counts))
            self.log.step(self._metrics(step, loss_sum))
        run.requests = requests

    def _evaluate_if_due(self, run: RunProgress) -> None:
        train, state = self.config.train, run.state
        if state.iteration < train.train_iters and is_due(state.iteration, train.evaluates_every):
            if not self._evaluate("validation", state, run.valid):  # `finish` evaluates after the last iteration
                run.requests, state.owes_evaluation = self._agree_on_stop(), True

    def _stop_if_asked(self, run: RunProgress) -> None:
        if run.state.iteration < self.config.train.train_iters:
            run.stop_reason = self._reason_to_stop(run.state.iteration, run.requests)
            if run.requests.stop and self.save is None:
                raise Interrupted(_unsaved_message(run.state.iteration))
        if run.stop_reason:
            self.stop.is_stopping = True
            self._process_finished_steps(run)

    def _save_if_due(self, run: RunProgress) -> None:
        iteration = run.state.iteration
        if self.save and (run.stop_reason or is_due(iteration, self.config.save.save_interval)):
            self.save(run.state)
            run.saved_at = iteration
            # a stop requested during the save takes effect here, without a second save one step later
            if not run.stop_reason and self._max_over_ranks_or_stop(0.0) == inf:
                run.stop_reason = self._reason_to_stop(iteration, self._agree_on_stop())
                self.stop.is_stopping = True

    def _metrics(self, step: CompletedStep, loss_sum: float) -> StepMetrics:
        report, global_batch, devices = step.report, step.global_batch, self.engine.groups.world.size
        tokens = global_batch * self.config.seq_length / step.seconds  # a second, over all devices
        arithmetic_fraction = step.layer_drop.arithmetic_fraction if step.layer_drop else 1.0
        flops = tokens * flops_per_token(self.config.model, self.config.seq_length) * arithmetic_fraction
        tflops = flops / devices / 1e12
        accumulation = global_batch // (self.sampler.micro_batch * self.sampler.dp_size)
        # Tensor parallel ranks hold equal losses, so the mean over the world is the mean over data parallel.
        return StepMetrics(
            iteration=step.iteration, lm_loss=loss_sum / (accumulation * devices),
            grad_norm=report.grad_norm, learning_rate=report.lr, loss_scale=report.loss_scale,
            skipped=not report.applied, consumed_samples=step.consumed_samples,
            samples_digest=samples_digest(step.consumed_samples - global_batch, global_batch),
            step_ms=step.seconds * 1e3, tokens_per_s=tokens, tflops=tflops,
            mfu=tflops / self._peak_tflops if self._peak_tflops else None,
            max_memory_bytes=max_memory_bytes(self.device), drive=step.drive, dropping=step.layer_drop)

    @cached_property
    def _peak_tflops(self) -> float | None:
        if self.config.log.peak_tflops is None and self.device.type == "cuda":
            return peak_tflops(torch.cuda.get_device_name(self.device), arithmetic_precision(self.config, self.device))
        return self.config.log.peak_tflops

    def _tracing(self, done: int) -> AbstractContextManager[Callable[[int], None]]:
        profile, core = self.config.profile, self.engine.core
        if profile.traced_steps is None or profile.profile_rank != core.groups.world.rank:
            return nullcontext(lambda done: None)
        from megatron.trace.trace_window import TraceWindow
        return TraceWindow(profile, self.device, core.log, done, self.config.train.train_iters)

    # ---- evaluation and stop requests -----------------------------------------------------------------------------

    def finish(self, state: TrainState, valid: Dataset | None, test: Dataset | None) -> bool:
        """Run the evaluations after training; False if a stop request interrupted them."""
        for name, samples in (("validation", valid), ("test", test)):
            if self.config.train.evaluates_every and not self._evaluate(name, state, samples):
                self.stop.is_stopping = True
                if self.save is None:
                    raise Interrupted(_unsaved_message(state.iteration))
                self.log.print_line(f" {self._reason_to_stop(state.iteration, self._agree_on_stop())}, saved "
                                    f"{self.config.save.save}; the evaluations after the last step are not complete")
                return False
        return True

    def _evaluate(self, name: str, state: TrainState, samples: Dataset | None) -> bool:
        """False if a stop request ended the evaluation early."""
        if samples is None:
            return True
        with STATUS.in_activity(EVALUATION):
            score = evaluate(self.engine, samples, self.sampler, self.config.train.eval_iters, self.device,
                             self.token_bytes, self._max_over_ranks_or_stop)
        if score is not None:
            self.log.evaluation(name, state.iteration, score.loss, score.bits_per_byte)
        return score is not None

    def _requests_of_rank(self) -> LoopRequests:
        is_late = 0 < self.config.train.exit_duration_in_mins <= self.stop.minutes_since_start
        console_is_lost = self.log.write_error is not None  # the files continue until the stop
        return LoopRequests(bool(self.stop) or console_is_lost, self.stop.signal == SIGINT, is_late)

    def _max_over_ranks_or_stop(self, seconds: float) -> float:
        """The largest value over ranks; inf if any rank was asked to stop. Collective."""
        return all_reduce_scalar(inf if self._requests_of_rank().stop else seconds, self.engine.groups.world)

    def _agree_on_stop(self) -> LoopRequests:
        """The combined stop request, for a caller that knows some rank was asked to stop. Collective."""
        return LoopRequests(stop=True,
                            by_keyboard=all_reduce_scalar(self.stop.signal == SIGINT, self.engine.groups.world) > 0)

    def _reason_to_stop(self, iteration: int, requests: LoopRequests) -> str:
        train = self.config.train
        if requests.stop:
            return f"{'interrupted' if requests.by_keyboard else 'preempted'} at step {iteration}"
        if requests.time_is_up:
            return f"leaving after iteration {iteration} (--exit-duration-in-mins {train.exit_duration_in_mins:g})"
        if is_due(iteration, train.exit_interval):
            return f"leaving after iteration {iteration} (--exit-interval {train.exit_interval})"
        return ""


def lr_scheduler_of(engine: Engine) -> LRScheduleAdapter:
    scheduler = engine.lr_scheduler
    assert isinstance(scheduler, LRScheduleAdapter), "build.engine gives the engine the schedule of the flags"
    return scheduler


def _unsaved_message(iteration: int) -> str:
    return f"asked to stop at step {iteration}, and nothing was saved: give --save"


def is_due(iteration: int, interval: int) -> bool:
    """Whether `iteration` is a multiple of `interval`; an interval of 0 disables it."""
    return interval > 0 and iteration % interval == 0


@contextmanager
def periodic_gc(steps: int) -> Iterator[Callable[[int], None]]:
    """Inside, Python collects garbage only when the yielded function is called with a multiple of `steps`; 0: as Python
    decides."""
    if not steps:
        yield lambda step: None
        return
    was_enabled = gc.isenabled()  # by the surrounding program
    gc.collect()
    gc.freeze()
    gc.disable()

    def collect(step: int) -> None:
        if step % steps == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def zero_lr_warning(config: Config, schedule: Callable[[int], float], applied: int, iteration: int) -> str:
    """The warning of a run at `iteration`, after `applied` schedule steps (skipped steps do not count), whose final
    iterations have a rate of 0; empty if every step has a rate."""
    section, last = config.schedule, config.train.train_iters
    remaining = range(applied, applied + last - iteration)
    if not remaining or schedule(remaining[-1]) != 0:
        return ""
    remedy = f"give --lr-decay-iters {last} (in a JSON file: total_num_steps), or a --min-lr above 0"
    if section.use_checkpoint_lr_scheduler:
        remedy = f"give --override-lr-scheduler --lr-decay-iters {last} in place of --use-checkpoint-lr-scheduler"
    elif section.lr == 0:
        remedy = "give --lr above 0"
    elif iteration > 0 and not section.override_lr_scheduler:
        remedy = f"give --override-lr-scheduler --lr-decay-iters {last}, or with it a --min-lr above 0"
    first = iteration + bisect_left(remaining, True, key=lambda step: schedule(step) == 0) + 1
    return (f" warning: the learning rate is 0 from iteration {first} on: the last {last - first + 1} of {last} "
            f"iterations train nothing; {remedy}")
