"""A ferry between device and host that copies as late as it may: whoever forgets to wait is seen.

    with late_copy_streams() as ferry: ...       inside, engines on the accelerator's side have this one

Between its start and its end a copy has done nothing, and its destination is full of NaN. A copy to the device is made
when the device joins it; until the host has waited for it as well, what it came from must keep its numbers. One to the
host takes what the device has when that joins, and brings it when the host waits, or when another copy comes `after`.
Copies of a lane end in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fsdp import sharding
from megatron.zero.api import offload_plan
from megatron.zero.offload.copy_streams import CopyEvent, CopyStream, CopyStreams
from tests.late_wire import bits, poison_of, write


class LateCopyEvent(CopyEvent):
    def __init__(self, lane: LateCopyStream, out: Tensor, source: Tensor, after: list[LateCopyEvent]) -> None:
        self._lane, self._out, self._source, self._after = lane, out, source, after
        self._taken: Tensor | None = None  # what the device had when it went on
        self.is_made = self.is_joined = self._is_over = False
        for mark in after:
            for earlier in mark._lane.up_to(mark):
                if _place(earlier._source) == _place(out):
                    earlier.take()
        self._behind = lane.other.made()  # whatever the device has joined before it comes to this one
        self._put(torch.full_like(out, poison_of(out.dtype)))

    def wait_on_device(self) -> None:
        for mark in self._lane.up_to(self):
            mark.is_joined = True
            mark.take()

    def wait_on_host(self) -> None:
        for mark in self._lane.up_to(self):
            mark.make()
            mark.end()
            for other in mark._behind:
                other.end()
            mark._lane.forget(mark)

    def take(self) -> None:
        """The device goes on: it may write where a copy to the host comes from, and reads what came to it."""
        if self._lane.ends_on_host:
            if self._taken is None and not self.is_made:
                self._check_source()
                self._taken = self._source.clone()
        else:
            self.make()

    def take_back(self) -> None:
        """What the lane has is not what the device has joined."""
        if not self._lane.ends_on_host and not self.is_joined:
            self._taken, self.is_made = self._out.clone(), False
            self._put(torch.full_like(self._out, poison_of(self._out.dtype)))

    def make(self) -> None:
        if self.is_made:
            return
        for mark in self._after:
            mark.make_all()
        if self._taken is None:
            self._check_source()
        self._put(self._source if self._taken is None else self._taken)
        self.is_made = True
        if not self._lane.ends_on_host:
            self._guarded = bits(self._source).clone()

    def _check_source(self) -> None:
        assert self._source.untyped_storage().nbytes() or not self._source.numel(), \
            "memory went that a copy was still to come from"

    def _put(self, values: Tensor) -> None:
        write(self._out, values)
        self._lane.other.expect_written(self._out)

    def make_all(self) -> None:
        for mark in self._lane.up_to(self):
            mark.make()

    def end(self) -> None:
        """The host knows that it is over."""
        if not self._is_over and not self._lane.ends_on_host:
            assert torch.equal(bits(self._source), self._guarded), "the host wrote where a copy still came from"
        self._is_over = True

    def expect_written(self, place: Tensor) -> None:
        """A copy of the other way has written there, in its turn."""
        if self.is_made and not self._lane.ends_on_host and _place(place) == _place(self._source):
            self._guarded = bits(self._source).clone()


class LateCopyStream(CopyStream):
    other: LateCopyStream

    def __init__(self, name: str) -> None:
        self.name, self.ends_on_host = name, name == "down"
        self._under_way: list[LateCopyEvent] = []
        self.copied = 0
        """Bytes."""

    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        assert out.dtype == source.dtype and out.shape == source.shape
        self.copied += out.nbytes
        mark = LateCopyEvent(self, out, source, [other for other in after if isinstance(other, LateCopyEvent)])
        self._under_way.append(mark)
        return mark

    def up_to(self, mark: LateCopyEvent) -> list[LateCopyEvent]:
        if mark not in self._under_way:
            return []
        return self._under_way[: self._under_way.index(mark) + 1]

    def forget(self, mark: LateCopyEvent) -> None:
        if mark in self._under_way:
            del self._under_way[: self._under_way.index(mark) + 1]

    def made(self) -> list[LateCopyEvent]:
        return [mark for mark in self._under_way if mark.is_made]

    def expect_written(self, place: Tensor) -> None:
        for mark in self._under_way:
            mark.expect_written(place)

    @contextmanager
    def collectives_after_copies(self) -> Iterator[None]:
        for mark in self._under_way:
            mark.take()
        yield
        for mark in self._under_way if not dist.is_initialized() or dist.get_world_size() == 1 else ():
            mark.take_back()  # no collective was there that the device will join


@contextmanager
def late_copy_streams() -> Iterator[CopyStreams]:
    up, down = LateCopyStream("up"), LateCopyStream("down")
    up.other, down.other = down, up
    ferry = CopyStreams(up, down)
    with patch.object(offload_plan, "create_copy_streams", lambda device: ferry), \
            patch.object(sharding, "_copy_streams_of", lambda device: ferry):
        yield ferry


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
