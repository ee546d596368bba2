"""The engine's monitor: console lines, time and memory by phase, and scalars for TensorBoard, CSV and Weights & Biases.

Each output exists if the configuration asks for it (`steps_per_print`, `wall_clock_breakdown`, `memory_breakdown`,
`tensorboard`, `csv_monitor`, `wandb`), on rank 0. Without any, nothing is computed and the host never waits for the
device. A console line reads the loss from the device; on an accelerator scalars are written one step late, when the
loss is on the host anyway.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.errors import StorageError
from megatron.host_memory import peak_resident_bytes
from megatron.metrics.sinks import (CsvSink, MetricsRecord, MetricsSink, TensorboardSink, WandbProject, WandbSink,
                                    open_sinks)
from megatron.metrics.step_metrics import NvmeStats
from megatron.zero.step_result import HostScalars
from mpu.device import on_accelerator

if TYPE_CHECKING:
    from megatron.zero.api.engine import Engine

DEFAULT_STEPS_PER_PRINT = 10
"""If a breakdown is on and `steps_per_print` is not set."""
TAG_PREFIX = "Train/Samples/"

ScalarEvent = tuple[str, float, int]
"""(name, value, samples seen)."""


@dataclass(frozen=True)
class MonitorConfig:
    """The outputs that the configuration asks for."""

    steps_per_print: int = 0
    times: bool = False
    memory: bool = False
    tensorboard_dir: str | None = None
    csv_dir: str | None = None
    wandb: WandbProject | None = None

    @property
    def print_interval(self) -> int:
        """Steps between console lines."""
        return self.steps_per_print or (DEFAULT_STEPS_PER_PRINT if self.times or self.memory else 0)

    @property
    def writes_scalars(self) -> bool:
        return (self.tensorboard_dir, self.csv_dir, self.wandb) != (None, None, None)


class EngineMonitor:
    """Monitor of one engine; inactive on ranks other than the first."""

    def __init__(self, config: MonitorConfig, device: torch.device, is_first_rank: bool,
                 read_nvme_stats: Callable[[], NvmeStats | None]) -> None:
        self.config = config
        self._active_config = config if is_first_rank else MonitorConfig()
        self._device, self._read_nvme_stats = device, read_nvme_stats
        self._loss: Tensor | None = None
        self._seconds: dict[str, float] = {}  # by phase, since the last console line
        self._bytes: dict[str, int] = {}  # maximum after each phase, since the last console line
        self._nvme_stats: NvmeStats | None = None  # since the last console line
        self._steps_since_line = 0
        self._sinks: list[MetricsSink] = []
        self._pending_scalars: tuple[HostScalars, int, list[ScalarEvent]] | None = None
        """The loss on its way to the host; the samples seen and the other events of its step."""

    def open(self) -> None:
        """Call before the first step. Output errors are raised here, and close the outputs opened so far."""
        config = self._active_config

        def configured_sinks() -> Iterator[MetricsSink]:
            if config.tensorboard_dir is not None:
                yield TensorboardSink("tensorboard.output_path:", config.tensorboard_dir)
            if config.csv_dir is not None:
                yield CsvSink("csv_monitor.output_path:", config.csv_dir, _warn, by_scalar=True)
            if config.wandb is not None:
                yield WandbSink("wandb.enabled", config.wandb, step_metric="samples")

        self._sinks = open_sinks(configured_sinks())

    def write_events(self, events: Sequence[ScalarEvent]) -> None:
        """Write further scalars, on rank 0: (name, value, samples seen)."""
        for sink in list(self._sinks):
            try:
                for name, value, samples in events:
                    sink.write(MetricsRecord(scalars={name: value}, axes={"samples": samples}))
            except (OSError, StorageError) as error:  # a failed log must not end the job
                self._sinks.remove(sink)
                _warn(f"warning: {error}; training goes on without these scalars")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and measure one phase of a step, if configured."""
        if not (self._active_config.times or self._active_config.memory):
            yield
            return
        start, before = self._now(), self._read_nvme_stats()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
        if before is not None and (after := self._read_nvme_stats()) is not None:
            self._nvme_stats = (self._nvme_stats or NvmeStats()) + after - before
        if self._active_config.memory:
            in_use = (torch.cuda.memory_allocated(self._device) if self._device.type == "cuda"
                      else peak_resident_bytes())
            self._bytes[name] = max(self._bytes.get(name, 0), in_use)

    def _now(self) -> float:
        if self._active_config.times and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def reset_loss(self) -> None:
        """The accumulated gradients were discarded."""
        self._loss = None

    def add_loss(self, part: Tensor) -> None:
        """Add a micro-batch's share of the step's loss; it stays on the device."""
        if self._active_config.print_interval or self._sinks:
            part = part.detach()
            self._loss = part if self._loss is None else self._loss + part

    def step_done(self, engine: Engine) -> None:
        """After an optimizer step: write the scalars, and a console line if due."""
        self._steps_since_line += 1
        self._write_pending_scalars()
        loss, self._loss = self._loss, None
        if loss is None:  # nothing is reported
            return
        interval = self._active_config.print_interval
        is_due = interval > 0 and engine.global_steps % interval == 0
        if self._sinks:
            samples = engine.global_samples
            events = [(f"{TAG_PREFIX}lr", engine.get_lr()[0], samples)]
            if engine.fp16_enabled():
                events.append((f"{TAG_PREFIX}loss_scale", engine.cur_scale, samples))
            if is_due:
                events += [(f"{TAG_PREFIX}elapsed_time_ms_{name}", value, samples)
                           for name, value in self._phase_milliseconds().items()]
            self._pending_scalars = HostScalars(loss.view(1)), samples, events
            if is_due or not on_accelerator(loss):  # otherwise written after the next step
                self._write_pending_scalars()
        if is_due:
            for line in self._console_lines(engine, float(loss.item())):
                print(line, flush=True)
            self._seconds.clear()
            self._bytes.clear()
            self._nvme_stats = None
            self._steps_since_line = 0

    def _write_pending_scalars(self) -> None:
        pending, self._pending_scalars = self._pending_scalars, None
        if pending is not None:
            copy, samples, events = pending
            loss, = copy.values()
            self.write_events([(f"{TAG_PREFIX}train_loss", loss, samples), *events])

    def close(self) -> None:
        """Warns about errors but raises none: the ranks are about to exit together."""
        self._write_pending_scalars()
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except (OSError, StorageError) as error:
                _warn(f"warning: {error}; the last scalars may be missing")

    def _phase_milliseconds(self) -> dict[str, float]:
        """Average per step of each phase since the last console line."""
        spent = self._seconds if self._active_config.times else {}
        return {name: seconds * 1e3 / self._steps_since_line for name, seconds in spent.items()}

    def _console_lines(self, engine: Engine, loss: float) -> Iterator[str]:
        yield (f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
               f"mom={engine.get_mom()}, loss={loss:.6g}")
        if times := self._phase_milliseconds():
            yield "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
            if self._nvme_stats is not None:
                yield self._nvme_stats.format_per_step(self._steps_since_line)
        if self._bytes:
            yield "memory (GiB) | " + " | ".join(f"{name}: {value / 2**30:.3f}" for name, value in self._bytes.items())


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
