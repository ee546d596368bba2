"""A profile as plain numbers: a tree of rows without references to the model.

Counts are logical (whole model) and on this rank. FLOPs are 2 x MACs. A row includes the rows inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.profiler.flop_recorder import FlopRecording
from megatron.profiler.module_tree import ModuleNode, RunPhase, logical_numel, tensor_parallel_size

FLOPS_PER_MAC = 2


@dataclass(frozen=True)
class Macs:
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
    recompute_factor: float = 0.0
    """A missing backward is estimated as 2 + recompute_factor forwards."""
    step_before: float | None = None
    """Seconds of the step before the profiled one."""
    uncounted_ops: Mapping[str, int] = field(default_factory=dict)
    saw_backward: bool = True

    @property
    def macs(self) -> Macs:
        """Of the full model, and outside of modules."""
        return self.root.macs + self.outside_modules

    @property
    def macs_on_rank(self) -> Macs:
        return self.root.macs_on_rank + self.outside_modules

    @property
    def backward_is_estimated(self) -> bool:
        return not self.saw_backward

    @property
    def backward_in_forwards(self) -> float:
        """The estimate of a missing backward."""
        return 2 + self.recompute_factor

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
    recording.finish()
    tp = tensor_parallel_size(recording.root.module)
    return ModelProfile(_row(recording.root, tp), _macs(recording.outside), dict(recording.seconds),
                        uncounted_ops=recording.uncounted_ops, saw_backward=recording.saw_backward, **fields)


def _row(node: ModuleNode, tp: int) -> ModuleRow:
    rows = tuple(_row(child, tp) for child in node.children)
    own = _macs(node)
    return ModuleRow(node.path, node.class_name, sum(logical_numel(p, tp) for p in node.parameters),
                     sum(p.numel() for p in node.parameters),
                     sum((row.macs for row in rows), own.times(tp if node.is_tensor_parallel else 1)),
                     sum((row.macs_on_rank for row in rows), own), node.calls,
                     node.seconds if node.calls else sum(row.seconds for row in rows), rows)


def _macs(node: ModuleNode) -> Macs:
    return Macs(node.macs[RunPhase.FORWARD], node.macs[RunPhase.BACKWARD], node.macs[RunPhase.RECOMPUTE])


def _flops(macs: Macs) -> dict[str, int]:
    return {name: FLOPS_PER_MAC * count for name, count in asdict(macs).items()}


def _row_as_dict(row: ModuleRow) -> dict[str, Any]:
    return {"name": row.name, "path": row.path, "class": row.class_name, "parameters": row.parameters,
            "parameters_here": row.parameters_on_rank, "macs": asdict(row.macs),
            "flops": _flops(row.macs), "flops_here": _flops(row.macs_on_rank), "calls": row.calls,
            "seconds": row.seconds, "forward_flops_per_second": row.flops_per_second,
            "modules": [_row_as_dict(inner) for inner in row.children]}
