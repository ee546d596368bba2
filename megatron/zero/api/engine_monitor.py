"""The engine's monitor: console lines, time and memory by phase, and scalars for TensorBoard, CSV and Weights & Biases.

Each output exists if the configuration asks for it (`steps_per_print`, `wall_clock_breakdown`, `memory_breakdown`, `tensorboard`,
`csv_monitor`, `wandb`), on rank 0. Without any, nothing is computed and the host never waits for the device. A console line reads
the loss from the device; on an accelerator scalars are written one step late, when the loss is on the host anyway.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.config.run_config import LogConfig
from megatron.errors import ConfigError, StorageError
from megatron.host_memory import peak_resident_bytes
from megatron.metrics.scalar_writers import (AppendOnlyFile, TensorboardWriter, WandbProject, WandbRun, format_csv_row,
                                             storage_errors)
from megatron.metrics.step_metrics import NvmeStats
from megatron.zero.step_result import HostScalars
from mpu.device import on_accelerator

DEFAULT_STEPS_PER_PRINT = 10
"""Between two breakdowns, where the configuration says nothing."""
TAG_PREFIX = "Train/Samples/"
MAX_OPEN_FILES = 64
"""Files of scalars at a time."""

ScalarEvent = tuple[str, float, int]
"""Name, value, and the samples seen by then."""


@dataclass(frozen=True)
class MonitorConfig:
    """What is asked for."""

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


def read_monitor_config(keys: Mapping[str, Any], log: LogConfig) -> MonitorConfig:
    """From the values of a configuration file, by path, and what they amount to."""
    project = WandbProject(log.wandb_project, log.wandb_group,
                           log.wandb_team) if log.wandb_project is not None else None
    return MonitorConfig(keys.get("steps_per_print") or 0, keys.get("wall_clock_breakdown", False),
                         keys.get("memory_breakdown", False), log.tensorboard_dir, log.csv_dir, project)


class MonitoredEngine(Protocol):
    """What a monitor asks of an engine after a step."""

    @property
    def global_steps(self) -> int: ...

    @property
    def global_samples(self) -> int: ...

    @property
    def skipped_steps(self) -> int: ...

    @property
    def cur_scale(self) -> float: ...

    def get_lr(self) -> list[float]: ...

    def get_mom(self) -> list[Any]: ...

    def fp16_enabled(self) -> bool: ...


class EngineMonitor:
    """Of one engine; on ranks other than the first, one that is asked for nothing."""

    def __init__(self, config: MonitorConfig, device: torch.device, is_first_rank: bool,
                 read_nvme_stats: Callable[[], NvmeStats | None]) -> None:
        self.config = config
        self._active_config = config if is_first_rank else MonitorConfig()
        self._device, self._read_nvme_stats = device, read_nvme_stats
        self._loss: Tensor | None = None
        self._seconds: dict[str, float] = {}  # since the last line, by phase
        self._bytes: dict[str, int] = {}  # the most after each phase, since the last line
        self._nvme_stats: NvmeStats | None = None  # of drives, by the phases since the last line
        self._steps_since_line = 0
        self._writers: list[EventWriter] = []
        self._pending_scalars: tuple[HostScalars, Callable[[float], list[ScalarEvent]]] | None = None
        """The scalars of a step, once its loss is known."""

    def open(self) -> None:
        """Before the first step: what cannot be written fails here, and leaves no other sink open."""
        with ExitStack() as opened:
            opened.callback(self.close)
            if self._active_config.tensorboard_dir is not None:
                self._writers.append(TensorboardEventWriter(self._active_config.tensorboard_dir))
            if self._active_config.csv_dir is not None:
                self._writers.append(CsvEventWriter(self._active_config.csv_dir))
            if self._active_config.wandb is not None:
                self._writers.append(WandbEventWriter(self._active_config.wandb))
            opened.pop_all()

    @property
    def enabled(self) -> bool:
        """Scalars are written somewhere."""
        return self.config.writes_scalars

    def write_events(self, events: Sequence[ScalarEvent]) -> None:
        """Further scalars, from rank 0: (name, value, samples seen)."""
        for sink in list(self._writers):
            try:
                sink.write(events)
            except (OSError, StorageError) as error:  # not worth ending a job of many ranks
                self._writers.remove(sink)
                _warn(f"warning: {error}; training goes on without these scalars")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """One part of a step, to be timed and measured where that is asked for."""
        return self._measure_phase(name) if self._active_config.times or self._active_config.memory else nullcontext()

    @contextmanager
    def _measure_phase(self, name: str) -> Iterator[None]:
        start, before = self._now(), self._read_nvme_stats()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
        if before is not None and (after := self._read_nvme_stats()) is not None:
            self._nvme_stats = (self._nvme_stats or NvmeStats()) + after - before
        if self._active_config.memory:
            self._bytes[name] = max(self._bytes.get(name, 0), _bytes_in_use(self._device))

    def _now(self) -> float:
        if self._active_config.times and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def reset_loss(self) -> None:
        """What has been accumulated was discarded."""
        self._loss = None

    def add_loss(self, part: Tensor) -> None:
        """The share of one micro-batch in the step's loss; it stays on the device."""
        if self._active_config.print_interval or self._writers:
            part = part.detach()
            self._loss = part if self._loss is None else self._loss + part

    def step_done(self, engine: MonitoredEngine) -> None:
        """After an optimizer step: a line where one is due, and scalars."""
        self._steps_since_line += 1
        due = self._active_config.print_interval > 0 and engine.global_steps % self._active_config.print_interval == 0
        self._write_pending_scalars()
        loss = float(self._loss.item()) if self._loss is not None and due else None
        if self._writers:
            self._write_scalars(engine, loss, self._phase_time_events(engine) if due else ())
        if due:
            for line in self._console_lines(engine, loss):
                print(line, flush=True)
            self._seconds.clear()
            self._bytes.clear()
            self._nvme_stats = None
            self._steps_since_line = 0
        self._loss = None

    def _write_scalars(self, engine: MonitoredEngine, loss: float | None, more: Iterable[ScalarEvent]) -> None:
        """Of this step; where its loss is still on an accelerator, when the next one is done."""
        others = [*self._extra_events(engine), *more]
        if loss is None and self._loss is None:
            self.write_events(others)
            return
        samples = engine.global_samples

        def with_loss(known: float) -> list[ScalarEvent]:
            return [(f"{TAG_PREFIX}train_loss", known, samples), *others]

        if loss is not None:
            self.write_events(with_loss(loss))
        elif self._loss is not None:
            self._pending_scalars = HostScalars(self._loss.view(1)), with_loss
            if not on_accelerator(self._loss):
                self._write_pending_scalars()

    def _write_pending_scalars(self) -> None:
        late, self._pending_scalars = self._pending_scalars, None
        if late is not None:
            copy, with_loss = late
            self.write_events(with_loss(*copy.values()))

    def close(self) -> None:
        """What goes wrong is told: other ranks are about to take leave of this one together."""
        self._write_pending_scalars()
        for sink in self._writers:
            try:
                sink.close()
            except (OSError, StorageError) as error:
                _warn(f"warning: {error}; the last scalars may be missing")

    def _extra_events(self, engine: MonitoredEngine) -> Iterator[ScalarEvent]:
        yield f"{TAG_PREFIX}lr", engine.get_lr()[0], engine.global_samples
        if engine.fp16_enabled():
            yield f"{TAG_PREFIX}loss_scale", engine.cur_scale, engine.global_samples

    def _phase_time_events(self, engine: MonitoredEngine) -> Iterator[ScalarEvent]:
        for name, value in self._phase_milliseconds().items():
            yield f"{TAG_PREFIX}elapsed_time_ms_{name}", value, engine.global_samples

    def _phase_milliseconds(self) -> dict[str, float]:
        """Of each phase of one optimizer step, on average since the last line."""
        spent = self._seconds if self._active_config.times else {}
        return {name: seconds * 1e3 / self._steps_since_line for name, seconds in spent.items()}

    def _console_lines(self, engine: MonitoredEngine, loss: float | None) -> Iterator[str]:
        known = "" if loss is None else f", loss={loss:.6g}"
        yield (f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
               f"mom={engine.get_mom()}{known}")
        if times := self._phase_milliseconds():
            yield "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
            if self._nvme_stats is not None:
                yield self._nvme_stats.format_per_step(self._steps_since_line)
        if self._bytes:
            yield "memory (GiB) | " + " | ".join(f"{name}: {value / 2**30:.3f}" for name, value in self._bytes.items())


