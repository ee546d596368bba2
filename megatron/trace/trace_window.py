"""Runs torch.profiler around the traced steps of one rank, with the engine's status as ranges, writes its trace, and
prints where the time went: products, attention, loss, optimizer, exposed communication, data, other.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import get_native_id
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.config.run_config import ProfileConfig
from megatron.distributed.collective_log import CollectiveLog
from megatron.distributed.rank_status import (ACTIVITY, COLLECTIVE, OPTIMIZER_STEP, PHASE, READING, STATUS, STEP,
                                              TRAINING, UNIT, ObservedCounters)
from megatron.errors import Interrupted, NumericsError
from mpu import collective_tracker

MEMORY_HISTORY_ENTRIES = 200_000  # allocations in the snapshot of an accelerator's memory
# Places of the rank status, the outer ones first.
RANGES = {STEP: "step", ACTIVITY: "activity", PHASE: "phase", UNIT: "block", COLLECTIVE: "exchange"}


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
        with STATUS.in_activity("writing of a trace"):
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


# ---- where the time went -----------------------------------------------------------------------------------------

# On a CPU each moment belongs to what the training thread does. On a GPU it belongs to the running kernel;
# communication counts only where no other kernel runs. A backward operation has the kind of the operation that it
# differentiates.

PRODUCTS, ATTENTION, LOSS, OPTIMIZER, EXCHANGE = "products", "attention", "loss", "optimizer", "exchange not hidden"
COPIES, OTHER = "copies", ""
CPU_KINDS = PRODUCTS, ATTENTION, LOSS, OPTIMIZER, EXCHANGE, "data", "evaluation and saves", "other"

# Patterns of operation names. Those of mpu/cross_entropy.py come first, because they contain the output layer.
KINDS = {
    LOSS: re.compile(r"^(_LinearCrossEntropyMean|_LinearCrossEntropyPerToken|_VocabParallelCrossEntropy)(Backward)?$"
                     r"|cross_entropy|nll_loss|log_softmax", re.IGNORECASE),
    ATTENTION: re.compile("scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    PRODUCTS: re.compile(r"^aten::(mm|bmm|addmm|addbmm|baddbmm|linear|_scaled_mm|mkldnn_linear|addmv|mv)(_|$|\b)"
                         r"|^mkl(dnn)?::")}
KERNELS = {
    ATTENTION: re.compile(r"flash|fmha|sdpa", re.IGNORECASE),
    PRODUCTS: re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE)}
TraceEvent = Mapping[str, Any]


class Interval(NamedTuple):
    start: float
    stop: float
    name: str = ""


def time_by_kind(kinds: Mapping[str, Iterable[Interval]], within: tuple[float, float]) -> dict[str, float]:
    """The time of each kind; a moment counts for the first kind that has it, or for ""."""
    times, intervals, before = dict[str, float](), list[Interval](), 0.0
    for kind, added in kinds.items():
        intervals += added
        total, end = 0.0, within[0]
        for start, stop, _ in sorted(intervals):  # their union
            total += max(0.0, min(stop, within[1]) - max(start, end))
            end = max(end, stop)
        times[kind], before = total - before, total
    return times | {"": within[1] - within[0] - before}


def operations_with_kinds(events: Iterable[TraceEvent], thread: int | None = None) -> Iterator[tuple[TraceEvent, str]]:
    """The host's operations of a thread, or of all, with the kind of the outermost enclosing one that has a kind."""
    operations = [event for event in events if event.get("cat") == "cpu_op" and thread in (None, event["tid"])]
    kind_of_forward: dict[int, str] = {}  # by autograd sequence number; the last operation with one made its node
    outermost: dict[int, tuple[str, float]] = {}  # thread -> kind of the enclosing operation, and its end
    for event in sorted(operations, key=lambda event: (event["ts"], -event["dur"])):  # enclosing ones come first
        args = event.get("args", {})
        number, is_backward = args.get("Sequence number", 0), bool(args.get("Fwd thread id"))
        kind, until = outermost.get(event["tid"], (OTHER, 0.0))
        if event["ts"] >= until:
            inherited = kind_of_forward.get(number, OTHER) if is_backward else OTHER
            kind = next((kind for kind, pattern in KINDS.items() if pattern.search(event["name"])), inherited)
            # without a kind, operations inside may have one
            outermost[event["tid"]] = kind, 0.0 if kind == OTHER else event["ts"] + event["dur"]
        if number > 0 and not is_backward:
            kind_of_forward[number] = kind
        yield event, kind


