"""Copies between the device and the host that run beside the computation.

    mark = ferry.down.copy(on_host, gradients)    # begins once the device has done all that it was asked so far
    mark.join()                                   # what the device is asked from now on comes after the copy
    mark.wait()                                   # the host may read what came, or write where it came from

A GPU has a stream for each of the two ways. A device that is its own host needs no ferry; in tests of the accelerator's
side a CPU has one, which copies at once, or as late as it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mpu.device import on_accelerator


HELD = 2
"""Copies from the device that a stream may be behind, before the device waits."""


class Mark(Protocol):
    """A copy under way."""

    def join(self) -> None:
        """The device goes on after it; the host does not wait."""

    def wait(self) -> None:
        """The host waits for it."""

    def done(self) -> bool:
        """`wait` returns at once."""


class Lane(Protocol):
    """One of the ways; copies on it are made in the order they were asked for."""

    def copy(self, out: Tensor, source: Tensor, after: Sequence[Mark] = ()) -> Mark:
        """out <- source, of one type, one of them on the host and best page-locked. It begins when the device has done
        what it was asked so far, and those `after` have ended. Nobody touches `out`, or writes to `source`, until they
        have joined or waited; `source` on the device may be freed."""

    def leading(self) -> AbstractContextManager[None]:
        """Inside, collectives come after the copies on this lane, and the device does not wait for those."""


@dataclass(frozen=True)
class Ferry:
    """Between one device and the host."""

    up: Lane
    """To the device."""
    down: Lane


def ferry_for(device: torch.device) -> Ferry | None:
    """None where the device is the host."""
    if device.type == "cuda":
        return Ferry(_Stream(device), _Stream(device))
    return Ferry(AtOnce(), AtOnce()) if on_accelerator(device) else None


# -- a GPU ---------------------------------------------------------------------------------------------------------


class _Stream:
    """What is copied from is held until the device has gone on after the copy: torch gives memory that was freed to
    others, and `record_stream`, which keeps it from that, keeps it until the host looks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held: deque[tuple[Tensor, _Event]] = deque()

    def copy(self, out: Tensor, source: Tensor, after: Sequence[Mark] = ()) -> Mark:
        assert out.dtype == source.dtype, "a copy that converts would go through memory of its own"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for mark in after:
            if isinstance(mark, _Event):
                self._stream.wait_event(mark.event)
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
        mark = _Event(self._stream.record_event(), self._device, self)
        if source.is_cuda:
            self._held.append((source, mark))
            if len(self._held) > HELD:
                self._held[0][1].join()
        return mark

    def let_go(self, last: _Event) -> None:
        """Of what the copies up to this one came from."""
        if any(mark is last for _, mark in self._held):
            while self._held.popleft()[1] is not last:
                pass

    @contextmanager
    def leading(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


@dataclass(frozen=True)
class _Event:
    event: torch.cuda.Event
    device: torch.device
    lane: _Stream

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        self.lane.let_go(self)

    def wait(self) -> None:
        self.event.synchronize()
        self.lane.let_go(self)

    def done(self) -> bool:
        is_over: bool = self.event.query()
        return is_over


# -- the CPU, as an accelerator of its own -------------------------------------------------------------------------


class AtOnce:
    def copy(self, out: Tensor, source: Tensor, after: Sequence[Mark] = ()) -> Mark:
        out.copy_(source)
        return _OVER

    @contextmanager
    def leading(self) -> Iterator[None]:
        yield


class _Over:
    def join(self) -> None:
        pass

    wait = join

    def done(self) -> bool:
        return True


_OVER = _Over()