class EventWriter(Protocol):
    """Where scalars go."""

    def write(self, events: Sequence[ScalarEvent]) -> None: ...

    def close(self) -> None: ...


class TensorboardEventWriter:
    def __init__(self, folder: str) -> None:
        try:
            self._writer = TensorboardWriter("tensorboard.output_path:", folder)
        except ImportError as error:
            raise ConfigError(f"tensorboard.enabled needs the package tensorboard ({error}); install it, or use "
                              "csv_monitor") from None
        atexit.register(self._writer.writer.close)  # its thread would take the last scalars along

    def write(self, events: Sequence[ScalarEvent]) -> None:
        with self._writer.storage_errors():
            for name, value, samples in events:
                self._writer.writer.add_scalar(name, value, samples)

    def close(self) -> None:
        atexit.unregister(self._writer.writer.close)
        self._writer.close()


class CsvEventWriter:
    """One file per scalar, its name with `_` for `/`; a later run goes on in it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, AppendOnlyFile] = {}
        with storage_errors("csv_monitor.output_path:", folder):
            os.makedirs(folder, exist_ok=True)

    def write(self, events: Sequence[ScalarEvent]) -> None:
        for name, value, samples in events:
            self._file_of(name).append(format_csv_row((samples, value)))

    def _file_of(self, name: str) -> AppendOnlyFile:
        """Open, as are those that were written last."""
        path = os.path.join(self._folder, name.replace("/", "_").replace(" ", "_") + ".csv")
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) == MAX_OPEN_FILES:
                self._files.pop(next(iter(self._files))).close_without_sync()
            file = AppendOnlyFile("csv_monitor.output_path:",
                                  path,
                                  _warn,
                                  header=format_csv_row(("step", name.rpartition("/")[2])),
                                  drops_partial_line=True)
        self._files[path] = file
        return file

    def close(self) -> None:
        files, self._files = self._files, {}
        with ExitStack() as closing:
            for file in files.values():
                closing.callback(file.close)


class WandbEventWriter:
    def __init__(self, project: WandbProject) -> None:
        self._run = WandbRun("wandb.enabled", project, step_metric="samples")

    def write(self, events: Sequence[ScalarEvent]) -> None:
        for name, value, samples in events:
            self._run.log({name: value, "samples": samples})

    def close(self) -> None:
        self._run.close()


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _bytes_in_use(device: torch.device) -> int:
    """Of the device's allocator, or on a CPU the peak of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return peak_resident_bytes()
