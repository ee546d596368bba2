"""The training loop: batches in, weights and metrics out. Everything it needs is built before it starts
(pretrain_gpt2.py).

`TrainState` is what a checkpoint restores of the loop itself; the rest of a run's state belongs to the engine and the
generators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.batches import Batch, BatchRule, BatchStream, Samples, samples_digest
from megatron.config import Config
from megatron.evaluate import SizedSamples, evaluate, forward_loss
from megatron.flops import flops_per_token, peak_tflops
from megatron.metrics import MetricsLog, Rates, StepMetrics, Stopwatch, max_memory_bytes
from megatron.optim.schedule import Schedule
from megatron.zero.engine import StepReport, ZeroEngine
from mpu.collectives import all_reduce


@dataclass
class TrainState:
    """Where the loop stands; the sample position is the only data state there is."""

    iteration: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True)
class Trainer:
    """One run of the loop."""

    config: Config
    engine: ZeroEngine
    schedule: Schedule
    rule: BatchRule
    device: torch.device
    log: MetricsLog
    save: Callable[[TrainState], None] | None = None

    def run(self, state: TrainState, samples: Samples, valid: SizedSamples | None) -> bool:
        """Train until --train-iters (True), or until --exit-interval says so (False); saves on the way and at the
        end."""
        train = self.config.train
        stream = BatchStream(
            samples,
            self.rule,
            state.consumed_samples,
            train.train_iters - state.iteration,
            self.config.data.num_workers,
        )
        watch, rates, saved_at = Stopwatch(), self._rates(), state.iteration
        leaves = False
        self.engine.train()
        try:
            for batches in stream:
                self.log.step(self._step(state, batches, watch, rates))
                last = state.iteration == train.train_iters  # `finish` evaluates then
                if valid is not None and not last and due(state.iteration, train.eval_interval):
                    self.evaluate("validation", state.iteration, valid)
                leaves = not last and due(state.iteration, train.exit_interval)
                if self.save and (leaves or due(state.iteration, self.config.save.save_interval)):
                    self.save(state)
                    saved_at = state.iteration
                watch.lap()  # evaluating and saving are not training time
                if leaves:
                    self.log.say(f" leaving after iteration {state.iteration} (--exit-interval {train.exit_interval})")
                    break
        finally:
            stream.close()
        if self.save and state.iteration != saved_at:
            self.save(state)
        return not leaves

    def finish(self, state: TrainState, valid: SizedSamples | None, test: SizedSamples | None) -> None:
        """The evaluations at the end of training."""
        for name, samples in (("validation", valid), ("test", test)):
            if samples is not None and self.config.train.eval_interval:
                self.evaluate(name, state.iteration, samples)

    def evaluate(self, name: str, iteration: int, samples: SizedSamples) -> None:
        loss = evaluate(self.engine, samples, self.rule, self.config.train.eval_iters, self.device)
        self.log.evaluation(name, iteration, loss)

    def _step(self, state: TrainState, batches: list[Batch], watch: Stopwatch, rates: Rates) -> StepMetrics:
        lr = self.schedule(self.engine.adam_steps)
        digest = samples_digest(state.consumed_samples, self.rule.global_batch)
        report, loss = self._train_step(batches, lr)
        state.iteration += 1
        state.consumed_samples += self.rule.global_batch
        seconds = watch.lap()
        tokens, tflops, mfu = rates.of(seconds)
        return StepMetrics(
            state.iteration,
            loss,
            report.grad_norm,
            lr,
            report.loss_scale,
            not report.applied,
            state.consumed_samples,
            digest,
            seconds * 1e3,
            tokens,
            tflops,
            mfu,
            max_memory_bytes(self.device),
        )

    def _train_step(self, batches: list[Batch], lr: float) -> tuple[StepReport, float]:
        """All micro-batches of one step; the loss is the mean over them and over data parallel."""
        total = torch.zeros((), device=self.device)
        report = None
        for batch in batches:
            loss = forward_loss(self.engine, batch.to(self.device))
            self.engine.backward(loss)
            total += loss.detach()
            report = self.engine.step(lr)
        assert report is not None, "the last micro-batch of a step is the accumulation boundary"
        return report, all_reduce(total, self.engine.groups.dp).item() / (len(batches) * self.rule.dp_size)

    def _rates(self) -> Rates:
        peak = self.config.log.peak_tflops
        if peak is None and self.device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(self.device))
        return Rates(
            self.rule.global_batch * self.config.seq_length,
            flops_per_token(self.config.model, self.config.seq_length),
            self.engine.groups.world.size,
            peak,
        )


def due(iteration: int, interval: int) -> bool:
    """An interval of 0 switches the thing off."""
    return interval > 0 and iteration % interval == 0
