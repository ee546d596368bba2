"""What was recorded, as plain numbers: a tree of rows that holds nothing of the model.

Counts come in two sizes (nodes.py): logical, of the whole model, and *here*, of this rank. FLOPs are 2 x MACs.
Parameters and MACs of a row include the rows inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.profiler.nodes import Node, Phase, logical_numel, tensor_parallel_size
from megatron.profiler.recording import Recording

FLOPS_PER_MAC = 2


@dataclass(frozen=True)
class Macs:
    """By when they ran."""

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
class Row:
    """A module with all inside it."""

    path: str
    kind: str
    parameters: int
    parameters_here: int
    macs: Macs
    macs_here: Macs
    calls: int
    seconds: float
    """Of its forwards; of a list of modules, theirs."""
    rows: tuple[Row, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flops_per_second(self) -> float:
        """Of this rank in the forward; 0 where there is nothing to say."""
        return FLOPS_PER_MAC * self.macs_here.forward / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Layout:
    """Of the job that was profiled, and how much a step of it takes in."""

    world: int = 1
    dp: int = 1
    tp: int = 1
    zero_stage: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    parameters_kept: int | None = None
    """Elements that this rank keeps between steps, with padding."""


@dataclass(frozen=True)
class Profile:
    """One recording."""

    root: Row
    outside: Macs
    """What ran in no module."""
    parts: Mapping[str, float]
    """Seconds of parts of a step."""
    layout: Layout = Layout()
    step: int | None = None
    recompute_factor: float = 0.0
    """Where no backward was seen it is taken for 2 + this forwards."""
    step_before: float | None = None
    """Seconds of the step before the profiled one."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    saw_backward: bool = True

    @property
    def macs(self) -> Macs:
        """Of the model and of what ran beside it."""
        return self.root.macs + self.outside

    @property
    def macs_here(self) -> Macs:
        return self.root.macs_here + self.outside

    @property
    def backward_is_estimated(self) -> bool:
        return not self.saw_backward

    @property
    def backward_in_forwards(self) -> float:
        """What a backward is taken for that was not seen."""
        return 2 + self.recompute_factor

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "layout": asdict(self.layout), "parameters": self.root.parameters,
                "parameters_here": self.root.parameters_here, "flops": self._flops(self.macs),
                "flops_here": self._flops(self.macs_here), "backward_is_estimated": self.backward_is_estimated,
                "outside_of_modules": _flops(self.outside),
                "seconds": dict(self.parts), "seconds_of_step_before": self.step_before,
                "not_counted": dict(self.unknown), "modules": _plain(self.root)}

    def _flops(self, macs: Macs) -> dict[str, int]:
        """With the estimate in place of a backward that was not seen."""
        counted = _flops(macs)
        if self.backward_is_estimated:
            counted["backward"] = round(self.backward_in_forwards * counted["forward"])
        return counted


def walk(row: Row, depth: int = 0) -> Iterator[tuple[int, Row]]:
    """Depth, row; from the top."""
    yield depth, row
    for inner in row.rows:
        yield from walk(inner, depth + 1)


def profile_of(recording: Recording, **said: Any) -> Profile:
    """`said` are the other fields of a Profile."""
    recording.settle()
    tp = tensor_parallel_size(recording.root.module)
    return Profile(_row(recording.root, tp), _macs(recording.outside), dict(recording.seconds),
                   unknown=recording.unknown, saw_backward=recording.saw_backward, **said)


def _row(node: Node, tp: int) -> Row:
    rows = tuple(_row(child, tp) for child in node.children)
    own = _macs(node)
    return Row(node.path, node.kind, sum(logical_numel(p, tp) for p in node.parameters),
               sum(p.numel() for p in node.parameters),
               _total([own.times(tp if node.is_split else 1), *(row.macs for row in rows)]),
               _total([own, *(row.macs_here for row in rows)]), node.calls,
               node.seconds if node.calls else sum(row.seconds for row in rows), rows)


def _macs(node: Node) -> Macs:
    return Macs(node.macs[Phase.FORWARD], node.macs[Phase.BACKWARD], node.macs[Phase.AGAIN])


def _total(macs: Sequence[Macs]) -> Macs:
    return sum(macs, Macs())


def _flops(macs: Macs) -> dict[str, int]:
    return {name: FLOPS_PER_MAC * count for name, count in asdict(macs).items()}


def _plain(row: Row) -> dict[str, Any]:
    return {"name": row.name, "path": row.path, "class": row.kind, "parameters": row.parameters,
            "parameters_here": row.parameters_here, "macs": asdict(row.macs), "flops": _flops(row.macs),
            "flops_here": _flops(row.macs_here), "calls": row.calls, "seconds": row.seconds,
            "forward_flops_per_second": row.flops_per_second, "modules": [_plain(inner) for inner in row.rows]}
