"""The tree of a model's modules with their parameters and counts.

    logical   of the whole model: full parameters, without vocabulary padding
    on rank   of what this rank computes with: its tensor parallel slices
    split     the module, or one inside it, has a tensor parallel parameter

A shared module or parameter is counted once, at its first name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod

from torch import nn

from mpu.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from mpu.partition import partition_of

_PARALLEL = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelEmbedding)


class RunPhase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recomputation"


@dataclass(eq=False)
class ModuleNode:
    """A module and its counts; `macs` are its own, without those of modules inside it."""

    path: str
    module: nn.Module
    own_parameters: list[nn.Parameter] = field(default_factory=list)
    """Without parameters of modules inside it, and without parameters shared with an earlier module."""
    children: list[ModuleNode] = field(default_factory=list)
    macs: dict[RunPhase, int] = field(default_factory=lambda: dict.fromkeys(RunPhase, 0))
    calls: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def class_name(self) -> str:
        return type(self.module).__name__

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Of the module and all inside it."""
        return [*self.own_parameters, *(parameter for child in self.children for parameter in child.parameters)]

    @cached_property
    def is_tensor_parallel(self) -> bool:
        return any(partition_of(parameter) is not None for parameter in self.module.parameters())

    def reset(self) -> None:
        self.macs, self.calls, self.seconds = dict.fromkeys(RunPhase, 0), 0, 0.0


def build_module_tree(model: nn.Module) -> ModuleNode:
    seen, owned = set[nn.Module](), set[nn.Parameter]()

    def build(module: nn.Module, path: str) -> ModuleNode:
        seen.add(module)
        node = ModuleNode(path, module, [one for one in module.parameters(recurse=False) if one not in owned])
        owned.update(node.own_parameters)
        for name, child in module.named_children():
            if child not in seen:
                node.children.append(build(child, f"{path}.{name}" if path else name))
        return node

    return build(model, "")


def walk_nodes(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from walk_nodes(child)


def tensor_parallel_size(model: nn.Module) -> int:
    return max((module.tp.size for module in model.modules() if isinstance(module, _PARALLEL)), default=1)


def logical_numel(parameter: nn.Parameter, tp_size: int) -> int:
    """Elements of the whole parameter."""
    shape, partition = list(parameter.shape), partition_of(parameter)
    if partition is not None:
        whole = shape[partition.dim] * tp_size
        shape[partition.dim] = whole if partition.size is None else partition.size
    return prod(shape)
