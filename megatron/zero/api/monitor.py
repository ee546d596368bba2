"""What an engine reports while it trains: console lines, times and memory per phase, scalars for tensorboard, CSV
and Weights & Biases.

Each is there where the configuration asks for it (`steps_per_print`, `wall_clock_breakdown`, `memory_breakdown`,
`tensorboard`, `csv_monitor`, `wandb`), and on rank 0. Where nothing is asked for, nothing is computed and nobody waits
for the device. A line reads the loss from the device; scalars are written a step late there, when it is on the host in
any case. The trainer has its own log (train/metrics.py).
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

from megatron.config.log import LogConfig
from megatron.errors import ConfigError, StorageError
from megatron.zero.accelerator import peak_resident_bytes
from megatron.zero.api.curves import Curves, storing
from megatron.zero.api.lines import Lines, csv_line
from megatron.zero.api.wandb_run import Project, WandbRun
from megatron.zero.homes.used import DriveUse
from megatron.zero.verdict import HostScalars
from mpu.device import on_accelerator

DEFAULT_STEPS_PER_PRINT = 10
"""Between two breakdowns, where the configuration says nothing."""
PREFIX = "Train/Samples/"
MOST_OPEN = 64
"""Files of scalars at a time."""

Event = tuple[str, float, int]
"""Name, value, and the samples seen by then."""


@dataclass(frozen=True)
class Watch:
    """What is asked for."""

    steps_per_print: int = 0
    times: bool = False
    memory: bool = False
    tensorboard_dir: str | None = None
    csv_dir: str | None = None
    wandb: Project | None = None

    @property
    def interval(self) -> int:
        """Steps between console lines."""
        return self.steps_per_print or (DEFAULT_STEPS_PER_PRINT if self.times or self.memory else 0)

    @property
    def writes(self) -> bool:
        return (self.tensorboard_dir, self.csv_dir, self.wandb) != (None, None, None)


def watch_of(keys: Mapping[str, Any], log: LogConfig) -> Watch:
    """From the values of a configuration file, by path, and what they amount to."""
    project = Project(log.wandb_project, log.wandb_group, log.wandb_team) if log.wandb_project is not None else None
    return Watch(keys.get("steps_per_print") or 0, keys.get("wall_clock_breakdown", False),
                 keys.get("memory_breakdown", False), log.tensorboard_dir, log.csv_dir, project)


class Trained(Protocol):
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


class Monitor:
    """Of one engine; on ranks other than the first, one that is asked for nothing."""

    def __init__(self, watch: Watch, device: torch.device, is_first_rank: bool,
                 drive_use: Callable[[], DriveUse | None]) -> None:
        self.asked = watch
        self._watch = watch if is_first_rank else Watch()
        self._device, self._drive_use = device, drive_use
        self._loss: Tensor | None = None
        self._seconds: dict[str, float] = {}  # since the last line, by phase
        self._bytes: dict[str, int] = {}  # the most after each phase, since the last line
        self._used: DriveUse | None = None  # of drives, by the phases since the last line
        self._lap_steps = 0
        self._sinks: list[Sink] = []
        self._late: tuple[HostScalars, Callable[[float], list[Event]]] | None = None
        """The scalars of a step, once its loss is known."""

    def open(self) -> None:
        """Before the first step: what cannot be written fails here, and leaves no other sink open."""
        with ExitStack() as opened:
            opened.callback(self.close)
            if self._watch.tensorboard_dir is not None:
                self._sinks.append(Tensorboard(self._watch.tensorboard_dir))
            if self._watch.csv_dir is not None:
                self._sinks.append(CsvFiles(self._watch.csv_dir))
            if self._watch.wandb is not None:
                self._sinks.append(Wandb(self._watch.wandb))
            opened.pop_all()

    @property
    def enabled(self) -> bool:
        """Scalars are written somewhere."""
        return self.asked.writes

    def write_events(self, events: Sequence[Event]) -> None:
        """Further scalars, from rank 0: (name, value, samples seen)."""
        for sink in list(self._sinks):
            try:
                sink.write(events)
            except (OSError, StorageError) as error:  # not worth ending a job of many ranks
                self._sinks.remove(sink)
                _warn(f"warning: {error}; training goes on without these scalars")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """One part of a step, to be timed and measured where that is asked for."""
        return self._measured(name) if self._watch.times or self._watch.memory else nullcontext()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        start, before = self._now(), self._drive_use()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
        if before is not None and (after := self._drive_use()) is not None:
            self._used = (self._used or DriveUse()) + after - before
        if self._watch.memory:
            self._bytes[name] = max(self._bytes.get(name, 0), _bytes_in_use(self._device))

    def _now(self) -> float:
        if self._watch.times and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def forget_loss(self) -> None:
        """What has been accumulated was discarded."""
        self._loss = None

    def add_loss(self, part: Tensor) -> None:
        """The share of one micro-batch in the step's loss; it stays on the device."""
        if self._watch.interval or self._sinks:
            part = part.detach()
            self._loss = part if self._loss is None else self._loss + part

    def step_done(self, engine: Trained) -> None:
        """After an optimizer step: a line where one is due, and scalars."""
        self._lap_steps += 1
        due = self._watch.interval > 0 and engine.global_steps % self._watch.interval == 0
        self._write_late()
        loss = float(self._loss.item()) if self._loss is not None and due else None
        if self._sinks:
            self._write_scalars(engine, loss, self._elapsed(engine) if due else ())
        if due:
            for line in self._lines(engine, loss):
                print(line, flush=True)
            self._seconds.clear()
            self._bytes.clear()
            self._used = None
            self._lap_steps = 0
        self._loss = None

    def _write_scalars(self, engine: Trained, loss: float | None, more: Iterable[Event]) -> None:
        """Of this step; where its loss is still on an accelerator, when the next one is done."""
        others = [*self._others(engine), *more]
        if loss is None and self._loss is None:
            self.write_events(others)
            return
        samples = engine.global_samples

        def with_loss(known: float) -> list[Event]:
            return [(f"{PREFIX}train_loss", known, samples), *others]

        if loss is not None:
            self.write_events(with_loss(loss))
        elif self._loss is not None:
            self._late = HostScalars(self._loss.view(1)), with_loss
            if not on_accelerator(self._loss):
                self._write_late()

    def _write_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            copy, with_loss = late
            self.write_events(with_loss(*copy.values()))

    def close(self) -> None:
        """What goes wrong is told: other ranks are about to take leave of this one together."""
        self._write_late()
        for sink in self._sinks:
            try:
                sink.close()
            except (OSError, StorageError) as error:
                _warn(f"warning: {error}; the last scalars may be missing")

    def _others(self, engine: Trained) -> Iterator[Event]:
        yield f"{PREFIX}lr", engine.get_lr()[0], engine.global_samples
        if engine.fp16_enabled():
            yield f"{PREFIX}loss_scale", engine.cur_scale, engine.global_samples

    def _elapsed(self, engine: Trained) -> Iterator[Event]:
        for name, value in self._milliseconds().items():
            yield f"{PREFIX}elapsed_time_ms_{name}", value, engine.global_samples

    def _milliseconds(self) -> dict[str, float]:
        """Of each phase of one optimizer step, on average since the last line."""
        spent = self._seconds if self._watch.times else {}
        return {name: seconds * 1e3 / self._lap_steps for name, seconds in spent.items()}

    def _lines(self, engine: Trained, loss: float | None) -> Iterator[str]:
        known = "" if loss is None else f", loss={loss:.6g}"
        yield (f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
               f"mom={engine.get_mom()}{known}")
        if times := self._milliseconds():
            yield "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
            if self._used is not None:
                yield self._used.a_step(self._lap_steps)
        if self._bytes:
            yield "memory (GiB) | " + " | ".join(f"{name}: {value / 2**30:.3f}" for name, value in self._bytes.items())


