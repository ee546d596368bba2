"""Where the time of traced steps went: the seconds of each kind, which together are all of it.

On a CPU the thread that trains does everything, and each moment is what that thread was at. On an accelerator it is
what the device was at: an exchange counts where nothing else ran beside it, and where nothing ran at all the device was
idle, because the host read data, or had not launched enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.trace.events import (ATTENTION, COPIES, DEVICE_CATEGORIES, EXCHANGE, LOSS, PRODUCTS, TraceEvent,
                                   device_intervals, thread_intervals)
from megatron.trace.recorder import TraceRecorder
from megatron.trace.stretches import Interval, TimeSpan, time_by_kind
from megatron.whereabouts import ACTIVITY, OPTIMIZER_STEP, PHASE, READING, TRAINING

CPU_KINDS = PRODUCTS, ATTENTION, LOSS, "optimizer", "exchange not hidden", "data", "evaluation and saves", "other"
"""On a CPU."""
GPU_KINDS = COPIES, "idle"
"""On an accelerator as well."""


def time_breakdown(events: Sequence[TraceEvent], recorder: TraceRecorder, thread: int, within: TimeSpan, *,
                   on_host: bool) -> dict[str, float]:
    """Microseconds of each kind; nothing where the profiler has seen nothing of the device."""
    activities, end = recorder.timelines[ACTIVITY].intervals(within[1]), within[1]
    interrupted = {"data": [one for one in activities if one.name == READING],
                   "evaluation and saves": [one for one in activities if one.name not in (READING, TRAINING)]}
    steps = [one for one in recorder.timelines[PHASE].intervals(end) if one.name == OPTIMIZER_STEP]
    if not on_host:
        is_seen = any(event.get("cat") in DEVICE_CATEGORIES for event in events)
        return _device_breakdown(events, steps, interrupted, within) if is_seen else {}
    work = thread_intervals(events, thread)
    kinds = {**interrupted, "exchange not hidden": recorder.exchange_intervals(end), "optimizer": steps,
             **{kind: work.get(kind, []) for kind in (LOSS, ATTENTION, PRODUCTS)}}
    return _order_kinds(time_by_kind(kinds, within), CPU_KINDS, rest="other")


def _device_breakdown(events: Sequence[TraceEvent], steps: Sequence[Interval], interrupted: dict[str, list[Interval]],
                      within: TimeSpan) -> dict[str, float]:
    work: dict[str, list[Interval]] = {kind: [] for kind in (LOSS, ATTENTION, PRODUCTS, "optimizer", "other", COPIES,
                                                             EXCHANGE)}
    for stretch, kind, launched_at in device_intervals(events):
        if kind not in (EXCHANGE, COPIES) and _contains(steps, launched_at):
            kind = "optimizer"
        work[kind or "other"].append(stretch)
    exchange = work.pop(EXCHANGE)
    found = time_by_kind({**work, "exchange not hidden": exchange, **interrupted}, within)
    return _order_kinds(found, (*CPU_KINDS, *GPU_KINDS), rest="idle")


def _contains(intervals: Iterable[Interval], moment: float) -> bool:
    return any(one.start <= moment < one.stop for one in intervals)


def _order_kinds(found: dict[str, float], order: Sequence[str], rest: str) -> dict[str, float]:
    found[rest] = found.get(rest, 0.0) + found.pop("")
    return {kind: found[kind] for kind in order}


def format_breakdown(found: dict[str, float]) -> str:
    """In shares of a hundred; of what there was."""
    total = sum(found.values())
    if not found:
        return "the profiler has seen nothing of the device, which another one (nsys, ncu) may hold"
    return ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in found.items()
                     if part > 0 or kind in CPU_KINDS and kind != "evaluation and saves")
