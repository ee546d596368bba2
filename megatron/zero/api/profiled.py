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
    from megatron.profiler.profiler import Engine

FLAG = "--flops-profiler-output-file"


class ProfiledStep:
    def __init__(self, config: Config, core: ZeroEngine, engine: Engine) -> None:
        self._asked, self._words, self._core = config.profile, config.words, core
        self._step_before: float | None = None
        self.profiler: FlopsProfiler | None = None
        """On rank 0, where a profile is asked for."""
        path = self._asked.flops_profiler_output_file
        if self._asked.flops_profiler and path:
            on_rank_0(lambda: _check_place(path), core.groups.world)
        if self._asked.flops_profiler and core.groups.world.rank == 0:
            from megatron.profiler import FlopsProfiler
            self.profiler = FlopsProfiler(core.module, engine)
        self._is_due = self._asked.flops_profiler

    def part(self, name: str) -> AbstractContextManager[object]:
        """A part of a step: forward, backward or step. What the optimizer does is timed, not counted."""
        if not self._is_due or not self._core.module.training:
            return nullcontext()
        ahead = self._asked.flops_profiler_step - self._core.global_steps - 1
        if ahead < 0:
            self._is_due = False
            self._tell_of_none()
        if self.profiler is None:
            return _as_written() if ahead == 0 else nullcontext()
        if ahead == 0:
            return self.profiler.part(name, counts=name != "step")
        return self._timed() if ahead == 1 else nullcontext()

    def _tell_of_none(self) -> None:
        if self.profiler is not None:
            print(self._words.of(f" note: nothing is profiled: --flops-profiler-step {self._asked.flops_profiler_step} "
                                 f"is over, the run goes on at step {self._core.global_steps + 1}"), flush=True)

    def step_done(self) -> None:
        """After an optimizer step; the profile is told once."""
        step = self._core.global_steps
        if self._is_due and step == self._asked.flops_profiler_step:
            self._is_due = False
            if self.profiler is not None:
                self._tell(self.profiler, step)

    def _tell(self, profiler: FlopsProfiler, step: int) -> None:
        from megatron.profiler.output import lists_modules, write
        from megatron.profiler.text import report

        asked, found = self._asked, profiler.profile(step, self._step_before)
        path = asked.flops_profiler_output_file
        shown = asked.flops_profiler_module_depth, asked.flops_profiler_top_modules, asked.flops_profiler_detailed
        print(report(found, *shown[:2], detailed=shown[2] and path is None), flush=True)
        if path is not None:
            try:
                write(found, path, *shown)
                whole = ", every module" if lists_modules(path, asked.flops_profiler_detailed) else ""
                print(f" profile of step {step}{whole}: {path}", flush=True)
            except StorageError as error:  # not worth ending a job of many ranks
                print(f"warning: {error}; training goes on without it", file=sys.stderr, flush=True)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        yield
        self._step_before = (self._step_before or 0.0) + self._now() - start

    def _now(self) -> float:
        device = self._core.state.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _as_written() -> AbstractContextManager[object]:
    from megatron.profiler.recording import as_written
    return as_written()


def _check_place(path: str) -> None:
    from megatron.profiler.output import check_place
    check_place(path, FLAG)
