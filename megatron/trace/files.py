"""What is left of a trace: the events for ui.perfetto.dev, a page, on an accelerator a snapshot of its memory; and the
line that tells of it. Not here: which steps (window.py)."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from typing import Any

import torch
from torch.profiler import profile

from data.storage import staged_file
from megatron.trace.memory import memory_levels, peak_level
from megatron.trace.page import trace_page
from megatron.trace.recorder import TraceRecorder
from megatron.trace.shares import format_breakdown, time_breakdown
from megatron.trace.tracks import engine_tracks
from megatron.whereabouts import OPTIMIZER_STEP, PHASE

ENDINGS = ".json.gz", ".html", ".memory.pickle"


@dataclass(frozen=True)
class FinishedTrace:
    """A trace that has ended. Times are those of recorder.microseconds."""

    profiler: profile
    recorder: TraceRecorder
    first: int
    """Step."""
    start: float
    stop: float
    ended_early: bool
    """It ended before its last step: more of it could not be looked at."""

    @property
    def steps(self) -> range:
        """Those that were taken, all of them but perhaps the last one to their end."""
        ended = [one for one in self.recorder.timelines[PHASE].intervals(self.stop) if one.name == OPTIMIZER_STEP]
        return range(self.first, self.first + max(1, len(ended)))


def write_trace(trace: FinishedTrace, folder: Path, rank: int, device: torch.device) -> str:
    """All files or none of them, and the line."""
    with _claim_name(folder, f"steps-{trace.steps[0]}-{trace.steps[-1]}.rank-{rank}") as place:
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{place}.memory.pickle")
        return _write_files(trace, rank, place, on_host=device.type == "cpu")


def _write_files(finished: FinishedTrace, rank: int, place: Path, *, on_host: bool) -> str:
    trace = _export_events(finished.profiler, place.parent)
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    recorded, steps = finished.recorder, finished.steps
    within, events = (finished.start - base, finished.stop - base), trace["traceEvents"]
    recorded.rebase(base)
    found = time_breakdown(events, recorded, get_native_id(), within, on_host=on_host)
    at_times = memory_levels(events)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    title = f"{which.capitalize()}, rank {rank}"
    Path(f"{place}.html").write_text(trace_page(title, found, len(steps), at_times, peak_level(at_times, recorded),
                                                recorded, within),
                                     encoding="utf-8")
    trace["traceEvents"] += engine_tracks(recorded, at_times, within, steps)
    with staged_file(f"{place}.json.gz") as file:  # in the place of the claim
        file.write(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=3))
    milliseconds = (within[1] - within[0]) / 1e3 / len(steps)
    early = " (the trace ends early: more could not be looked at)" if finished.ended_early else ""
    return (
        f" {which}: {milliseconds:.1f} ms{' each' * (len(steps) > 1)} with the profiler at work: {format_breakdown(found)} | "
        f"{place}.json.gz (for ui.perfetto.dev), {place.name}.html{early}")


def _export_events(profiler: profile, beside: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=beside) as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        found: dict[str, Any] = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8", errors="replace"))
    return found


@contextmanager
def _claim_name(folder: Path, name: str) -> Iterator[Path]:
    """A name that nobody has, and nobody else gets: a trace from before is kept, and so is that of another run."""
    number, found = 1, folder / name
    while not _claim_file(Path(f"{found}.json.gz")):
        number += 1
        found = folder / f"{name}.{number}"
    try:
        yield found
    except BaseException:
        for ending in ENDINGS:
            Path(f"{found}{ending}").unlink(missing_ok=True)
        raise


def _claim_file(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
