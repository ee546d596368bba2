"""What every wire can do: five operations on flat buffers that the caller owns, each under way when the call returns.

Until `Pending.wait` nothing may write to any of the buffers, nor read a destination. Several operations may be under
way: they are started, and waited for, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from mpu.groups import Group
from mpu.wire import waits

Op = Literal["sum", "max", "min"]


class Pending:
    """An operation under way. On an accelerator `wait` makes the current stream wait, never the host."""

    def __init__(self, works: Sequence[Work | Pending | None] = (), finish: Callable[[], object] | None = None,
                 limit: timedelta | None = None) -> None:
        """`limit`: how long to wait, for works that do not know it themselves."""
        self._works, self._finish, self._limit = works, finish, limit

    def wait(self) -> None:
        """Complete the operation; again: nothing. `finish` (a local sum, a conversion) runs here, once."""
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        for work in works:
            if isinstance(work, Pending):
                work.wait()
            elif work is not None:
                waits.begin()
                work.wait() if self._limit is None else work.wait(self._limit)
                waits.end()
        if finish is not None:
            finish()


class Wire(Protocol):
    """The group has several ranks, and the sizes fit.

    `sum_in` is the precision in which the ranks' numbers are added up where the backend adds them. A wire that
    adds them itself takes fp32 for what is narrower, whatever is asked for. `at_a_time` is how many elements may be on
    their way at once, for a wire that keeps copies of what it receives; others send everything in one piece."""

    def all_gather(self, full: Tensor, shard: Tensor, group: Group, at_a_time: int | None) -> Pending:
        """full <- the shards of all ranks in rank order; `shard` may be this rank's part of `full`."""

    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, sum_in: torch.dtype | None,
                       at_a_time: int | None) -> Pending:
        """shard <- this rank's part of the sum of every rank's `full`; see collectives.reduce_scatter_into."""

    def all_reduce(self, flat: Tensor, group: Group, op: Op, sum_in: torch.dtype | None,
                   at_a_time: int | None) -> Pending:
        """flat <- the reduction of every rank's `flat`."""

    def broadcast(self, x: Tensor, src: int, group: Group) -> Pending:
        """x <- x of the group's rank `src`."""

    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> Pending:
        """Row k of `received` <- this rank's row of what rank k sent; both are [size, n]."""
