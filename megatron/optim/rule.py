"""What an optimizer is to the engine: a rule that updates spans of flat shards.

A *span* is a contiguous part of a bucket's shard whose parameters share one set of hyper-parameters (`hyper`: the
entries of a torch param group but its parameters: lr, weight_decay, betas, ...). Masters and states are fp32. The
gradient may be 16 bit; it is spent afterwards, so a rule may write into it. `factor` is what the gradient must be
multiplied by: unscaling, averaging and clipping are one number.

Whether a step is to be taken at all, and the factor, follow from a norm that the device has just computed. A rule that
takes them from there as tensors (`StepScalars`) need not wait for it; `OneByOne` is for those that want numbers.

An elementwise rule needs nothing else. One that looks at whole parameters (Lamb) finds their borders in `parts`, and
`total` adds up per-parameter sums over the ranks; it is called for every group of every bucket on every rank, be the
span empty there or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mpu.groups import Group


ParamGroup = dict[str, Any]
"""As torch's optimizers have them: "params", and the hyper-parameters these share ("lr" is one of them)."""


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a span are of the parameter number `slot` of the bucket."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class Span:
    """One piece of work for a rule; the tensors are one-dimensional, of one length, and updated in place."""

    group: int
    """Number of the hyper-parameter group."""
    master: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    parts: Sequence[Part]
    slots: int
    """Parameters of the bucket: the length of what `total` takes."""
    total: Callable[[Tensor], Tensor]
    """[slots] sums over this rank's parts -> sums over whole parameters. Collective."""
    narrow: Tensor | None = None
    """Where the new weights are wanted in 16 bits, if that is on the same device. Only `step_many` may write there."""


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step, as 0-dimensional fp32 tensors on the device of the spans."""

    count: Tensor
    """Steps behind the states once this one is taken."""
    divisor: Tensor | None = None
    """1 / factor; None where the gradients are right as they are."""
    skip: Tensor | None = None
    """1 where nothing is to change, 0 otherwise; None where the step is known to be taken."""

    @staticmethod
    def of(factor: float, steps_taken: int, device: torch.device) -> StepScalars:
        """For a step that is known to be taken."""
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=device)
        return StepScalars(torch.full((), float(steps_taken + 1), device=device), divisor)


class Rule(Protocol):
    """`states` names the tensors kept beside each weight."""

    @property
    def name(self) -> str:
        """What kind of optimizer this is; states of one kind mean nothing to another."""

    @property
    def states(self) -> tuple[str, ...]: ...

    @property
    def elementwise(self) -> bool:
        """Spans may be cut anywhere, and empty ones left out."""

    @property
    def waits(self) -> bool:
        """It wants the numbers of a step on the host: `step_many` raises."""

    def settle_on(self, device: torch.device, world: Group) -> None:
        """Choose how spans on `device` are updated, where that is a choice: alike on all ranks, or copies of one weight
        would drift apart. Collective."""

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        """Update the span after `steps_taken` steps before this one."""

    def step_many(self, spans: Sequence[Span], hyper: Mapping[str, Any], at: StepScalars) -> bool:
        """Update spans of one hyper-parameter group, at least one, with as few operations as can be. True: the new
        weights are in `narrow` too. False: whoever wants them there copies them."""

    def scalars(self) -> dict[str, Any]:
        """State other than tensors, as JSON values; what `restore` is given."""

    def restore(self, scalars: Mapping[str, Any]) -> None: ...


class OneByOne:
    """Part of a rule that steps one span after the other, by numbers on the host."""

    waits = True

    def settle_on(self, device: torch.device, world: Group) -> None:
        """There is one way."""

    def step_many(self, spans: Sequence[Span], hyper: Mapping[str, Any], at: StepScalars) -> bool:
        raise AssertionError(f"{type(self).__name__} steps one span at a time, by numbers on the host")
