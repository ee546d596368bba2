"""Features of an engine that a configuration switches on: the monitor, the flops profile of one step, progressive layer
drop, and eigenvalues for MoQ.

Monitor: console lines (`steps_per_print`), time and memory by phase (`wall_clock_breakdown`, `memory_breakdown`), and
scalars for TensorBoard, CSV and Weights & Biases, on rank 0. Without any, nothing is computed and the host never waits
for the device. A console line reads the loss from the device; on an accelerator scalars are written one step late, when
the loss is on the host anyway. Profile: rank 0 counts one step; the step before is timed for comparison. Compiled
modules run uncompiled in it. Progressive layer drop: in training the forward gets `progressive_layer_drop=True,
pld_theta=theta`, and `pld_step` if it has such a parameter. The model decides which layers to skip. Eigenvalues: before
a bit width changes, the last micro-batch is run again on every rank with its random numbers; the forward must return
the loss.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.config.model_config import LayerDropConfig, QuantizeConfig
from megatron.config.tree import Config
from megatron.distributed.consistency import on_rank_0
from megatron.errors import ConfigError, StorageError
from megatron.host_memory import peak_resident_bytes
from megatron.metrics.sinks import (CsvSink, MetricsRecord, MetricsSink, TensorboardSink, WandbProject, WandbSink,
                                    open_sinks)
from megatron.metrics.step_metrics import NvmeStats
from megatron.zero.eigenvalue import HessianEigensolver
from megatron.zero.engine import ZeroEngine
from megatron.zero.moq import MoQState
from mpu.device import HostScalars, on_accelerator
from mpu.random import capture_rng, restore_rng

if TYPE_CHECKING:
    from megatron.profiler import FlopsProfiler
    from megatron.zero.api.engine import Engine

DEFAULT_STEPS_PER_PRINT = 10  # if a breakdown is on and `steps_per_print` is not set
TAG_PREFIX = "Train/Samples/"

ScalarEvent = tuple[str, float, int]  # (name, value, samples seen)


@dataclass(frozen=True)
class MonitorConfig:
    """The outputs that the configuration asks for."""

    steps_per_print: int = 0
    times: bool = False
    memory: bool = False
    tensorboard_dir: str | None = None
    csv_dir: str | None = None
    wandb: WandbProject | None = None


class EngineMonitor:
    """Monitor of one engine; unless it `is_active` (only on the first rank), the engine never calls it."""

    def __init__(self, config: MonitorConfig, device: torch.device, is_first_rank: bool,
                 read_nvme_stats: Callable[[], NvmeStats | None]) -> None:
        self.config = config
        self._active_config = active = config if is_first_rank else MonitorConfig()
        # Steps between console lines; 0: none.
        self._print_interval = active.steps_per_print or (
            DEFAULT_STEPS_PER_PRINT if active.times or active.memory else 0)
        self.is_active = active != MonitorConfig()
        self._device, self._read_nvme_stats = device, read_nvme_stats
        self.loss: Tensor | None = None  # of the step so far
        self._seconds: dict[str, float] = {}  # by phase, since the last console line
        self._bytes: dict[str, int] = {}  # maximum after each phase, since the last console line
        self._nvme_stats: NvmeStats | None = None  # since the last console line
        self._steps_since_line = 0
        self._sinks: list[MetricsSink] = []
        # The loss on its way to the host; the samples seen and the other events of its step.
        self._pending_scalars: tuple[HostScalars, int, list[ScalarEvent]] | None = None

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

    def backward_done(self, loss: Tensor) -> None:
        """Add a micro-batch's share of the step's loss; it stays on the device."""
        if self._print_interval or self._sinks:
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    def step_done(self, engine: Engine) -> None:
        """Write the scalars, and a console line if due."""
        self._steps_since_line += 1
        self._write_pending_scalars()
        loss, self.loss = self.loss, None
        if loss is None:  # nothing is reported
            return
        is_due = self._print_interval > 0 and engine.global_steps % self._print_interval == 0
        if self._sinks:
            samples = engine.global_samples
            events = [(f"{TAG_PREFIX}lr", engine.get_lr()[0], samples)]
            if engine.config.precision.fp16:
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
            loss, = copy.values
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
        yield (f"step={engine.global_steps}, skipped={engine.core.counters.skipped_steps}, lr={engine.get_lr()}, "
               f"mom={engine.get_mom()}, loss={loss:.6g}")
        if times := self._phase_milliseconds():
            yield "time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
            if self._nvme_stats is not None:
                yield self._nvme_stats.format_per_step(self._steps_since_line)
        if self._bytes:
            yield "memory (GiB) | " + " | ".join(f"{name}: {value / 2**30:.3f}" for name, value in self._bytes.items())


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class EigenvalueEstimator:
    def __init__(self, core: ZeroEngine, config: QuantizeConfig, quantisation: MoQState) -> None:
        self._core, self._quantisation = core, quantisation
        self._curvature = HessianEigensolver(core.buckets, core.groups, max_iter=config.eigenvalue_max_iter,
                                             tol=config.eigenvalue_tol, stability=config.eigenvalue_stability)
        self._last_forward: tuple[Sequence[Any], Mapping[str, Any], dict[str, object]] | None = None

    def record_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments and random state of a training forward, if a bit width may change soon."""
        self._last_forward = (args, kwargs, capture_rng()) if self._quantisation.bits_may_fall_soon else None

    def after_step(self) -> None:
        """Compute the eigenvalues if the next step uses them. Collective."""
        if self._last_forward is None or not self._quantisation.bits_fall_next_step(self._core.counters.applied_steps):
            return
        core, (args, kwargs, streams) = self._core, self._last_forward
        core.finish_step()
        now = capture_rng()
        try:
            with core.backwards_without_step() as reset:
                def run() -> None:
                    reset()
                    restore_rng(streams)
                    loss = core.module(*args, **kwargs)
                    if not isinstance(loss, Tensor) or loss.numel() != 1:
                        raise ConfigError(
                            "--quantize-eigenvalue: the forward of the model returns something else than its loss, "
                            "which is run again to find eigenvalues: let it return the loss, or leave the setting out")
                    core.backward(loss * core.accumulation_steps)

                self._quantisation.set_eigenvalues([
                    self._curvature.eigenvalue(block, f"{block} {self._quantisation.counter}", run)
                    for block in self._quantisation.blocks[1:]])
        finally:
            restore_rng(now)
        self._last_forward = None


