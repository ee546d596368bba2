"""What was recorded, as further tracks of the trace: phases and blocks, what the host waits for, what travels, and
memory as a curve. The format is the trace event format, which Perfetto and Chrome read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.trace.memory import Level
from megatron.trace.recorder import Recorder
from megatron.trace.stretches import Span, Stretch
from megatron.whereabouts import ACTIVITY, PHASE, STEP, UNIT

TRACKS = "step", "activity", "phase", "block", "exchange"
PROCESS = 1 << 30
"""A number that no program has."""


def tracks(recorded: Recorder, levels: Sequence[Level], within: Span, steps: range) -> Iterator[dict[str, Any]]:
    end = within[1]
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "the engine"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": PROCESS, "args": {"sort_index": -1}}
    whole = {f"step {step}" for step in steps}  # not the moment before the first one, or after the last
    of_track = [[one for one in recorded.lines[STEP].stretches(end) if one.name in whole],
                *(recorded.lines[place].stretches(end) for place in (ACTIVITY, PHASE, UNIT)),
                recorded.at_exchanges(end)]
    for number, (name, stretches) in enumerate(zip(TRACKS, of_track, strict=True)):
        yield {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": number, "args": {"name": name}}
        yield from (_slice(one, number) for one in stretches)
    for key, journey in recorded.journeys.items():
        if journey.awaited is not None:
            stop = end if journey.stop is None else journey.stop
            its = {"cat": "exchange", "name": journey.what, "id": "{} {}".format(*key), "pid": PROCESS}
            yield {**its, "ph": "b", "ts": journey.start}
            yield {**its, "ph": "e", "ts": stop}
    for level in levels:
        yield {"ph": "C", "name": "memory", "pid": PROCESS, "ts": level.time, "args": {"MiB": level.total / 2**20}}


def _slice(stretch: Stretch, track: int) -> dict[str, Any]:
    return {"ph": "X", "cat": TRACKS[track], "name": stretch.name, "pid": PROCESS, "tid": track, "ts": stretch.start,
            "dur": stretch.length}
