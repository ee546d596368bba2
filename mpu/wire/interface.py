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


class CollectiveWork:
    """An operation under way. On an accelerator `wait` makes the current stream wait, never the host."""

    def __init__(self,
                 works: Sequence[Work | CollectiveWork | None] = (),
                 on_complete: Callable[[], object] | None = None,
                 timeout: timedelta | None = None) -> None:
        """`limit`: how long to wait, for works that do not know it themselves."""
        self._works, self._on_complete, self._timeout = works, on_complete, timeout

    def wait(self) -> None:
        """Complete the operation; again: nothing. `finish` (a local sum, a conversion) runs here, once."""
        works, on_complete = self._works, self._on_complete
        self._works, self._on_complete = (), None
        for work in works:
            if isinstance(work, CollectiveWork):
                work.wait()
            elif work is not None:
                waits.mark_waiting()
                work.wait() if self._timeout is None else work.wait(self._timeout)
                waits.mark_idle()
        if on_complete is not None:
            on_complete()


class CollectiveBackend(Protocol):
    """The group has several ranks, and the sizes fit.

    `sum_in` is the precision in which the ranks' numbers are added up where the backend adds them. A wire that
    adds them itself takes fp32 for what is narrower, whatever is asked for. `at_a_time` is how many elements may be on
    their way at once, for a wire that keeps copies of what it receives; others send everything in one piece."""

    def all_gather(self, full: Tensor, shard: Tensor, group: Group, max_in_flight: int | None) -> CollectiveWork:
        """full <- the shards of all ranks in rank order; `shard` may be this rank's part of `full`."""

    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, reduce_dtype: torch.dtype | None,
                       max_in_flight: int | None) -> CollectiveWork:
        """shard <- this rank's part of the sum of every rank's `full`; see collectives.reduce_scatter_into."""

    def all_reduce(self, flat: Tensor, group: Group, op: Op, reduce_dtype: torch.dtype | None,
                   max_in_flight: int | None) -> CollectiveWork:
        """flat <- the reduction of every rank's `flat`."""

    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        """x <- x of the group's rank `src`."""

    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
        """Row k of `received` <- this rank's row of what rank k sent; both are [size, n]."""
