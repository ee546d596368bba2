"""Which steps are traced, on which rank, into which files. The other ranks go on, and wait where they need this one."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from data.storage import staged_file
from megatron.config.profile import ProfileConfig
from megatron.errors import Interrupted, NumericsError
from megatron.trace.memory import levels, peak
from megatron.trace.page import page
from megatron.trace.recorder import Recorder, microseconds
from megatron.trace.shares import shares, told
from megatron.trace.tracks import tracks
from megatron.whereabouts import HERE, OPTIMIZER_STEP, PHASE
from megatron.zero.exchanges import ExchangeLog

WRITING = "writing of a trace"
"""An activity (whereabouts.py)."""
HISTORY = 200_000
"""Allocations that the snapshot of an accelerator's memory remembers."""


@contextmanager
def tracing(asked: ProfileConfig, device: torch.device, log: ExchangeLog,
            train_iters: int) -> Iterator[Callable[[int], None]]:
    """Inside, this is called with the number of steps that are done, first of all with that of earlier runs."""
    window = Window(asked, device, log, train_iters)
    try:
        yield window.at
    except BaseException as error:
        window.abandon(is_orderly=isinstance(error, (NumericsError, Interrupted)))
        raise
    window.close()


@dataclass
class Under:
    """A trace under way."""

    profiler: profile
    recorder: Recorder
    listening: ExitStack
    after: ExitStack
    """What is to be switched off, once it is written."""
    first: int
    """Step."""
    start: float

    def end(self) -> None:
        self.listening.close()
        self.after.close()


class Window:
    def __init__(self, asked: ProfileConfig, device: torch.device, log: ExchangeLog, train_iters: int) -> None:
        assert asked.traced_steps is not None
        self._asked, self._rank = asked.traced_steps, asked.profile_rank
        self._folder = Path(asked.profile_dir or "profile")
        self._steps = range(self._asked[0], min(self._asked[-1], train_iters) + 1)
        self._device, self._log = device, log
        self._under: Under | None = None
        self._done: int | None = None

    def at(self, done: int) -> None:
        if self._done is None and done >= self._asked[-1]:
            _say(f" note: nothing is traced: --profile-steps {self._asked[0]}:{self._asked[-1]} is over, the run goes "
                 f"on at step {done + 1}")
        self._done = done
        if self._under is None and done + 1 in self._steps:
            self._begin(done + 1)
        elif self._under is not None and done + 1 not in self._steps:
            self.close()

    def _begin(self, step: int) -> None:
        on_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
        profiler = profile(activities=activities, profile_memory=True, acc_events=True)
        recorder, listening, after = Recorder(), ExitStack(), ExitStack()
        if on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
            after.callback(torch.cuda.memory._record_memory_history, None)
            torch.cuda.synchronize(self._device)  # what was launched before belongs to steps before
        profiler.start()
        listening.enter_context(recorder.listening(self._log))
        self._under = Under(profiler, recorder, listening, after, step, microseconds())

    def close(self) -> None:
        """The end of the trace, if one is under way: it is written, and told."""
        under, self._under = self._under, None
        if under is None:
            return
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            stop = microseconds()
            under.listening.close()
            under.profiler.stop()
            with HERE.doing(WRITING):
                self._write(under, stop)
        except Exception as error:  # not worth ending a job of many ranks
            print(f"warning: the trace cannot be written to {self._folder} ({type(error).__name__}: {error}); training "
                  "goes on without it", file=sys.stderr, flush=True)
        finally:
            under.end()

    def abandon(self, *, is_orderly: bool) -> None:
        """The run ends by an error, which is the one to report. Where that is not `is_orderly`, the device or other
        ranks may never answer again, and nobody waits for them."""
        if is_orderly:
            self.close()
        elif self._under is not None:
            with suppress(Exception):
                self._under.end()
                self._under.profiler.stop()

    def _write(self, under: Under, stop: float) -> None:
        taken = [one for one in under.recorder.lines[PHASE].stretches(stop) if one.name == OPTIMIZER_STEP]
        steps = range(under.first, under.first + max(1, len(taken)))
        self._folder.mkdir(parents=True, exist_ok=True)
        place = _free(self._folder, f"steps-{steps[0]}-{steps[-1]}.rank-{self._rank}")
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(place.with_name(f"{place.name}.memory.pickle")))
        trace = _exported(under.profiler, self._folder)
        base = trace.get("baseTimeNanoseconds", 0) / 1e3
        recorded, within, events = under.recorder, (under.start - base, stop - base), trace["traceEvents"]
        recorded.count_from(base)
        found = shares(events, recorded, get_native_id(), within, on_host=self._device.type == "cpu")
        at_times = levels(events)
        trace["traceEvents"] += tracks(recorded, at_times, within)
        with staged_file(f"{place}.json.gz") as file:
            file.write(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=3))
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        title = f"{which.capitalize()}, rank {self._rank}"
        Path(f"{place}.html").write_text(
            page(title, found, len(steps), at_times, peak(at_times, recorded), recorded, within), encoding="utf-8")
        milliseconds = (within[1] - within[0]) / 1e3 / len(steps)
        _say(f" {which}: {milliseconds:.1f} ms{' each' * (len(steps) > 1)} with the profiler at work: {told(found)} | "
             f"{place}.json.gz (for ui.perfetto.dev), {place.name}.html")


def _exported(profiler: profile, beside: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=beside) as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        found: dict[str, Any] = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8", errors="replace"))
    return found


def _free(folder: Path, name: str) -> Path:
    """One that is not there yet: a trace from before is kept."""
    number, found = 1, name
    while (folder / f"{found}.json.gz").exists():
        number += 1
        found = f"{name}.{number}"
    return folder / found


def _say(line: str) -> None:
    print(line, flush=True)
