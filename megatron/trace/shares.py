"""Where the time of traced steps went: the seconds of each kind, which together are all of it.

On a CPU the thread that trains does everything, and each moment is what that thread was at. On an accelerator it is
what the device was at: an exchange counts where nothing else ran beside it, and where nothing ran at all the device was
idle, because the host read data, or had not launched enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.trace.events import ATTENTION, COPIES, EXCHANGE, LOSS, ON_DEVICE, PRODUCTS, Event, of_thread, on_device
from megatron.trace.recorder import Recorder
from megatron.trace.stretches import Span, Stretch, divided
from megatron.whereabouts import ACTIVITY, OPTIMIZER_STEP, PHASE, READING, TRAINING

ALL = PRODUCTS, ATTENTION, LOSS, "optimizer", "exchange not hidden", "data", "evaluation and saves", "other"
"""On a CPU."""
FURTHER = COPIES, "idle"
"""On an accelerator as well."""


def shares(events: Sequence[Event], recorded: Recorder, thread: int, within: Span, *,
           on_host: bool) -> dict[str, float]:
    """Microseconds of each kind; nothing where the profiler has seen nothing of the device."""
    activities, end = recorded.lines[ACTIVITY].stretches(within[1]), within[1]
    aside = {"data": [one for one in activities if one.name == READING],
             "evaluation and saves": [one for one in activities if one.name not in (READING, TRAINING)]}
    steps = [one for one in recorded.lines[PHASE].stretches(end) if one.name == OPTIMIZER_STEP]
    if not on_host:
        is_seen = any(event.get("cat") in ON_DEVICE for event in events)
        return _of_device(events, steps, aside, within) if is_seen else {}
    work = of_thread(events, thread)
    kinds = {**aside, "exchange not hidden": recorded.at_exchanges(end), "optimizer": steps,
             **{kind: work.get(kind, []) for kind in (LOSS, ATTENTION, PRODUCTS)}}
    return _named(divided(kinds, within), ALL, rest="other")


def _of_device(events: Sequence[Event], steps: Sequence[Stretch], aside: dict[str, list[Stretch]],
               within: Span) -> dict[str, float]:
    work: dict[str, list[Stretch]] = {kind: [] for kind in (LOSS, ATTENTION, PRODUCTS, "optimizer", "other", COPIES,
                                                            EXCHANGE)}
    for stretch, kind, launched_at in on_device(events):
        if kind not in (EXCHANGE, COPIES) and _contains(steps, launched_at):
            kind = "optimizer"
        work[kind or "other"].append(stretch)
    exchange = work.pop(EXCHANGE)
    found = divided({**work, "exchange not hidden": exchange, **aside}, within)
    return _named(found, (*ALL, *FURTHER), rest="idle")


def _contains(stretches: Iterable[Stretch], moment: float) -> bool:
    return any(one.start <= moment < one.stop for one in stretches)


def _named(found: dict[str, float], order: Sequence[str], rest: str) -> dict[str, float]:
    found[rest] = found.get(rest, 0.0) + found.pop("")
    return {kind: found[kind] for kind in order}


def told(found: dict[str, float]) -> str:
    """In shares of a hundred; of what there was."""
    total = sum(found.values())
    if not found:
        return "the profiler has seen nothing of the device, which another one (nsys, ncu) may hold"
    return ", ".join(f"{kind} {100 * part / total:.0f} %" for kind, part in found.items()
                     if part > 0 or kind in ALL and kind != "evaluation and saves")