def device_work(events: Sequence[TraceEvent], steps: Sequence[Interval]) -> dict[str, list[Interval]]:
    """The accelerator's work by kind. `steps`: the optimizer steps on the host, where their kernels are launched."""
    work: dict[str, list[Interval]] = {
        kind: [] for kind in (LOSS, ATTENTION, PRODUCTS, OPTIMIZER, "other", COPIES, EXCHANGE)}
    kinds = {event["args"]["External id"]: kind for event, kind in operations_with_kinds(events)
             if "External id" in event.get("args", {})}
    launches = {event["args"]["correlation"]: float(event["ts"]) for event in events
                if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        args, name = event.get("args", {}), event["name"]
        kind = kinds.get(args.get("External id"), OTHER)
        launched_at = launches.get(args.get("correlation", -1), float(event["ts"]))
        if "nccl" in name.lower():
            kind = EXCHANGE
        elif kind == OTHER and event["cat"] == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            kind = COPIES
        elif any(step.start <= launched_at < step.stop for step in steps):
            kind = OPTIMIZER
        elif kind == OTHER and event["cat"] == "kernel":  # replayed from a graph, or launched by Python
            kind = next((of_name for of_name, pattern in KERNELS.items() if pattern.search(name)), OTHER)
        work[kind or "other"].append(Interval(event["ts"], event["ts"] + event["dur"]))
    return work


def time_breakdown(events: Sequence[TraceEvent], thread: int, within: tuple[float, float], *,
                   on_host: bool) -> dict[str, float]:
    """Microseconds of each kind; empty if the profiler has recorded nothing on the device. `thread` trains."""
    ranges: defaultdict[str, list[Interval]] = defaultdict(list)  # of the engine (trace_window.py)
    for event in events:
        if event.get("cat") == "user_annotation":
            place, _, name = event["name"].partition(": ")
            ranges[place].append(Interval(event["ts"], event["ts"] + event["dur"], name))
    interrupted = {"data": [one for one in ranges["activity"] if one.name == READING],
                   "evaluation and saves": [one for one in ranges["activity"] if one.name not in (READING, TRAINING)]}
    steps = [one for one in ranges["phase"] if one.name == OPTIMIZER_STEP]
    if on_host:
        work = {EXCHANGE: ranges["exchange"], OPTIMIZER: steps, **{kind: [] for kind in KINDS}}
        for event, kind in operations_with_kinds(events, thread):
            if kind != OTHER:
                work[kind].append(Interval(event["ts"], event["ts"] + event["dur"]))
        times = time_by_kind(interrupted | work, within)
        times["other"] = times.pop("")
        return {kind: times[kind] for kind in CPU_KINDS}
    work = device_work(events, steps)
    times = time_by_kind(work | interrupted, within)
    times["idle"] = times.pop("")
    return {kind: times[kind] for kind in (*CPU_KINDS, COPIES, "idle")} if any(work.values()) else {}


def format_breakdown(times: dict[str, float]) -> str:
    """In percent of the total."""
    total = sum(times.values())
    if not times:
        return "the profiler has seen nothing of the device, which another one (nsys, ncu) may hold"
    return ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in times.items()
                     if part > 0 or kind in CPU_KINDS and kind != "evaluation and saves")
