"""A profile as plain numbers (a tree of rows, one for each module, without references to the model), as text and JSON.

    logical   of the whole model: full parameters, without vocabulary padding
    on rank   of what this rank computes with: its tensor parallel slices

A row includes the rows inside it. A shared module or parameter is counted once, at its first name. FLOPs are 2 x MACs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from megatron.errors import StorageError
from megatron.profiler.flop_recorder import FlopRecording
from mpu.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from mpu.partition import partition_of

FLOPS_PER_MAC = 2
_PARALLEL = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelEmbedding)


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by phase."""

    forward: int = 0
    backward: int = 0
    recomputation: int = 0

    def __add__(self, other: Macs) -> Macs:
        return Macs(self.forward + other.forward, self.backward + other.backward,
                    self.recomputation + other.recomputation)

    def times(self, factor: int) -> Macs:
        return Macs(self.forward * factor, self.backward * factor, self.recomputation * factor)

    @property
    def all(self) -> int:
        return self.forward + self.backward + self.recomputation


@dataclass(frozen=True)
class ModuleRow:
    """A module including all inside it."""

    path: str
    class_name: str
    parameters: int
    parameters_on_rank: int
    macs: Macs
    macs_on_rank: Macs
    calls: int
    seconds: float  # of its forwards; of a module without a forward (a ModuleList), the sum of its children's
    children: tuple[ModuleRow, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flops_per_second(self) -> float:
        """Of this rank in the forward; 0 if unknown."""
        return FLOPS_PER_MAC * self.macs_on_rank.forward / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class ProfiledJob:
    """Layout and batch sizes of the profiled job."""

    world: int = 1
    dp: int = 1
    tp: int = 1
    zero_stage: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    parameters_kept: int | None = None  # elements that this rank keeps between steps, with padding


@dataclass(frozen=True)
class ModelProfile:
    root: ModuleRow
    outside_modules: Macs
    phase_seconds: Mapping[str, float]  # seconds by part of a step
    layout: ProfiledJob = ProfiledJob()
    step: int | None = None
    backward_in_forwards: float = 2.0  # the estimate of a missing backward
    step_before: float | None = None  # seconds of the step before the profiled one
    uncounted_ops: Mapping[str, int] = field(default_factory=dict)
    backward_is_estimated: bool = False

    @property
    def macs(self) -> Macs:
        """Of the full model, and outside of modules."""
        return self.root.macs + self.outside_modules

    @property
    def macs_on_rank(self) -> Macs:
        return self.root.macs_on_rank + self.outside_modules

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "layout": asdict(self.layout), "parameters": self.root.parameters,
                "parameters_here": self.root.parameters_on_rank, "flops": self._flops(self.macs),
                "flops_here": self._flops(self.macs_on_rank), "backward_is_estimated": self.backward_is_estimated,
                "outside_of_modules": _flops(self.outside_modules),
                "seconds": dict(self.phase_seconds), "seconds_of_step_before": self.step_before,
                "not_counted": dict(self.uncounted_ops), "modules": _row_as_dict(self.root)}

    def _flops(self, macs: Macs) -> dict[str, int]:
        """With the estimate of a missing backward."""
        counted = _flops(macs)
        if self.backward_is_estimated:
            counted["backward"] = round(self.backward_in_forwards * counted["forward"])
        return counted


def walk_rows(row: ModuleRow, depth: int = 0) -> Iterator[tuple[int, ModuleRow]]:
    """(depth, row), depth first."""
    yield depth, row
    for inner in row.children:
        yield from walk_rows(inner, depth + 1)