class Sink(Protocol):
    """Where scalars go."""

    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    def __init__(self, folder: str) -> None:
        try:
            self._curves = Curves("tensorboard.output_path:", folder)
        except ImportError as error:
            raise ConfigError(f"tensorboard.enabled needs the package tensorboard ({error}); install it, or use "
                              "csv_monitor") from None
        atexit.register(self._curves.writer.close)  # its thread would take the last scalars along

    def write(self, events: Sequence[Event]) -> None:
        with self._curves.storing():
            for name, value, samples in events:
                self._curves.writer.add_scalar(name, value, samples)

    def close(self) -> None:
        atexit.unregister(self._curves.writer.close)
        self._curves.close()


class CsvFiles:
    """One file per scalar, its name with `_` for `/`; a later run goes on in it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, Lines] = {}
        with storing("csv_monitor.output_path:", folder):
            os.makedirs(folder, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._file_of(name).append(csv_line((samples, value)))

    def _file_of(self, name: str) -> Lines:
        """Open, as are those that were written last."""
        path = os.path.join(self._folder, name.replace("/", "_").replace(" ", "_") + ".csv")
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) == MOST_OPEN:
                self._files.pop(next(iter(self._files))).leave()
            file = Lines("csv_monitor.output_path:", path, _warn, head=csv_line(("step", name.rpartition("/")[2])),
                         drops_half=True)
        self._files[path] = file
        return file

    def close(self) -> None:
        files, self._files = self._files, {}
        with ExitStack() as closing:
            for file in files.values():
                closing.callback(file.close)


class Wandb:
    def __init__(self, project: Project) -> None:
        self._run = WandbRun("wandb.enabled", project, axis="samples")

    def write(self, events: Sequence[Event]) -> None:
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
