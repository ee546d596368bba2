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

from megatron.profiler.numbers import lasted, share, short
from megatron.profiler.profile import FLOPS_PER_MAC, Profile, Row, walk
from megatron.profiler.text import facts

_NARROWEST = 0.0005
"""Share of the picture below which a module is not drawn."""
_ROW_HEIGHT = 1.35
_ITSELF = "A hatched bar is what a module does itself, outside of the modules in it, as GPT2 does the loss."


@dataclass(frozen=True)
class Bar:
    """A module in a flame picture, or what it does itself; `left` and `width` are shares of the picture."""

    row: Row
    depth: int
    left: float
    width: float
    is_own: bool = False


def page(profile: Profile) -> str:
    title = "Profile" if profile.step is None else f"Profile of step {profile.step}"
    pictures = [_picture(profile.root, "FLOPs", "Forward, backward and recomputation of the model.", _work,
                         lambda value: short(value, "FLOPs"))]
    if profile.root.seconds:
        pictures.append(_picture(profile.root, "Forward latency", "What this rank took, with the profiler at work.",
                                 lambda row: row.seconds, lasted))
    return Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{title}: {profile.root.kind}"), pictures="\n".join(pictures),
        facts="\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts(profile)),
        modules="\n".join(_table_row(depth, row, profile.root) for depth, row in walk(profile.root)))


def bars(root: Row, size: Callable[[Row], float]) -> Iterator[Bar]:
    """From the top, side by side in the order of the model."""
    whole = size(root)

    def place(row: Row, depth: int, left: float) -> Iterator[Bar]:
        width = size(row) / whole
        if width >= _NARROWEST:
            yield Bar(row, depth, left, width)
            for inner in row.rows:
                yield from place(inner, depth + 1, left)
                left += size(inner) / whole
            own = (size(row) - sum(map(size, row.rows))) / whole
            if row.rows and own >= _NARROWEST:
                yield Bar(row, depth + 1, left, own, is_own=True)

    if whole:
        yield from place(root, 0, 0.0)


def _work(row: Row) -> float:
    return FLOPS_PER_MAC * row.macs.all


def _picture(root: Row, title: str, about: str, size: Callable[[Row], float], shown: Callable[[float], str]) -> str:
    drawn = list(bars(root, size))
    height = _ROW_HEIGHT * (1 + max((bar.depth for bar in drawn), default=0))
    inside = "\n".join(_bar(bar, f"{shown(bar.width * size(root))}, {share(bar.width, 1)}") for bar in drawn)
    return (f"<h2>{escape(title)}</h2>\n<p>{escape(about)} {_ITSELF}</p>\n"
            f'<div class="flame" style="height:{height:.2f}rem">\n{inside}\n</div>')


def _bar(bar: Bar, value: str) -> str:
    name = (bar.row.name or bar.row.kind) + (" itself" if bar.is_own else "")
    whose = f"{bar.row.path or bar.row.kind} ({bar.row.kind}){' itself, outside of the modules in it' * bar.is_own}"
    told = escape(f"{whose}: {value}", quote=True)
    style = (f"left:{bar.left:.4%};width:{bar.width:.4%};top:{bar.depth * _ROW_HEIGHT:.2f}rem;"
             f"background-color:hsl({_hue(bar.row.kind)} 65% 74%)")
    return f'<div{" class=own" * bar.is_own} style="{style}" title="{told}">{escape(name)}</div>'


def _hue(kind: str) -> int:
    """One colour for each class."""
    return crc32(kind.encode()) % 360


def _table_row(depth: int, row: Row, root: Row) -> str:
    cells = (row.kind, short(row.parameters), short(FLOPS_PER_MAC * row.macs.forward),
             short(FLOPS_PER_MAC * row.macs.backward), short(FLOPS_PER_MAC * row.macs.recomputation),
             share(row.macs.all, root.macs.all), str(row.calls), lasted(row.seconds), share(row.seconds, root.seconds),
             short(row.flops_per_second, "FLOPS"))
    inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return (f'<tr><td style="padding-left:{depth * 1.2 + 0.3:.1f}rem">{escape(row.name or row.kind)}</td>{inside}'
            "</tr>")
