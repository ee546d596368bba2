"""What was recorded, as further tracks of the trace: phases and blocks, what the host waits for, what travels, and
memory as a curve. The format is the trace event format, which Perfetto and Chrome read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.trace.memory import MemoryLevel
from megatron.trace.recorder import TraceRecorder
from megatron.trace.stretches import Interval, TimeSpan
from megatron.whereabouts import ACTIVITY, PHASE, STEP, UNIT

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
