"""Where an operation may write a weight gradient by itself, instead of handing autograd a new tensor.

The gradient of a token table is the largest tensor of a step, and a tied table gets two of them: one dense from the
loss, one that touches a few rows from the lookup. An operation that knows the place of the gradient writes the first
there, when its forward runs, and adds the second to it in backward; it returns None to autograd. Who owns the place (a
data-parallel engine, say) implements `MainGrad`; without one nothing changes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class MainGradReservation(Protocol):
    """A gradient that a forward prepares in its place before it is known to count."""

    @property
    def buffer(self) -> Tensor:
        """Where to write it; for the forward that made the claim only, as the owner may move it away afterwards."""

    def commit(self, scale: Tensor | None = None) -> None:
        """It counts, times `factor`: the backward of that forward has come. Once."""


class MainGrad(Protocol):
    """The place of one parameter's gradient."""

    def reserve(self) -> MainGradReservation | None:
        """The place itself; None where there is a gradient already."""

    def accumulated(self) -> Tensor:
        """The gradient so far, zeros if there is none, to add to."""
