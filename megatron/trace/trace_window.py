"""Runs torch.profiler around the traced steps of one rank, with the engine's status as ranges, and writes its trace."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import get_native_id
from warnings import catch_warnings, simplefilter

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.config.run_config import ProfileConfig
from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_status import ACTIVITY, COLLECTIVE, PHASE, STATUS, STEP, UNIT, ObservedCounters
from megatron.errors import Interrupted, NumericsError
from megatron.trace.time_breakdown import format_breakdown, time_breakdown
from mpu import collective_tracker

WRITING = "writing of a trace"  # an activity (rank_status.py)
MEMORY_HISTORY_ENTRIES = 200_000  # allocations in the snapshot of an accelerator's memory
RANGES = {STEP: "step", ACTIVITY: "activity", PHASE: "phase", UNIT: "block", COLLECTIVE: "exchange"}
"""Places of the rank status, the outer ones first."""


class StatusRanges:
    """Shows the rank status (rank_status.py) in torch's trace, as nested ranges such as "phase: forward"."""

    def __init__(self) -> None:
        self.names = dict.fromkeys(RANGES, "")
        self._open: list[tuple[int, record_function]] = []

    @contextmanager
    def attached(self, log: CollectiveLog) -> Iterator[None]:
        def on_status(place: int, number: int) -> None:
            if place in RANGES:
                self._change(place, str(number) if place == STEP else STATUS.text_of(number))

        def on_collective(place: int, state: int) -> None:
            if place == 0:  # the other number counts collectives
                self._change(COLLECTIVE, (log.awaited_collective or "collective") if state else "")

        counters = collective_tracker.current_counters()
        with STATUS.observed_by(on_status):
            collective_tracker.write_counters_to(ObservedCounters(counters, on_collective))
            try:
                yield
            finally:
                collective_tracker.write_counters_to(counters)
                self._close(STEP)

    def _change(self, place: int, name: str) -> None:
        if name == self.names[place]:
            return
        self.names[place] = name
        if place == PHASE:
            self.names[UNIT] = ""  # it is set next
        self._close(place)
        for inner in RANGES:
            if inner >= place and self.names[inner]:
                opened = record_function(f"{RANGES[inner]}: {self.names[inner]}")
                opened.__enter__()
                self._open.append((inner, opened))

    def _close(self, place: int) -> None:
        """Close the range of a place and those inside it."""
        while self._open and self._open[-1][0] >= place:
            self._open.pop()[1].__exit__(None, None, None)


class TraceWindow:
    """Traces `config.traced_steps` inside of its context, whose value is a function to call with the number of
    completed steps after each step. `done` are completed already."""

    def __init__(self, config: ProfileConfig, device: torch.device, log: CollectiveLog, done: int,
                 train_iters: int) -> None:
        steps = config.traced_steps
        assert steps is not None
        self._folder, self._rank = Path(config.profile_dir or "profile"), config.profile_rank
        self._steps = range(steps[0], min(steps[-1], train_iters) + 1)
        self._device, self._log, self._done = device, log, done
        self._profiler: profile | None = None
        if done >= steps[-1]:
            print(f" note: nothing is traced: --profile-steps {steps[0]}:{steps[-1]} is over, the run goes on at step "
                  f"{done + 1}", flush=True)

    def __enter__(self) -> Callable[[int], None]:
        self.after_step(self._done)
        return self.after_step

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # after another error the device and other ranks may not answer: do not wait for them
        self._close(writes=error is None or isinstance(error, (NumericsError, Interrupted)))

    def after_step(self, done: int) -> None:
        if self._profiler is None and done + 1 in self._steps:
            try:
                self._start(done + 1)
            except Exception as error:
                self._fail(error)
        elif self._profiler is not None and done + 1 not in self._steps:
            self._close()

    def _start(self, step: int) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("another profiler of torch is at work, and there can be one")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ranges = StatusRanges()
        activities = [ProfilerActivity.CPU]
        with ExitStack() as cleanup, catch_warnings():
            simplefilter("ignore", UserWarning)  # about cycles: there is one, and accumulating events takes minutes
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                cleanup.callback(torch.cuda.memory._record_memory_history, None)
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_HISTORY_ENTRIES, stacks="python")
                torch.cuda.synchronize(self._device)  # kernels launched before belong to earlier steps
            profiler = cleanup.enter_context(profile(activities=activities, profile_memory=True))
            cleanup.enter_context(self._ranges.attached(self._log))
            self._cleanup, self._first_step, self._start_ns = cleanup.pop_all(), step, time.time_ns()
        self._profiler = profiler

    def _close(self, *, writes: bool = True) -> None:
        """End the trace, if there is one: write it, and print its line."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            if writes:
                with tempfile.TemporaryDirectory(prefix=".trace-", dir=self._folder) as folder:
                    print(self._write(profiler, folder), flush=True)
        except Exception as error:  # not worth ending a job of many ranks
            self._fail(error)
        finally:
            with suppress(Exception):  # the first error is the one to report
                self._cleanup.close()

    def _write(self, profiler: profile, folder: str) -> str:
        """Write the files, in `folder` first; returns the console line."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        stop_ns = time.time_ns()
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{folder}/trace.memory.pickle")
        self._cleanup.close()
        with STATUS.in_activity(WRITING):
            profiler.export_chrome_trace(f"{folder}/trace.json.gz")
            with gzip.open(f"{folder}/trace.json.gz", "rt", encoding="utf-8", errors="replace") as file:
                trace = json.load(file)
            start, stop = ((moment - trace.get("baseTimeNanoseconds", 0)) / 1e3 for moment in (self._start_ns, stop_ns))
            times = time_breakdown(trace["traceEvents"], get_native_id(), (start, stop),
                                   on_host=self._device.type == "cpu")
            first, last = self._first_step, max(self._first_step, int(self._ranges.names[STEP]))
            for number in count(1):  # a name of no earlier trace and of no other run
                place = self._folder / f"steps-{first}-{last}.rank-{self._rank}{f'.{number}' * (number > 1)}"
                with suppress(FileExistsError):
                    Path(f"{place}.json.gz").touch(exist_ok=False)
                    break
            for written in Path(folder).iterdir():
                os.replace(written, f"{place}{written.name.removeprefix('trace')}")
        which, each = (f"step {first}", "") if first == last else (f"steps {first} to {last}", " each")
        return (f" {which}: {(stop - start) / 1e3 / (last - first + 1):.1f} ms{each} with the profiler at work: "
                f"{format_breakdown(times)} | {place}.json.gz (for ui.perfetto.dev)")

    def _fail(self, error: Exception) -> None:
        self._steps = range(0)
        print(f"warning: the trace cannot be written to {self._folder} ({type(error).__name__}: {error}); training "
              "goes on without it", file=sys.stderr, flush=True)
