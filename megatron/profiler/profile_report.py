"""A profile as text, JSON or HTML: the summary, the largest modules per depth, the tree of modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from zlib import crc32

from megatron.errors import StorageError
from megatron.profiler.profile import FLOPS_PER_MAC, ModelProfile, ModuleRow, walk_rows

_SIZES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def format_count(number: float, unit: str = "") -> str:
    """12.34 M, for example; without a prefix below 1000."""
    for size, letter in _SIZES:
        if number >= size:
            return f"{number / size:.2f} {letter}{unit}"
    return f"{number:.4g} {unit}".rstrip()


def format_seconds(seconds: float) -> str:
    scale, unit = next(((scale, unit) for scale, unit in _TIMES if seconds >= scale), _TIMES[-1])
    return f"{seconds / scale:.2f} {unit}"


def format_share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.2%}"


WIDTH = 100


def format_profile(profile: ModelProfile, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
    lines = [" Flops Profiler ".center(WIDTH, "-"), *summary(profile), "",
             *aggregated_lines(profile, module_depth, top_modules)]
    if detailed:
        lines += [" Profile of each module ".center(WIDTH, "-"), *tree_lines(profile)]
    return "\n".join((*lines, "-" * WIDTH))


# ---- the summary -------------------------------------------------------------------------------------------------


def summary(profile: ModelProfile) -> Iterator[str]:
    yield "Profile summary" if profile.step is None else f"Profile summary of step {profile.step}"
    yield "MACs: multiply-accumulates of matrix products, attention and convolutions, as they ran; FLOPs: 2 x MACs"
    yield "per rank: on this rank, in a whole step; latency, FLOPS, samples: with the profiler at work"
    yield ""
    for name, value in summary_rows(profile):
        yield f"{name + ':':<70}{value}"


def summary_rows(profile: ModelProfile) -> Iterator[tuple[str, str]]:
    """(name, value)"""
    layout = profile.layout
    for name, number in (
            ("world size", layout.world), ("data parallel size", layout.dp), ("tensor parallel size", layout.tp),
            ("ZeRO stage", layout.zero_stage), ("batch size per rank (micro-batch)", layout.micro_batch),
            ("batch size of a step", layout.global_batch)):
        if number is not None:
            yield name, str(number)
    yield "parameters of the model", format_count(profile.root.parameters)
    kept = layout.parameters_kept or profile.root.parameters_on_rank
    if kept != profile.root.parameters:
        yield "parameters kept by this rank, with padding", format_count(kept)
    yield from _flops_rows(profile)
    yield from _time_rows(profile)
    for name, times in profile.uncounted_ops.items():
        yield f"not counted, for want of a formula: {name}", f"{times} calls"


def _flops_rows(profile: ModelProfile) -> Iterator[tuple[str, str]]:
    here = profile.macs_on_rank
    yield "forward MACs per rank", format_count(here.forward, "MACs")
    yield "forward FLOPs per rank", _format_flops(here.forward)
    if not profile.backward_is_estimated:
        yield "backward FLOPs per rank", _format_flops(here.backward)
        yield "FLOPs of recomputation per rank", _format_flops(here.recomputation)
    else:
        times = profile.backward_in_forwards
        yield f"backward FLOPs per rank, estimated as {times:g} x forward", _format_flops(times * here.forward)
    if profile.outside_modules.all:
        yield "FLOPs outside of modules per rank, which are part of these", _format_flops(profile.outside_modules.all)
    if profile.layout.tp > 1:
        yield "forward FLOPs of the model, on all tensor parallel ranks", _format_flops(profile.macs.forward)
    if profile.layout.world > 1 and not profile.backward_is_estimated:
        yield "FLOPs of the step, on all ranks", _format_flops(profile.macs.all * profile.layout.dp)


def _time_rows(profile: ModelProfile) -> Iterator[tuple[str, str]]:
    macs, parts, samples = profile.macs_on_rank, profile.phase_seconds, profile.layout.global_batch
    forward, before = parts.get("forward", profile.root.seconds), profile.step_before
    yield "forward latency", format_seconds(forward)
    if "backward" not in parts or "step" not in parts:
        yield "forward FLOPS per rank", _format_flops_per_second(macs.forward, forward)
        return
    total = sum(parts.values())
    yield "backward latency", format_seconds(parts["backward"])
    yield "step latency (the optimizer)", format_seconds(parts["step"])
    yield "iteration latency, forward + backward + step", format_seconds(total)
    if before is not None:
        yield "iteration latency of the step before, without the profiler", format_seconds(before)
    yield "forward FLOPS per rank", _format_flops_per_second(macs.forward, forward)
    yield "backward FLOPS per rank, with recomputation", _format_flops_per_second(
        macs.backward + macs.recomputation, parts["backward"])
    yield "FLOPS per rank", _format_flops_per_second(macs.all, total)
    if samples is not None and total:
        yield "samples per second, on all ranks", f"{samples / total:.2f}"
    if before:  # it did the same work without the overhead of the profiler
        yield "FLOPS per rank in the time of the step before", _format_flops_per_second(macs.all, before)
        if samples is not None:
            yield "samples per second of the step before, on all ranks", f"{samples / before:.2f}"


def _format_flops(macs: float) -> str:
    return format_count(FLOPS_PER_MAC * macs, "FLOPs")


def _format_flops_per_second(macs: int, seconds: float) -> str:
    return format_count(FLOPS_PER_MAC * macs / seconds if seconds else 0.0, "FLOPS")


# ---- by depth ----------------------------------------------------------------------------------------------------


def aggregated_lines(profile: ModelProfile, module_depth: int = -1, top_modules: int = 1) -> Iterator[str]:
    """Sums over the modules of a class, at each depth down to `module_depth` (-1: all)."""
    levels: dict[int, list[ModuleRow]] = {}
    for depth, row in walk_rows(profile.root):
        levels.setdefault(depth, []).append(row)
    last = max(levels) if module_depth < 0 else min(module_depth, max(levels))
    yield f"Top {top_modules} modules in terms of parameters, MACs and forward latency at each depth"
    for depth in range(last + 1):
        yield f"depth {depth}:"
        yield f"    parameters      - {_top(levels[depth], top_modules, lambda row: row.parameters, format_count)}"
        yield (f"    forward MACs    - "
               f"{_top(levels[depth], top_modules, lambda row: row.macs.forward, lambda n: format_count(n, 'MACs'))}")
        yield f"    forward latency - {_top(levels[depth], top_modules, lambda row: row.seconds, format_seconds)}"


def _top(rows: list[ModuleRow], count: int, key: Callable[[ModuleRow], float], shown: Callable[[float], str]) -> str:
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.class_name] = sums.get(row.class_name, 0) + key(row)
    best = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{kind}: {shown(total)}" for kind, total in best)


# ---- the tree ----------------------------------------------------------------------------------------------------


def tree_lines(profile: ModelProfile) -> Iterator[str]:
    yield "Of each module, with those inside it: parameters, their share, forward MACs, their share,"
    yield "forward latency, its share, forward FLOPS per rank"
    yield ""
    yield from _branch(profile.root, profile.root, "", row_name=profile.root.class_name)


def _branch(row: ModuleRow, root: ModuleRow, indent: str, row_name: str) -> Iterator[str]:
    counts = ", ".join((format_count(row.parameters), f"{format_share(row.parameters, root.parameters)} params",
                        format_count(row.macs.forward, "MACs"),
                        f"{format_share(row.macs.forward, root.macs.forward)} MACs", format_seconds(row.seconds),
                        f"{format_share(row.seconds, root.seconds)} latency",
                        format_count(row.flops_per_second, "FLOPS")))
    if not row.children:
        yield f"{indent}{row_name}({counts})"
        return
    yield f"{indent}{row_name}("
    yield f"{indent}  {counts}"
    for inner in row.children:
        yield from _branch(inner, root, indent + "  ", row_name=f"({inner.name}): {inner.class_name}")
    yield f"{indent})"


_NARROWEST = 0.0005
"""Minimum share of the width for a module to be drawn."""
_ROW_HEIGHT = 1.35
_OWN_WORK_NOTE = "A hatched bar is what a module does itself, outside of the modules in it, as GPT2 does the loss."


@dataclass(frozen=True)
class FlameBar:
    """A module in a flame graph, or (`is_own`) its own work; `left` and `width` are shares of the width."""

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
        pictures.append(_flame_picture(profile.root, "Forward latency", "What this rank took, with the profiler at "
                                       "work.", lambda row: row.seconds, format_seconds))
    return Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{title}: {profile.root.class_name}"), pictures="\n".join(pictures), facts="\n".join(
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in summary_rows(profile)),
        modules="\n".join(_table_row(depth, row, profile.root) for depth, row in walk_rows(profile.root)))


def flame_bars(root: ModuleRow, size: Callable[[ModuleRow], float]) -> Iterator[FlameBar]:
    """From the top, children side by side in the order of the model."""
    total = size(root)

    def place(row: ModuleRow, depth: int, left: float) -> Iterator[FlameBar]:
        width = size(row) / total
        if width >= _NARROWEST:
            yield FlameBar(row, depth, left, width)
            for inner in row.children:
                yield from place(inner, depth + 1, left)
                left += size(inner) / total
            own = (size(row) - sum(map(size, row.children))) / total
            if row.children and own >= _NARROWEST:
                yield FlameBar(row, depth + 1, left, own, is_own=True)

    if total:
        yield from place(root, 0, 0.0)


def _flops(row: ModuleRow) -> float:
    return FLOPS_PER_MAC * row.macs.all


def _flame_picture(root: ModuleRow, title: str, about: str, size: Callable[[ModuleRow], float],
                   shown: Callable[[float], str]) -> str:
    bars = list(flame_bars(root, size))
    height = _ROW_HEIGHT * (1 + max((bar.depth for bar in bars), default=0))
    lines = [f"<h2>{escape(title)}</h2>", f"<p>{escape(about)} {_OWN_WORK_NOTE}</p>",
             f'<div class="flame" style="height:{height:.2f}rem">']
    for bar in bars:
        class_name = bar.row.class_name
        name = (bar.row.name or class_name) + (" itself" if bar.is_own else "")
        tooltip = (f"{bar.row.path or class_name} ({class_name}){' itself, outside of the modules in it' * bar.is_own}:"
                   f" {shown(bar.width * size(root))}, {format_share(bar.width, 1)}")
        hue = crc32(class_name.encode()) % 360  # a colour for each class
        style = (f"left:{bar.left:.4%};width:{bar.width:.4%};top:{bar.depth * _ROW_HEIGHT:.2f}rem;"
                 f"background-color:hsl({hue} 65% 74%)")
        lines.append(f'<div{" class=own" * bar.is_own} style="{style}" title="{escape(tooltip, quote=True)}">'
                     f'{escape(name)}</div>')
    return "\n".join([*lines, "</div>"])


def _table_row(depth: int, row: ModuleRow, root: ModuleRow) -> str:
    cells = (row.class_name, format_count(row.parameters), format_count(FLOPS_PER_MAC * row.macs.forward),
             format_count(FLOPS_PER_MAC * row.macs.backward), format_count(FLOPS_PER_MAC * row.macs.recomputation),
             format_share(row.macs.all, root.macs.all), str(row.calls), format_seconds(row.seconds),
             format_share(row.seconds, root.seconds), format_count(row.flops_per_second, "FLOPS"))
    inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return (f'<tr><td style="padding-left:{depth * 1.2 + 0.3:.1f}rem">{escape(row.name or row.class_name)}</td>{inside}'
            "</tr>")


_JSON, _PAGE = ".json", (".html", ".htm")


def check_output_path(path: str, flag: str) -> None:
    """Raise if the file cannot be created, as far as that shows beforehand."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or Path(path).is_dir():
        raise StorageError(f"{flag} {path} cannot be written: {folder if not folder.is_dir() else path} is "
                           f"{'no' if not folder.is_dir() else 'a'} folder; name a file in a folder that is there")


def includes_modules(path: str, detailed: bool) -> bool:
    """Whether the file will contain every module; text does only if `detailed`."""
    return detailed or Path(path).suffix.lower() in (_JSON, *_PAGE)


def write_profile(profile: ModelProfile, path: str, module_depth: int = -1, top_modules: int = 1,
                  detailed: bool = True) -> None:
    ending = Path(path).suffix.lower()
    if ending == _JSON:
        text = json.dumps(profile.as_dict(), indent=1)
    elif ending in _PAGE:
        text = profile_page(profile)
    else:
        text = format_profile(profile, module_depth, top_modules, detailed)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the profile cannot be written to {path}: {error.strerror}; name a file in a folder that "
                           "can be written") from error
