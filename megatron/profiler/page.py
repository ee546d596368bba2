"""A profile as one HTML file that loads nothing: the summary, two flame pictures and a table.

In a flame picture a module is as wide as its share, and lies under the module that it is in. Beside the modules inside
it lies its own work, which none of them accounts for: of this GPT-2 the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from zlib import crc32

from megatron.profiler.numbers import format_count, format_seconds, format_share
from megatron.profiler.profile import FLOPS_PER_MAC, ModelProfile, ModuleRow, walk_rows
from megatron.profiler.text import summary_rows

_NARROWEST = 0.0005
"""Share of the picture below which a module is not drawn."""
_ROW_HEIGHT = 1.35
_OWN_WORK_NOTE = "A hatched bar is what a module does itself, outside of the modules in it, as GPT2 does the loss."


@dataclass(frozen=True)
class FlameBar:
    """A module in a flame picture, or what it does itself; `left` and `width` are shares of the picture."""

    row: ModuleRow
    depth: int
    left: float
    width: float
    is_own: bool = False


def profile_page(profile: ModelProfile) -> str:
    title = "Profile" if profile.step is None else f"Profile of step {profile.step}"
    pictures = [_flame_picture(profile.root, "FLOPs", "Forward, backward and recomputation of the model.", _flops,
                               lambda value: format_count(value, "FLOPs"))]
    if profile.root.seconds:
        pictures.append(
            _flame_picture(profile.root, "Forward latency", "What this rank took, with the profiler at work.",
                           lambda row: row.seconds, format_seconds))
    return Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{title}: {profile.root.class_name}"),
        pictures="\n".join(pictures),
        facts="\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
                        for name, value in summary_rows(profile)),
        modules="\n".join(_table_row(depth, row, profile.root) for depth, row in walk_rows(profile.root)))


def flame_bars(root: ModuleRow, size: Callable[[ModuleRow], float]) -> Iterator[FlameBar]:
    """From the top, side by side in the order of the model."""
    whole = size(root)

    def place(row: ModuleRow, depth: int, left: float) -> Iterator[FlameBar]:
        width = size(row) / whole
        if width >= _NARROWEST:
            yield FlameBar(row, depth, left, width)
            for inner in row.children:
                yield from place(inner, depth + 1, left)
                left += size(inner) / whole
            own = (size(row) - sum(map(size, row.children))) / whole
            if row.children and own >= _NARROWEST:
                yield FlameBar(row, depth + 1, left, own, is_own=True)

    if whole:
        yield from place(root, 0, 0.0)


def _flops(row: ModuleRow) -> float:
    return FLOPS_PER_MAC * row.macs.all


def _flame_picture(root: ModuleRow, title: str, about: str, size: Callable[[ModuleRow], float],
                   shown: Callable[[float], str]) -> str:
    drawn = list(flame_bars(root, size))
    height = _ROW_HEIGHT * (1 + max((bar.depth for bar in drawn), default=0))
    inside = "\n".join(
        _bar_html(bar, f"{shown(bar.width * size(root))}, {format_share(bar.width, 1)}") for bar in drawn)
    return (f"<h2>{escape(title)}</h2>\n<p>{escape(about)} {_OWN_WORK_NOTE}</p>\n"
            f'<div class="flame" style="height:{height:.2f}rem">\n{inside}\n</div>')


def _bar_html(bar: FlameBar, value: str) -> str:
    name = (bar.row.name or bar.row.class_name) + (" itself" if bar.is_own else "")
    whose = f"{bar.row.path or bar.row.class_name} ({bar.row.class_name}){' itself, outside of the modules in it' * bar.is_own}"
    title = escape(f"{whose}: {value}", quote=True)
    style = (f"left:{bar.left:.4%};width:{bar.width:.4%};top:{bar.depth * _ROW_HEIGHT:.2f}rem;"
             f"background-color:hsl({_class_hue(bar.row.class_name)} 65% 74%)")
    return f'<div{" class=own" * bar.is_own} style="{style}" title="{title}">{escape(name)}</div>'


def _class_hue(kind: str) -> int:
    """One colour for each class."""
    return crc32(kind.encode()) % 360


def _table_row(depth: int, row: ModuleRow, root: ModuleRow) -> str:
    cells = (row.class_name, format_count(row.parameters), format_count(FLOPS_PER_MAC * row.macs.forward),
             format_count(FLOPS_PER_MAC * row.macs.backward), format_count(FLOPS_PER_MAC * row.macs.recomputation),
             format_share(row.macs.all, root.macs.all), str(row.calls), format_seconds(row.seconds),
             format_share(row.seconds, root.seconds), format_count(row.flops_per_second, "FLOPS"))
    inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return (f'<tr><td style="padding-left:{depth * 1.2 + 0.3:.1f}rem">{escape(row.name or row.class_name)}</td>{inside}'
            "</tr>")
