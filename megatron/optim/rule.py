"""What an optimizer is to the engine: a rule that updates spans of flat shards.

A *span* is a contiguous part of a bucket's shard whose parameters share one set of hyper-parameters (`hyper`: the
entries of a torch param group but its parameters: lr, weight_decay, betas, ...). Masters and states are fp32. The
gradient may be 16 bit; it is spent afterwards, so a rule may write into it. `factor` is what the gradient must be
multiplied by: unscaling, averaging and clipping are one number.

An elementwise rule needs nothing else. One that looks at whole parameters (Lamb) finds their borders in `parts`, and
`total` adds up per-parameter sums over the ranks; it is called for every group of every bucket on every rank, be the
span empty there or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


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

    def step(self, span: Span, hyper: Mapping[str, Any], *, factor: float, steps_taken: int) -> None:
        """Update the span after `steps_taken` steps before this one."""

    def scalars(self) -> dict[str, Any]:
        """State other than tensors, as JSON values; what `restore` is given."""

    def restore(self, scalars: Mapping[str, Any]) -> None: ...
