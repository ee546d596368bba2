"""A trace as one page of HTML: where the time went, and memory over time, above the phases it was used in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from megatron.report.page import html_document, html_table
from megatron.report.tables import make_table
from megatron.trace.memory import MemoryLevel, downsample_levels
from megatron.trace.recorder import TraceRecorder
from megatron.trace.stretches import Interval, TimeSpan
from megatron.whereabouts import ACTIVITY, BACKWARD, EVALUATION, FORWARD, OPTIMIZER_STEP, PHASE, READING
from megatron.zero.exchanges import SAVE

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
