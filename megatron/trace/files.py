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
from megatron.trace.memory import levels, peak
from megatron.trace.page import page
from megatron.trace.recorder import Recorder
from megatron.trace.shares import shares, told
from megatron.trace.tracks import tracks
from megatron.whereabouts import OPTIMIZER_STEP, PHASE

ENDINGS = ".json.gz", ".html", ".memory.pickle"


@dataclass(frozen=True)
class Taken:
    """A trace that has ended. Times are those of recorder.microseconds."""

    profiler: profile
    recorder: Recorder
    first: int
    """Step."""
    start: float
    stop: float
    is_early: bool
    """It ended before its last step: more of it could not be looked at."""

    @property
    def steps(self) -> range:
        """Those that were taken, all of them but perhaps the last one to their end."""
        ended = [one for one in self.recorder.lines[PHASE].stretches(self.stop) if one.name == OPTIMIZER_STEP]
        return range(self.first, self.first + max(1, len(ended)))


def write(taken: Taken, folder: Path, rank: int, device: torch.device) -> str:
    """All files or none of them, and the line."""
    with _claimed(folder, f"steps-{taken.steps[0]}-{taken.steps[-1]}.rank-{rank}") as place:
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{place}.memory.pickle")
        return _write(taken, rank, place, on_host=device.type == "cpu")


def _write(taken: Taken, rank: int, place: Path, *, on_host: bool) -> str:
    trace = _exported(taken.profiler, place.parent)
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    recorded, steps = taken.recorder, taken.steps
    within, events = (taken.start - base, taken.stop - base), trace["traceEvents"]
    recorded.count_from(base)
    found = shares(events, recorded, get_native_id(), within, on_host=on_host)
    at_times = levels(events)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    title = f"{which.capitalize()}, rank {rank}"
    Path(f"{place}.html").write_text(
        page(title, found, len(steps), at_times, peak(at_times, recorded), recorded, within), encoding="utf-8")
    trace["traceEvents"] += tracks(recorded, at_times, within, steps)
    with staged_file(f"{place}.json.gz") as file:  # in the place of the claim
        file.write(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=3))
    milliseconds = (within[1] - within[0]) / 1e3 / len(steps)
    early = " (the trace ends early: more could not be looked at)" if taken.is_early else ""
    return (f" {which}: {milliseconds:.1f} ms{' each' * (len(steps) > 1)} with the profiler at work: {told(found)} | "
            f"{place}.json.gz (for ui.perfetto.dev), {place.name}.html{early}")


def _exported(profiler: profile, beside: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=beside) as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        found: dict[str, Any] = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8", errors="replace"))
    return found


@contextmanager
def _claimed(folder: Path, name: str) -> Iterator[Path]:
    """A name that nobody has, and nobody else gets: a trace from before is kept, and so is that of another run."""
    number, found = 1, folder / name
    while not _claims(Path(f"{found}.json.gz")):
        number += 1
        found = folder / f"{name}.{number}"
    try:
        yield found
    except BaseException:
        for ending in ENDINGS:
            Path(f"{found}{ending}").unlink(missing_ok=True)
        raise


def _claims(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
