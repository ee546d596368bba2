"""Writes a trace: events with the engine's tracks for ui.perfetto.dev, an HTML page, on a GPU a memory snapshot."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from threading import get_native_id
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

from data.storage import staged_file
from megatron.distributed.collective_log import SAVE
from megatron.distributed.rank_status import (ACTIVITY, BACKWARD, EVALUATION, FORWARD, OPTIMIZER_STEP, PHASE, READING,
                                              STEP, UNIT)
from megatron.report.page import html_document, html_table
from megatron.trace.recorder import TimeRange, TraceRecorder
from megatron.trace.time_breakdown import TraceEvent, format_breakdown, time_breakdown

CPU, CUDA = 0, 1
"""Torch's device type numbers."""


class MemoryLevel(NamedTuple):
    time: float
    total: int
    """Bytes."""
    is_relative: bool = False
    """Relative to the start of the trace."""


def memory_levels(events: Iterable[TraceEvent]) -> list[MemoryLevel]:
    """In order of time; of the accelerator if there is one, else of the host."""
    by_type: dict[int, list[MemoryLevel]] = {}
    for event in events:
        if event.get("name") == "[memory]":
            args = event["args"]
            by_type.setdefault(args["Device Type"], []).append(MemoryLevel(
                event["ts"], args["Total Allocated"], args["Device Type"] == CPU))
    return sorted(by_type.get(CUDA) or by_type.get(CPU) or [])


def peak_level(levels: Sequence[MemoryLevel], recorder: TraceRecorder) -> tuple[MemoryLevel, str] | None:
    """The highest level, and the engine's phase and block then."""
    if not levels:
        return None
    peak = max(levels, key=_total)
    where = [one.name for place in (PHASE, UNIT) for one in recorder.timelines[place].intervals(levels[-1].time)
             if one.start <= peak.time < one.stop]
    return peak, ", ".join(where)


def downsample_levels(levels: Sequence[MemoryLevel], count: int) -> list[MemoryLevel]:
    """The lowest and highest level in each of `count` equal parts of the time."""
    if len(levels) <= 2 * count:
        return list(levels)
    start, width = levels[0].time, (levels[-1].time - levels[0].time) / count or 1.0
    parts: dict[int, list[MemoryLevel]] = {}
    for level in levels:
        parts.setdefault(int((level.time - start) / width), []).append(level)
    return sorted({extreme for part in parts.values() for extreme in (min(part, key=_total), max(part, key=_total))})


def _total(level: MemoryLevel) -> int:
    return level.total


TRACKS = "step", "activity", "phase", "block", "exchange"
PROCESS = 1 << 30
"""Not a real process id."""


def engine_tracks(recorder: TraceRecorder, levels: Sequence[MemoryLevel], within: TimeRange,
                  steps: range) -> Iterator[dict[str, Any]]:
    end = within[1]
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "the engine"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PROCESS, "args": {"sort_index": -1}}
    step_names = {f"step {step}" for step in steps}  # without the moments before the first step and after the last
    of_track = [[one for one in recorder.timelines[STEP].intervals(end) if one.name in step_names],
                *(recorder.timelines[place].intervals(end) for place in (ACTIVITY, PHASE, UNIT)),
                recorder.exchange_intervals(end)]
    for number, (track, intervals) in enumerate(zip(TRACKS, of_track, strict=True)):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": number, "args": {"name": track}}
        yield from ({"ph": "X", "cat": track, "name": name, "pid": PROCESS, "tid": number, "ts": start,
                     "dur": stop - start} for start, stop, name in intervals)
    for key, collective in recorder.collectives.items():
        if collective.awaited is not None:
            event = {"cat": "exchange", "name": collective.what, "id": "{} {}".format(*key), "pid": PROCESS}
            yield {**event, "ph": "b", "ts": collective.start}
            yield {**event, "ph": "e", "ts": end if collective.stop is None else collective.stop}
    for level in levels:
        yield {"ph": "C", "name": "memory", "pid": PROCESS, "ts": level.time, "args": {"MiB": level.total / 2**20}}


WIDTH, HEIGHT, BAND, LEFT, BELOW = 1100, 260, 16, 70, 40
POINTS = 800
PHASE_COLOURS = {FORWARD: 0, BACKWARD: 1, OPTIMIZER_STEP: 2, READING: 3, EVALUATION: 4, SAVE: 5}
"""Colour numbers of page.css."""
MIB = float(2**20)


def trace_page(title: str, times: Mapping[str, float], steps: int, levels: Sequence[MemoryLevel],
               peak: tuple[MemoryLevel, str] | None, recorder: TraceRecorder, within: TimeRange) -> str:
    """`times`: microseconds by kind."""
    total = sum(times.values()) or 1.0
    rows = [(kind, f"{part / 1e3 / steps:.2f} ms", f"{100 * part / total:.1f} %") for kind, part in times.items()]
    rows += [("all", f"{total / 1e3 / steps:.2f} ms", "100 %")] if times else []
    parts = ["<section><h2>Where the time of a step went</h2>\n",
             html_table(("", "a step", "share"), rows), "</section>\n"]
    if levels and peak is not None:
        level, where = peak
        at = f" at {(level.time - within[0]) / 1e3:.1f} ms" + (f", in {where}" if where else "")
        since = " since the trace began" * level.is_relative
        parts += [f"<section><h2>Memory</h2>\n<p>The most{since} is {level.total / MIB:,.1f} MiB{escape(at)}.</p>\n",
                  _memory_picture(levels, recorder, within), "</section>\n"]
    return html_document(title, "".join(parts))


