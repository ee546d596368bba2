"""The one step of an engine that the flops profiler looks at, on rank 0: counted, printed and written to a file.

The step before it is timed in the same way, but not counted: what the profiler costs is then seen. What is compiled
runs as it is written for that step, on all ranks: tensor parallel ones must draw the same dropout and round alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from megatron.checkpoint.agree import on_rank_0
from megatron.config.tree import Config
from megatron.errors import StorageError
from megatron.zero.engine import ZeroEngine

if TYPE_CHECKING:  # loaded where it is asked for
    from megatron.profiler import FlopsProfiler
    from megatron.profiler.profiler import ProfiledEngine

OUTPUT_FILE_FLAG = "--flops-profiler-output-file"


class ProfiledStep:
    def __init__(self, config: Config, core: ZeroEngine, engine: ProfiledEngine) -> None:
        self._config, self._words, self._core = config.profile, config.key_names, core
        self._previous_step_seconds: float | None = None
        self.profiler: FlopsProfiler | None = None
        """On rank 0, where a profile is asked for."""
        path = self._config.flops_profiler_output_file
        if self._config.flops_profiler and path:
            on_rank_0(lambda: _check_output_path(path), core.groups.world)
        if self._config.flops_profiler and core.groups.world.rank == 0:
            from megatron.profiler import FlopsProfiler
            self.profiler = FlopsProfiler(core.module, engine)
        self._is_due = self._config.flops_profiler

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A part of a step: forward, backward or step. What the optimizer does is timed, not counted."""
        if not self._is_due or not self._core.module.training:
            return nullcontext()
        ahead = self._config.flops_profiler_step - self._core.global_steps - 1
        if ahead < 0:
            self._is_due = False
            self._print_nothing_profiled()
        if self.profiler is None:
            return _run_uncompiled() if ahead == 0 else nullcontext()
        if ahead == 0:
            return self.profiler.part(name, counts=name != "step")
        return self._time_phase() if ahead == 1 else nullcontext()

    def _print_nothing_profiled(self) -> None:
        if self.profiler is not None:
            print(self._words.translate(
                f" note: nothing is profiled: --flops-profiler-step {self._config.flops_profiler_step} "
                f"is over, the run goes on at step {self._core.global_steps + 1}"),
                  flush=True)

    def step_done(self) -> None:
        """After an optimizer step; the profile is told once."""
        step = self._core.global_steps
        if self._is_due and step == self._config.flops_profiler_step:
            self._is_due = False
            if self.profiler is not None:
                self._write_report(self.profiler, step)

    def _write_report(self, profiler: FlopsProfiler, step: int) -> None:
        from megatron.profiler.output import includes_modules, write_profile
        from megatron.profiler.text import format_profile

        asked, found = self._config, profiler.profile(step, self._previous_step_seconds)
        path = asked.flops_profiler_output_file
        shown = asked.flops_profiler_module_depth, asked.flops_profiler_top_modules, asked.flops_profiler_detailed
        print(format_profile(found, *shown[:2], detailed=shown[2] and path is None), flush=True)
        if path is not None:
            try:
                write_profile(found, path, *shown)
                whole = ", every module" if includes_modules(path, asked.flops_profiler_detailed) else ""
                print(f" profile of step {step}{whole}: {path}", flush=True)
            except StorageError as error:  # not worth ending a job of many ranks
                print(f"warning: {error}; training goes on without it", file=sys.stderr, flush=True)

    @contextmanager
    def _time_phase(self) -> Iterator[None]:
        start = self._now()
        yield
        self._previous_step_seconds = (self._previous_step_seconds or 0.0) + self._now() - start

    def _now(self) -> float:
        device = self._core.state.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _run_uncompiled() -> AbstractContextManager[object]:
    from megatron.profiler.recording import run_uncompiled
    return run_uncompiled()


def _check_output_path(path: str) -> None:
    from megatron.profiler.output import check_output_path
    check_output_path(path, OUTPUT_FILE_FLAG)
