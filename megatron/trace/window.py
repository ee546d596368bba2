"""Which steps are traced, on which rank. The other ranks go on, and wait where they need this one. Not here: what is
written (files.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from warnings import catch_warnings, simplefilter

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.config.profile import ProfileConfig
from megatron.errors import Interrupted, NumericsError
from megatron.trace.files import Taken, write
from megatron.trace.recorder import Recorder, microseconds
from megatron.whereabouts import STATUS
from megatron.zero.exchanges import CollectiveLog

WRITING = "writing of a trace"
"""An activity (whereabouts.py)."""
MOST = 20_000
"""Of Recorder.size: a trace ends there, with its step. Some 100 MB and half a minute of writing; more cannot be looked
at."""
HISTORY = 200_000
"""Allocations that the snapshot of an accelerator's memory remembers."""


@contextmanager
def tracing(asked: ProfileConfig, device: torch.device, log: CollectiveLog, done: int,
            train_iters: int) -> Iterator[Callable[[int], None]]:
    """Inside, this is called after each step with the number of those that are done; `done` are those before."""
    window = Window(asked, device, log, train_iters)
    window.begin_after(done)
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
    """All that is to be switched off, once it is written."""
    first: int
    """Step."""
    start: float


class Window:
    def __init__(self, asked: ProfileConfig, device: torch.device, log: CollectiveLog, train_iters: int) -> None:
        assert asked.traced_steps is not None
        self._asked, self._rank = asked.traced_steps, asked.profile_rank
        self._folder = Path(asked.profile_dir or "profile")
        self._steps = range(self._asked[0], min(self._asked[-1], train_iters) + 1)
        self._device, self._log = device, log
        self._under: Under | None = None

    def begin_after(self, done: int) -> None:
        if done >= self._asked[-1]:
            _say(f" note: nothing is traced: --profile-steps {self._asked[0]}:{self._asked[-1]} is over, the run goes "
                 f"on at step {done + 1}")
        self.at(done)

    def at(self, done: int) -> None:
        if self._under is None and done + 1 in self._steps:
            self._begin(done + 1)
        elif self._under is not None and (done + 1 not in self._steps or self._under.recorder.size > MOST):
            self._steps = range(0)
            self.close()

    def _begin(self, step: int) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            self._steps = range(0)
            _say(" note: nothing is traced: another profiler of torch is at work, and there can be one")
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
            simplefilter("ignore", UserWarning)  # of cycles, of which there is one; to add them up would take minutes
            profiler = profile(activities=activities, profile_memory=True)
        with ExitStack() as after:
            recorder = Recorder()
            if on_cuda:
                after.callback(torch.cuda.memory._record_memory_history, None)
                torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
                torch.cuda.synchronize(self._device)  # what was launched before belongs to steps before
            after.callback(_stop, profiler)
            with catch_warnings():
                simplefilter("ignore", UserWarning)
                profiler.start()
            listening = after.enter_context(ExitStack())
            listening.enter_context(recorder.listening(self._log))
            self._under = Under(profiler, recorder, listening, after.pop_all(), step, microseconds())

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
            with STATUS.in_activity(WRITING):
                taken = Taken(under.profiler, under.recorder, under.first, under.start, stop,
                              is_early=under.recorder.size > MOST)
                _say(write(taken, self._folder, self._rank, self._device))
        except Exception as error:  # not worth ending a job of many ranks
            self._warn(error)
        finally:
            under.after.close()

    def _warn(self, error: Exception) -> None:
        print(f"warning: the trace cannot be written to {self._folder} ({type(error).__name__}: {error}); training "
              "goes on without it", file=sys.stderr, flush=True)

    def abandon(self, *, is_orderly: bool) -> None:
        """The run ends by an error, which is the one to report. Where that is not `is_orderly`, the device or other
        ranks may never answer again, and nobody waits for them."""
        if is_orderly:
            self.close()
        elif self._under is not None:
            with suppress(Exception):
                self._under.after.close()


def _stop(profiler: profile) -> None:
    """Where that was not done: an error came before, which is the one to report."""
    if torch.autograd.profiler._is_profiler_enabled:
        with suppress(Exception):
            profiler.stop()


def _say(line: str) -> None:
    print(line, flush=True)