def _memory_picture(levels: Sequence[MemoryLevel], recorder: TraceRecorder, within: TimeRange) -> str:
    top = max(0, *(level.total for level in levels)) or 1
    low = min(0, *(level.total for level in levels))

    def across(moment: float) -> float:
        return LEFT + (moment - within[0]) / (within[1] - within[0]) * (WIDTH - LEFT)

    def up(total: float) -> float:
        return HEIGHT - (total - low) / (top - low) * (HEIGHT - 10)

    before = [level.total for level in levels if level.time < within[0]]
    height = up(before[-1] if before else 0 if levels[0].is_relative else levels[0].total)
    points = [f"{LEFT},{height:.1f}"]
    for level in downsample_levels([one for one in levels if within[0] <= one.time <= within[1]], POINTS):
        points.append(f"{across(level.time):.1f},{height:.1f}")  # steps: constant until the next level
        height = up(level.total)
        points.append(f"{across(level.time):.1f},{height:.1f}")
    area = f"{LEFT},{up(low):.1f} {' '.join(points)} {WIDTH},{height:.1f} {WIDTH},{up(low):.1f}"
    bands = [(across(start), across(stop), colour, name) for place in (PHASE, ACTIVITY)
             for start, stop, name in recorder.timelines[place].intervals(within[1])
             if (colour := PHASE_COLOURS.get(name)) is not None]
    return "".join([
        f'<figure class="wide"><svg viewBox="0 0 {WIDTH} {HEIGHT + BAND + BELOW}" role="img" '
        'aria-label="memory over time">',
        *(f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
          f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value / MIB:,.0f} MiB</text>'
          for value in (low, (low + top) / 2, top)),
        f'<g style="color: var(--run-0)"><polygon class="band" points="{area}"/></g>',
        *(f'<rect x="{left:.1f}" y="{HEIGHT + 2}" width="{max(0.2, right - left):.1f}" height="{BAND}" '
          f'style="fill: var(--run-{colour})"><title>{escape(name)}</title></rect>'
          for left, right, colour, name in bands),
        *(f'<text x="{across(moment):.1f}" y="{HEIGHT + BAND + 18}" text-anchor="{anchor}">'
          f'{(moment - within[0]) / 1e3:,.0f} ms</text>'
          for moment, anchor in ((within[0], "start"), (within[1], "end"))),
        *(f'<text x="{LEFT + 150 * (number + 1)}" y="{HEIGHT + BAND + 34}" '
          f'style="fill: var(--run-{colour})">{name}</text>'
          for number, (name, colour) in enumerate(PHASE_COLOURS.items())),
        "</svg></figure>\n"])


ENDINGS = ".json.gz", ".html", ".memory.pickle"


@dataclass(frozen=True)
class FinishedTrace:
    """A trace that has ended. Times are those of recorder.microseconds."""

    profiler: profile
    recorder: TraceRecorder
    first: int
    """The first step."""
    start: float
    stop: float
    ended_early: bool
    """It reached MAX_CHANGES before its last step."""

    @property
    def steps(self) -> range:
        """The traced steps; the last one may be incomplete."""
        ended = [one for one in self.recorder.timelines[PHASE].intervals(self.stop) if one.name == OPTIMIZER_STEP]
        return range(self.first, self.first + max(1, len(ended)))


def write_trace(trace: FinishedTrace, folder: Path, rank: int, device: torch.device) -> str:
    """Write all files, or none after an error; returns the console line."""
    with _claim_name(folder, f"steps-{trace.steps[0]}-{trace.steps[-1]}.rank-{rank}") as place:
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{place}.memory.pickle")
        return _write_files(trace, rank, place, on_host=device.type == "cpu")


def _write_files(finished: FinishedTrace, rank: int, place: Path, *, on_host: bool) -> str:
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=place.parent) as folder:
        finished.profiler.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8", errors="replace"))
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    recorder, steps = finished.recorder, finished.steps
    within, events = (finished.start - base, finished.stop - base), trace["traceEvents"]
    recorder.rebase(base)
    times = time_breakdown(events, recorder, get_native_id(), within, on_host=on_host)
    levels = memory_levels(events)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    title = f"{which.capitalize()}, rank {rank}"
    Path(f"{place}.html").write_text(trace_page(title, times, len(steps), levels, peak_level(levels, recorder),
                                                recorder, within), encoding="utf-8")
    trace["traceEvents"] += engine_tracks(recorder, levels, within, steps)
    with staged_file(f"{place}.json.gz") as file:  # replaces the empty file of _claim_name
        file.write(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=3))
    milliseconds = (within[1] - within[0]) / 1e3 / len(steps)
    early = " (the trace ends early: more could not be looked at)" if finished.ended_early else ""
    return (f" {which}: {milliseconds:.1f} ms{' each' * (len(steps) > 1)} with the profiler at work: "
            f"{format_breakdown(times)} | {place}.json.gz (for ui.perfetto.dev), {place.name}.html{early}")


@contextmanager
def _claim_name(folder: Path, name: str) -> Iterator[Path]:
    """A path without its extension, whose .json.gz this creates: it belongs to no earlier trace and to no other run."""
    for number in count(1):
        place = folder / (name if number == 1 else f"{name}.{number}")
        with suppress(FileExistsError):
            Path(f"{place}.json.gz").touch(exist_ok=False)
            break
    try:
        yield place
    except BaseException:
        for ending in ENDINGS:
            Path(f"{place}{ending}").unlink(missing_ok=True)
        raise
