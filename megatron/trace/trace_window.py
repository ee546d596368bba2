"""Starts and stops torch.profiler around the traced steps of one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from warnings import catch_warnings, simplefilter

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.config.run_config import ProfileConfig
from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_status import STATUS
from megatron.errors import Interrupted, NumericsError
from megatron.trace.export import FinishedTrace, write_trace
from megatron.trace.recorder import TraceRecorder, microseconds

WRITING = "writing of a trace"
"""An activity (rank_status.py)."""
MAX_CHANGES = 20_000
"""Limit of TraceRecorder.num_changes, where a trace ends with its step: about 100 MB and half a minute of writing, and
the most that viewers can show."""
MEMORY_HISTORY_ENTRIES = 200_000
"""Allocations in the snapshot of an accelerator's memory."""


@contextmanager
def trace_steps(config: ProfileConfig, device: torch.device, log: CollectiveLog, done: int,
                train_iters: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of completed steps after each step; `done` are completed already."""
    window = TraceWindow(config, device, log, train_iters)
    window.start_after(done)
    try:
        yield window.after_step
    except (NumericsError, Interrupted):  # all ranks and the device still answer
        window.close()
        raise
    except BaseException:
        window.abandon()
        raise
    window.close()


@dataclass
class ActiveTrace:
    profiler: profile
    recorder: TraceRecorder
    attachment: ExitStack
    cleanup: ExitStack
    """Undoes everything else; closed once the trace is written."""
    first: int
    """The first step."""
    start: float


class TraceWindow:
    def __init__(self, config: ProfileConfig, device: torch.device, log: CollectiveLog, train_iters: int) -> None:
        assert config.traced_steps is not None
        self._traced_steps, self._rank = config.traced_steps, config.profile_rank
        self._folder = Path(config.profile_dir or "profile")
        self._steps = range(self._traced_steps[0], min(self._traced_steps[-1], train_iters) + 1)
        self._device, self._log = device, log
        self._active: ActiveTrace | None = None

    def start_after(self, done: int) -> None:
        if done >= self._traced_steps[-1]:
            _print_line(f" note: nothing is traced: --profile-steps {self._traced_steps[0]}:{self._traced_steps[-1]} "
                        f"is over, the run goes on at step {done + 1}")
        self.after_step(done)

    def after_step(self, done: int) -> None:
        if self._active is None and done + 1 in self._steps:
            self._start(done + 1)
        elif self._active is not None and (done + 1 not in self._steps
                                           or self._active.recorder.num_changes > MAX_CHANGES):
            self._steps = range(0)
            self.close()

    def _start(self, step: int) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            self._steps = range(0)
            _print_line(" note: nothing is traced: another profiler of torch is at work, and there can be one")
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._steps = range(0)
            self._warn(error)
            return
        on_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # about cycles: there is one, and accumulating events takes minutes
            profiler = profile(activities=activities, profile_memory=True)
        with ExitStack() as after:
            recorder = TraceRecorder()
            if on_cuda:
                after.callback(torch.cuda.memory._record_memory_history, None)
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_HISTORY_ENTRIES, stacks="python")
                torch.cuda.synchronize(self._device)  # kernels launched before belong to earlier steps

            def stop_profiler() -> None:
                if torch.autograd.profiler._is_profiler_enabled:  # after an error, which is the one to report
                    with suppress(Exception):
                        profiler.stop()

            after.callback(stop_profiler)
            with catch_warnings():
                simplefilter("ignore", UserWarning)
                profiler.start()
            listening = after.enter_context(ExitStack())
            listening.enter_context(recorder.attached(self._log))
            self._active = ActiveTrace(profiler, recorder, listening, after.pop_all(), step, microseconds())

    def close(self) -> None:
        """End the trace, if there is one: write it, and print its line."""
        active, self._active = self._active, None
        if active is None:
            return
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            stop = microseconds()
            active.attachment.close()
            active.profiler.stop()
            with STATUS.in_activity(WRITING):
                finished = FinishedTrace(active.profiler, active.recorder, active.first, active.start, stop,
                                         ended_early=active.recorder.num_changes > MAX_CHANGES)
                _print_line(write_trace(finished, self._folder, self._rank, self._device))
        except Exception as error:  # not worth ending a job of many ranks
            self._warn(error)
        finally:
            active.cleanup.close()

    def _warn(self, error: Exception) -> None:
        print(f"warning: the trace cannot be written to {self._folder} ({type(error).__name__}: {error}); training "
              "goes on without it", file=sys.stderr, flush=True)

    def abandon(self) -> None:
        """After an error: discard the trace without waiting for the device or other ranks, which may not answer."""
        if self._active is not None:
            with suppress(Exception):  # the first error is the one to report
                self._active.cleanup.close()


def _print_line(line: str) -> None:
    print(line, flush=True)
