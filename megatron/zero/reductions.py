"""In which order gradients are reduced: one fixed order, whatever order they arrive in, since ranks must agree on it.

It is the order in which backward is expected to finish units: from the last to the first, the root at the end. At most
`in_flight` reductions are under way where parts go to owners or copies are sent, so that few buffers of the exchange
exist at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero.bucket import FlatBucket
from megatron.zero.exchanges import BACKWARD_END, CollectiveLog
from megatron.zero.hooks import Unit


class ReductionOrder:
    def __init__(self, units: Sequence[Unit], max_in_flight: int | None, log: CollectiveLog) -> None:
        backwards = [*reversed(units[1:]), units[0]]
        self._order = [bucket for unit in backwards for bucket in unit.buckets if bucket.trainable]
        self._max_in_flight, self._log = max_in_flight, log
        self._next = 0
        self._ready: set[int] = set()

    def mark_ready(self, bucket: FlatBucket) -> None:
        """All gradients of the bucket have arrived; launch it in its turn, and then those that waited for it."""
        self._ready.add(id(bucket))
        while self._next < len(self._order) and id(self._order[self._next]) in self._ready:
            self._launch()

    def launch_remaining(self) -> None:
        """Launch the rest: buckets with parameters that this backward did not reach."""
        while self._next < len(self._order):
            self._launch()
        self._log.record_barrier(BACKWARD_END)
        self.reset()

    def reset(self) -> None:
        """The next backward begins at the front."""
        self._next = 0
        self._ready.clear()

    def _launch(self) -> None:
        self._order[self._next].grads.start_reduction()
        if self._max_in_flight is not None and self._next >= self._max_in_flight:
            self._order[self._next - self._max_in_flight].grads.wait_for_reduction()
        self._next += 1
