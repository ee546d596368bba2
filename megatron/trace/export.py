"""Writes a trace: events with the engine's tracks for ui.perfetto.dev, an HTML page, on a GPU a memory snapshot."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from threading import get_native_id
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

from data.storage import staged_file
from megatron.distributed.collective_log import SAVE
from megatron.distributed.rank_status import (ACTIVITY, BACKWARD, EVALUATION, FORWARD, OPTIMIZER_STEP, PHASE, READING,
                                              STEP, UNIT)
from megatron.report.page import html_document, html_table, make_table
from megatron.trace.recorder import Interval, TimeSpan, TraceRecorder
from megatron.trace.time_breakdown import TraceEvent, format_breakdown, time_breakdown

CPU, CUDA = 0, 1
"""As torch numbers kinds of devices."""


class MemoryLevel(NamedTuple):
    time: float
    total: int
    """Bytes."""
    is_relative: bool = False
    """Since the trace began."""


def memory_levels(events: Iterable[TraceEvent]) -> list[MemoryLevel]:
    """In order. Of the accelerator where there is one, else of the host."""
    by_kind: dict[int, list[MemoryLevel]] = {}
    for event in events:
        if event.get("name") == "[memory]":
            given = event["args"]
            by_kind.setdefault(given["Device Type"], []).append(MemoryLevel(
                event["ts"], given["Total Allocated"], given["Device Type"] == CPU))
    return sorted(by_kind.get(CUDA) or by_kind.get(CPU) or [])


def peak_level(found: Sequence[MemoryLevel], recorder: TraceRecorder) -> tuple[MemoryLevel, str] | None:
    """The highest, and where the engine was."""
    if not found:
        return None
    highest = max(found, key=lambda level: level.total)
    where = [_interval_at(recorder.timelines[place].intervals(found[-1].time), highest.time) for place in (PHASE, UNIT)]
    return highest, ", ".join(word for word in where if word)


def _interval_at(intervals: Sequence[Interval], moment: float) -> str:
    return next((one.name for one in intervals if one.start <= moment < one.stop), "")


def downsample_levels(found: Sequence[MemoryLevel], count: int) -> list[MemoryLevel]:
    """Lowest and highest of each of so many pieces of the time."""
    if len(found) <= 2 * count:
        return list(found)
    start, width = found[0].time, (found[-1].time - found[0].time) / count or 1.0
    pieces: dict[int, list[MemoryLevel]] = {}
    for level in found:
        pieces.setdefault(int((level.time - start) / width), []).append(level)
    kept = {extreme for piece in pieces.values() for extreme in (min(piece, key=_total), max(piece, key=_total))}
    return sorted(kept)


def _total(level: MemoryLevel) -> int:
    return level.total


TRACKS = "step", "activity", "phase", "block", "exchange"
PROCESS = 1 << 30
"""A number that no program has."""


def engine_tracks(recorder: TraceRecorder, levels: Sequence[MemoryLevel], within: TimeSpan,
                  steps: range) -> Iterator[dict[str, Any]]:
    end = within[1]
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "the engine"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PROCESS, "args": {"sort_index": -1}}
    whole = {f"step {step}" for step in steps}  # not the moment before the first one, or after the last
    of_track = [[one for one in recorder.timelines[STEP].intervals(end) if one.name in whole],
                *(recorder.timelines[place].intervals(end) for place in (ACTIVITY, PHASE, UNIT)),
                recorder.exchange_intervals(end)]
    for number, (name, stretches) in enumerate(zip(TRACKS, of_track, strict=True)):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": number, "args": {"name": name}}
        yield from (_slice_event(one, number) for one in stretches)
    for key, journey in recorder.collectives.items():
        if journey.awaited is not None:
            stop = end if journey.stop is None else journey.stop
            its = {"cat": "exchange", "name": journey.what, "id": "{} {}".format(*key), "pid": PROCESS}
            yield {**its, "ph": "b", "ts": journey.start}
            yield {**its, "ph": "e", "ts": stop}
    for level in levels:
        yield {"ph": "C", "name": "memory", "pid": PROCESS, "ts": level.time, "args": {"MiB": level.total / 2**20}}


def _slice_event(interval: Interval, track: int) -> dict[str, Any]:
    return {"ph": "X", "cat": TRACKS[track], "name": interval.name, "pid": PROCESS, "tid": track, "ts": interval.start,
            "dur": interval.length}


WIDTH, HEIGHT, BAND, LEFT, BELOW = 1100, 260, 16, 70, 40
POINTS = 800
PHASE_COLOURS = {FORWARD: 0, BACKWARD: 1, OPTIMIZER_STEP: 2, READING: 3, EVALUATION: 4, SAVE: 5}
"""Of page.css."""
MIB = float(2**20)


def trace_page(title: str, found: Mapping[str, float], steps: int, levels: Sequence[MemoryLevel],
               peak: tuple[MemoryLevel, str] | None, recorder: TraceRecorder, within: TimeSpan) -> str:
    total = sum(found.values()) or 1.0
    rows = [(kind, f"{part / 1e3 / steps:.2f} ms", f"{100 * part / total:.1f} %") for kind, part in found.items()]
    rows += [("all", f"{total / 1e3 / steps:.2f} ms", "100 %")] if found else []
    parts = ["<section><h2>Where the time of a step went</h2>\n",
             html_table(make_table(("", "a step", "share"), rows)), "</section>\n"]
    if levels and peak is not None:
        level, where = peak
        at = f" at {(level.time - within[0]) / 1e3:.1f} ms" + (f", in {where}" if where else "")
        since = " since the trace began" * level.is_relative
        parts += [f"<section><h2>Memory</h2>\n<p>The most{since} is {level.total / MIB:,.1f} MiB{escape(at)}.</p>\n",
                  _memory_picture(levels, recorder, within), "</section>\n"]
    return html_document(title, "".join(parts))


def _memory_picture(levels: Sequence[MemoryLevel], recorder: TraceRecorder, within: TimeSpan) -> str:
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
        points.append(f"{across(level.time):.1f},{height:.1f}")  # as stairs: it stays until it changes
        height = up(level.total)
        points.append(f"{across(level.time):.1f},{height:.1f}")
    area = f"{LEFT},{up(low):.1f} {' '.join(points)} {WIDTH},{height:.1f} {WIDTH},{up(low):.1f}"
    bands = [(one, colour) for place in (PHASE, ACTIVITY) for one in recorder.timelines[place].intervals(within[1])
             if (colour := PHASE_COLOURS.get(one.name)) is not None]
    return "".join([
        f'<figure class="wide"><svg viewBox="0 0 {WIDTH} {HEIGHT + BAND + BELOW}" role="img" '
        'aria-label="memory over time">',
        *(f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
          f'<text x="{LEFT - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value / MIB:,.0f} MiB</text>'
          for value in (low, (low + top) / 2, top)),
        f'<g style="color: var(--run-0)"><polygon class="band" points="{area}"/></g>',
        *(_band(one, colour, across) for one, colour in bands),
        *(f'<text x="{across(moment):.1f}" y="{HEIGHT + BAND + 18}" text-anchor="{anchor}">'
          f'{(moment - within[0]) / 1e3:,.0f} ms</text>'
          for moment, anchor in ((within[0], "start"), (within[1], "end"))),
        *(f'<text x="{LEFT + 150 * (number + 1)}" y="{HEIGHT + BAND + 34}" '
          f'style="fill: var(--run-{colour})">{name}</text>'
          for number, (name, colour) in enumerate(PHASE_COLOURS.items())),
        "</svg></figure>\n"])


def _band(interval: Interval, colour: int, across: Callable[[float], float]) -> str:
    start, stop = across(interval.start), across(interval.stop)
    return (f'<rect x="{start:.1f}" y="{HEIGHT + 2}" width="{max(0.2, stop - start):.1f}" height="{BAND}" '
            f'style="fill: var(--run-{colour})"><title>{escape(interval.name)}</title></rect>')


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
                                                recorded, within), encoding="utf-8")
    trace["traceEvents"] += engine_tracks(recorded, at_times, within, steps)
    with staged_file(f"{place}.json.gz") as file:  # in the place of the claim
        file.write(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=3))
    milliseconds = (within[1] - within[0]) / 1e3 / len(steps)
    early = " (the trace ends early: more could not be looked at)" if finished.ended_early else ""
    return (f" {which}: {milliseconds:.1f} ms{' each' * (len(steps) > 1)} with the profiler at work: "
            f"{format_breakdown(found)} | {place}.json.gz (for ui.perfetto.dev), {place.name}.html{early}")


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