FORWARD_ARGUMENTS = ("progressive_layer_drop", "pld_theta")
STEP_ARGUMENT = "pld_step"


class ProgressiveLayerDrop:
    """`engine.progressive_layer_drop`, with DeepSpeed's names. Stateless: theta follows from the engine's step, so a
    resumed run continues."""

    def __init__(self, config: LayerDropConfig, module: nn.Module, step: Callable[[], int]) -> None:
        assert config.schedule is not None, "progressive layer drop is on"
        self._schedule, self._step, self._passes_step = config.schedule, step, check_forward_signature(module)
        self.theta, self.gamma = config.pld_theta, config.pld_gamma

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._step()

    def get_theta(self, step: int | None = None) -> float:
        """theta of `step`, by default the current one."""
        return self._schedule.theta_at(self.step if step is None else step)

    current_theta = property(get_theta)

    def get_state(self) -> dict[str, Any]:
        """Keyword arguments of the forward."""
        return dict(zip(FORWARD_ARGUMENTS, (True, self.get_theta()), strict=True))

    def forward_arguments(self) -> dict[str, Any]:
        """`get_state`, plus `pld_step` if the forward has that parameter."""
        return {**self.get_state(), **({STEP_ARGUMENT: self.step} if self._passes_step else {})}


def check_forward_signature(module: nn.Module) -> bool:
    """Raise ConfigError if the forward lacks the layer drop arguments; True if it also takes `pld_step`."""
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    missing = [name for name in FORWARD_ARGUMENTS if name not in parameters and not takes_any]
    if missing:
        raise ConfigError(
            f"--progressive-layer-drop: forward of {type(module).__name__} takes no {' and no '.join(missing)}, and it "
            "is the model that leaves out its layers: give its forward the keyword arguments "
            "progressive_layer_drop=False, pld_theta=1.0 (docs/methods.md), or leave the setting out")
    return STEP_ARGUMENT in parameters


class ProfiledStep:
    """The engine calls it as it does `EngineMonitor`."""

    def __init__(self, config: Config, core: ZeroEngine, engine: Engine) -> None:
        self._config, self._key_names, self._core = config.profile, config.key_names, core
        self._previous_step_seconds: float | None = None
        self.profiler: FlopsProfiler | None = None  # on rank 0, if a profile is configured
        path = self._config.flops_profiler_output_file
        if self._config.flops_profiler and path:
            from megatron.profiler.profile import check_output_path
            on_rank_0(lambda: check_output_path(path, "--flops-profiler-output-file"), core.groups.world)
        if self._config.flops_profiler and core.groups.world.rank == 0:
            from megatron import profiler
            self.profiler = profiler.FlopsProfiler(core.module, engine)
        self.is_active = self._is_due = self._config.flops_profiler

    def backward_done(self, loss: Tensor) -> None:
        """Nothing to record."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """The optimizer step is timed but its FLOPs are not counted."""
        if not self._is_due or not self._core.module.training:
            return nullcontext()
        ahead = self._config.flops_profiler_step - self._core.state.counters.global_steps - 1
        if ahead < 0:
            self._is_due = False
            if self.profiler is not None:
                print(self._key_names.translate(
                    f" note: nothing is profiled: --flops-profiler-step {self._config.flops_profiler_step} "
                    f"is over, the run goes on at step {self._core.state.counters.global_steps + 1}"), flush=True)
        if self.profiler is None and ahead == 0:
            from megatron.profiler.flop_recorder import run_uncompiled
            return run_uncompiled()
        if self.profiler is not None and ahead in (0, 1):
            return self.profiler.part(name, counts=ahead == 0 and name != "step")
        return nullcontext()

    def step_done(self, engine: Engine) -> None:
        """Write the report of the profiled step."""
        step, config = self._core.state.counters.global_steps, self._config
        if self._is_due and self.profiler is not None and step == config.flops_profiler_step - 1:
            self._previous_step_seconds = sum(self.profiler.profile().phase_seconds.values())
            self.profiler.reset_profile()
        if not self._is_due or step != config.flops_profiler_step:
            return
        self._is_due = False
        if self.profiler is None:
            return
        from megatron.profiler.profile import format_profile, is_json, write_profile

        profile, path = self.profiler.profile(step, self._previous_step_seconds), config.flops_profiler_output_file
        depth, top, detailed = (config.flops_profiler_module_depth, config.flops_profiler_top_modules,
                                config.flops_profiler_detailed)
        print(format_profile(profile, depth, top, detailed=detailed and path is None), flush=True)
        if path is not None:
            try:
                write_profile(profile, path, depth, top, detailed)
                modules = ", every module" if detailed or is_json(path) else ""
                print(f" profile of step {step}{modules}: {path}", flush=True)
            except StorageError as error:  # a failed profile must not end the job
                print(f"warning: {error}; training goes on without it", file=sys.stderr, flush=True)
