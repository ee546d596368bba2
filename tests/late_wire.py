"""A wire on which everything happens as late as it may, or at a random earlier moment: whoever forgets to wait is seen.

    with late_wire(seed=0): ...        on every rank, with the same seed

Between its start and its end an operation has done nothing, and its destination is full of NaN: whatever is computed
from it is NaN too. At the end the destination must still be so, the sources must have the numbers that they had, and no
storage may have moved or changed its size. At each start and each wait, operations under way end in a random order, the
same on all ranks; one that is never waited for is an error at the end. Then the real wire takes over at once.

What is read is not seen directly, only what it leads to. Waits of functional collectives are torch's.

    with timed_wire({"all_reduce": 1.0}) as clock: ...

The same program on an accelerator with a clock: `clock.now` is the time of its stream of computation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter

from mpu import collectives
from mpu.collectives import CollectiveBackend, CollectiveWork, Op
from mpu.groups import Group


class Late(CollectiveWork):
    """An operation under way. `places` are destinations: they are spoilt, and put right before `begin` runs it."""

    def __init__(self, network: Network, what: str, begin: Callable[[], CollectiveWork], sources: list[Tensor],
                 places: list[Tensor]) -> None:
        super().__init__()
        self._network, self._what, self._begin = network, what, begin
        self._places, self._before = places, [place.clone() for place in places]
        for place in places:
            write(place, torch.full_like(place, poison_of(place.dtype)))
        self._sources, self._given = sources, [bits(source).clone() for source in sources]
        self._spoilt = [bits(place).clone() for place in places]
        self._memory = [(x, x.data_ptr(), x.untyped_storage().nbytes()) for x in (*sources, *places)]
        self.is_done = False

    def wait(self) -> None:
        self._network.end_some(self)
        self._check("after it", self._arrived)
        self._network.under_way = [other for other in self._network.under_way if other is not self]

    def end(self) -> None:
        """What the network does, at a moment of its own."""
        if not self.is_done:
            self._check("under way", self._spoilt)
            for place, before in zip(self._places, self._before):
                write(place, before)
            self._begin().wait()
            self._given = [bits(source).clone() for source in self._sources]  # a place may be part of one
            self._arrived = [bits(place).clone() for place in self._places]
            self.is_done = True

    def _check(self, when: str, wanted: list[Tensor]) -> None:
        for x, pointer, size in self._memory:
            assert (x.data_ptr(), x.untyped_storage().nbytes()) == (pointer, size), f"{self._what}: memory moved {when}"
        for source, given in zip(self._sources, self._given):
            assert torch.equal(bits(source), given), f"{self._what}: a source was written to {when}"
        for place, expected in zip(self._places, wanted):
            assert torch.equal(bits(place), expected), f"{self._what}: a destination was written to {when}"


class Network:
    """What is under way on this rank, in the order it was started in."""

    def __init__(self, seed: int) -> None:
        self.under_way: list[Late] = []
        self.log: list[str] = []
        self._random = random.Random(seed)

    def start(self, what: str, begin: Callable[[], CollectiveWork], sources: list[Tensor],
              places: list[Tensor]) -> CollectiveWork:
        self.end_some()
        operation = Late(self, what, begin, sources, places)
        self.under_way.append(operation)
        self.log.append(what)
        return operation

    def end_some(self, needed: Late | None = None) -> None:
        """Some of the operations under way, `needed` among them, in a random order."""
        chosen = [other for other in self.under_way if other is needed or self._random.random() < 0.25]
        self._random.shuffle(chosen)
        for other in chosen:
            other.end()


class LateWire:
    def __init__(self, wire: CollectiveBackend, network: Network) -> None:
        self._wire, self._network = wire, network

    def all_gather(self, full: Tensor, shard: Tensor, group: Group, at_a_time: int | None) -> CollectiveWork:
        parts = full.view(group.size, -1)
        is_part = parts[group.rank].data_ptr() == shard.data_ptr()
        places = [part for rank, part in enumerate(parts) if not (is_part and rank == group.rank)]
        return self._network.start(f"all-gather of {full.numel()}", lambda: self._wire.all_gather(
            full, shard, group, at_a_time), [shard], places)

    def reduce_scatter(self, shard: Tensor, full: Tensor, group: Group, sum_in: torch.dtype | None,
                       at_a_time: int | None) -> CollectiveWork:
        return self._network.start(f"reduce-scatter of {full.numel()}", lambda: self._wire.reduce_scatter(
            shard, full, group, sum_in, at_a_time), [full], [shard])

    def all_reduce(self, flat: Tensor, group: Group, op: Op, sum_in: torch.dtype | None,
                   at_a_time: int | None) -> CollectiveWork:
        return self._network.start(f"all-reduce of {flat.numel()}", lambda: self._wire.all_reduce(
            flat, group, op, sum_in, at_a_time), [], [flat])

    def broadcast(self, x: Tensor, src: int, group: Group) -> CollectiveWork:
        here = group.rank == src
        return self._network.start(f"broadcast of {x.numel()}", lambda: self._wire.broadcast(x, src, group),
                                   [x] if here else [], [] if here else [x])

    def all_to_all(self, received: Tensor, sent: Tensor, group: Group) -> CollectiveWork:
        return self._network.start(f"all-to-all of {sent.numel()}", lambda: self._wire.all_to_all(
            received, sent, group), [sent], [received])


@contextmanager
def late_wire(seed: int = 0) -> Iterator[Network]:
    network, wire_for = Network(seed), collectives.backend_for
    with patch.object(collectives, "backend_for", lambda x: LateWire(wire_for(x), network)):
        yield network
    assert not network.under_way, f"never waited for: {[operation._what for operation in network.under_way]}"


class Clock:
    """What computes adds to `now`. Operations of one process group run one after the other, as on its stream."""

    def __init__(self) -> None:
        self.now, self.free_at = 0.0, Counter[str]()

    def start(self, group: Group, seconds: float) -> Callable[[], None]:
        """An operation that is started now; what is returned waits for it."""
        end = self.free_at[str(group.name)] = max(self.now, self.free_at[str(group.name)]) + seconds

        def wait() -> None:
            self.now = max(self.now, end)

        return wait


@contextmanager
def timed_wire(seconds: Mapping[str, float]) -> Iterator[Clock]:
    """Operations take these seconds, by their names in CollectiveBackend; others take none."""
    clock, wire_for = Clock(), collectives.backend_for

    class TimedWire:
        def __init__(self, wire: CollectiveBackend) -> None:
            self._wire = wire

        def __getattr__(self, kind: str) -> Callable[..., CollectiveWork]:
            def start(*args: Any) -> CollectiveWork:
                group = next(value for value in args if isinstance(value, Group))
                return CollectiveWork([getattr(self._wire, kind)(*args)], clock.start(group, seconds.get(kind, 0.0)))
            return start

    with patch.object(collectives, "backend_for", lambda x: TimedWire(wire_for(x))):
        yield clock


# -- also of late_copy_streams.py ------------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def poison_of(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 77


def write(place: Tensor, values: Tensor) -> None:
    """As a network or a stream does, behind the back of autograd and of whoever counts writes."""
    assert place.untyped_storage().nbytes() or not place.numel(), "memory went that something was under way to"
    with torch.no_grad(), _unsafe_preserve_version_counter(place):
        place.copy_(values)
