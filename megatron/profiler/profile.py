"""A profile as plain numbers: a tree of rows, one for each module, without references to the model.

    logical   of the whole model: full parameters, without vocabulary padding
    on rank   of what this rank computes with: its tensor parallel slices

A row includes the rows inside it. A shared module or parameter is counted once, at its first name. FLOPs are 2 x MACs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from torch import nn

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
    seconds: float
    """Of its forwards; of a module without a forward (a ModuleList), the sum of its children's."""
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
    parameters_kept: int | None = None
    """Elements that this rank keeps between steps, with padding."""


@dataclass(frozen=True)
class ModelProfile:
    root: ModuleRow
    outside_modules: Macs
    phase_seconds: Mapping[str, float]
    """By part of a step."""
    layout: ProfiledJob = ProfiledJob()
    step: int | None = None
    backward_in_forwards: float = 2.0
    """The estimate of a missing backward."""
    step_before: float | None = None
    """Seconds of the step before the profiled one."""
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
