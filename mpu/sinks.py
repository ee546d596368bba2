"""Where an operation may write a weight gradient by itself, instead of handing autograd a new tensor.

The gradient of a token table is the largest tensor of a step, and a tied table gets two of them: one dense from the
loss, one that touches a few rows from the lookup. An operation that knows the place of the gradient writes the first
there and adds the second to it, and returns None to autograd. Who owns the place (a data-parallel engine, say)
implements `GradSink`; without one nothing changes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradSink(Protocol):
    """The place of one parameter's gradient."""

    def scratch(self) -> Tensor | None:
        """The place itself while nothing has been added to it; a forward may prepare a gradient there, which counts
        only once a backward calls `keep`."""

    def keep(self) -> Tensor:
        """What was written into `scratch` is now the gradient so far."""

    def total(self) -> Tensor:
        """The gradient so far, zeros if there is none, to add to."""