def build_profile(recording: FlopRecording, **fields: Any) -> ModelProfile:
    """`fields` are the other fields of ModelProfile."""
    recording.assign_times()
    tp = tensor_parallel_size(recording.model)
    seen_modules, seen_parameters = set[nn.Module](), set[nn.Parameter]()

    def macs_of(path: str | None) -> Macs:
        return Macs(*(recording.macs[path, phase] for phase in ("forward", "backward", "recomputation")))

    def row_of(module: nn.Module, path: str) -> ModuleRow:
        seen_modules.add(module)
        own = [parameter for parameter in module.parameters(recurse=False) if parameter not in seen_parameters]
        seen_parameters.update(own)
        rows = tuple(row_of(child, f"{path}.{name}" if path else name)
                     for name, child in module.named_children() if child not in seen_modules)
        # all work of a module that holds a split parameter, or one inside it that does, is taken as split
        is_split = any(partition_of(parameter) is not None for parameter in module.parameters())
        macs, calls = macs_of(path), recording.calls[path]
        return ModuleRow(
            path, type(module).__name__,
            sum((row.parameters for row in rows), sum(logical_numel(parameter, tp) for parameter in own)),
            sum((row.parameters_on_rank for row in rows), sum(parameter.numel() for parameter in own)),
            sum((row.macs for row in rows), macs.times(tp if is_split else 1)),
            sum((row.macs_on_rank for row in rows), macs), calls,
            recording.module_seconds[path] if calls else sum(row.seconds for row in rows), rows)

    return ModelProfile(row_of(recording.model, ""), macs_of(None), dict(recording.part_seconds),
                        uncounted_ops=dict(recording.uncounted_ops),
                        backward_is_estimated=not recording.saw_backward, **fields)


def tensor_parallel_size(model: nn.Module) -> int:
    return max((module.tp.size for module in model.modules() if isinstance(module, _PARALLEL)), default=1)


def logical_numel(parameter: nn.Parameter, tp_size: int) -> int:
    """Elements of the whole parameter."""
    shape, partition = list(parameter.shape), partition_of(parameter)
    if partition is not None:
        whole = shape[partition.dim] * tp_size
        shape[partition.dim] = whole if partition.size is None else partition.size
    return prod(shape)


def _flops(macs: Macs) -> dict[str, int]:
    return {name: FLOPS_PER_MAC * count for name, count in asdict(macs).items()}


def _row_as_dict(row: ModuleRow) -> dict[str, Any]:
    return {"name": row.name, "path": row.path, "class": row.class_name, "parameters": row.parameters,
            "parameters_here": row.parameters_on_rank, "macs": asdict(row.macs),
            "flops": _flops(row.macs), "flops_here": _flops(row.macs_on_rank), "calls": row.calls,
            "seconds": row.seconds, "forward_flops_per_second": row.flops_per_second,
            "modules": [_row_as_dict(inner) for inner in row.children]}


# ---- text and JSON -----------------------------------------------------------------------------------------------

_SIZES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
WIDTH = 100


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


def format_profile(profile: ModelProfile, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
    lines = [" Flops Profiler ".center(WIDTH, "-"), *summary(profile), "",
             *aggregated_lines(profile, module_depth, top_modules)]
    if detailed:
        lines += [" Profile of each module ".center(WIDTH, "-"), *tree_lines(profile)]
    return "\n".join((*lines, "-" * WIDTH))


def summary(profile: ModelProfile) -> Iterator[str]:
    yield "Profile summary" if profile.step is None else f"Profile summary of step {profile.step}"
    yield "MACs: multiply-accumulates of matrix products, attention and convolutions, as they ran; FLOPs: 2 x MACs"
    yield "per rank: on this rank, in a whole step; latency, FLOPS, samples: with the profiler at work"
    yield ""
    for name, value in _summary_rows(profile):
        yield f"{name + ':':<70}{value}"
    for name, times in profile.uncounted_ops.items():
        yield f"{f'not counted, for want of a formula: {name}:':<70}{times} calls"


def _summary_rows(profile: ModelProfile) -> Iterator[tuple[str, str]]:
    """(name, value)"""
    def flops(macs: float) -> str:
        return format_count(FLOPS_PER_MAC * macs, "FLOPs")

    def rate(macs: int, seconds: float) -> str:
        return format_count(FLOPS_PER_MAC * macs / seconds if seconds else 0.0, "FLOPS")

    layout, here, parts = profile.layout, profile.macs_on_rank, profile.phase_seconds
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

    yield "forward MACs per rank", format_count(here.forward, "MACs")
    yield "forward FLOPs per rank", flops(here.forward)
    if not profile.backward_is_estimated:
        yield "backward FLOPs per rank", flops(here.backward)
        yield "FLOPs of recomputation per rank", flops(here.recomputation)
    else:
        times = profile.backward_in_forwards
        yield f"backward FLOPs per rank, estimated as {times:g} x forward", flops(times * here.forward)
    if profile.outside_modules.all:
        yield "FLOPs outside of modules per rank, which are part of these", flops(profile.outside_modules.all)
    if layout.tp > 1:
        yield "forward FLOPs of the model, on all tensor parallel ranks", flops(profile.macs.forward)
    if layout.world > 1 and not profile.backward_is_estimated:
        yield "FLOPs of the step, on all ranks", flops(profile.macs.all * layout.dp)

    forward, before, samples = parts.get("forward", profile.root.seconds), profile.step_before, layout.global_batch
    yield "forward latency", format_seconds(forward)
    if "backward" not in parts or "step" not in parts:
        yield "forward FLOPS per rank", rate(here.forward, forward)
        return
    total = sum(parts.values())
    yield "backward latency", format_seconds(parts["backward"])
    yield "step latency (the optimizer)", format_seconds(parts["step"])
    yield "iteration latency, forward + backward + step", format_seconds(total)
    if before is not None:
        yield "iteration latency of the step before, without the profiler", format_seconds(before)
    yield "forward FLOPS per rank", rate(here.forward, forward)
    yield "backward FLOPS per rank, with recomputation", rate(here.backward + here.recomputation, parts["backward"])
    yield "FLOPS per rank", rate(here.all, total)
    if samples is not None and total:
        yield "samples per second, on all ranks", f"{samples / total:.2f}"
    if before:  # it did the same work without the overhead of the profiler
        yield "FLOPS per rank in the time of the step before", rate(here.all, before)
        if samples is not None:
            yield "samples per second of the step before, on all ranks", f"{samples / before:.2f}"


_AGGREGATED: tuple[tuple[str, Callable[[ModuleRow], float], Callable[[float], str]], ...] = (
    ("parameters", lambda row: row.parameters, format_count),
    ("forward MACs", lambda row: row.macs.forward, lambda macs: format_count(macs, "MACs")),
    ("forward latency", lambda row: row.seconds, format_seconds))


def aggregated_lines(profile: ModelProfile, module_depth: int = -1, top_modules: int = 1) -> Iterator[str]:
    """Sums over the modules of a class, at each depth down to `module_depth` (-1: all)."""
    levels: dict[int, list[ModuleRow]] = {}
    for depth, row in walk_rows(profile.root):
        levels.setdefault(depth, []).append(row)
    last = max(levels) if module_depth < 0 else min(module_depth, max(levels))
    yield f"Top {top_modules} modules in terms of parameters, MACs and forward latency at each depth"
    for depth in range(last + 1):
        yield f"depth {depth}:"
        for title, value_of, shown in _AGGREGATED:
            sums = defaultdict[str, float](float)
            for row in levels[depth]:
                sums[row.class_name] += value_of(row)
            best = sorted(sums.items(), key=lambda item: -item[1])[:top_modules]
            yield f"    {title:<15} - " + ", ".join(f"{kind}: {shown(total)}" for kind, total in best)


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


def check_output_path(path: str, flag: str) -> None:
    """Raise if the file's folder is missing."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise StorageError(f"{flag} {path} cannot be written: {folder} is no folder; name a file in a folder that is "
                           "there")


def is_json(path: str) -> bool:
    return Path(path).suffix.lower() == ".json"


def write_profile(profile: ModelProfile, path: str, module_depth: int = -1, top_modules: int = 1,
                  detailed: bool = True) -> None:
    """Write JSON, which has every module, or text, by the extension of the file."""
    text = (json.dumps(profile.as_dict(), indent=1) if is_json(path)
            else format_profile(profile, module_depth, top_modules, detailed))
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the profile cannot be written to {path}: {error.strerror}; name a file in a folder that "
                           "can be written") from error
