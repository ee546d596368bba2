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

MAX_UNJOINED_SOURCES = 2
"""Copies from the device that a stream may be behind, before the device waits."""


class CopyEvent(Protocol):
    """A copy under way."""

    def wait_on_device(self) -> None:
        """The device goes on after it; the host does not wait."""

    def wait_on_host(self) -> None:
        """The host waits for it."""

    def is_done(self) -> bool:
        """`wait` returns at once."""


class CopyStream(Protocol):
    """One of the ways; copies on it are made in the order they were asked for."""

    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """out <- source, of one type, one of them on the host and best page-locked. It begins when the device has done
        what it was asked so far, and those `after` have ended. Nobody touches `out`, or writes to `source`, until they
        have joined or waited; `source` on the device may be freed."""

    def collectives_after_copies(self) -> AbstractContextManager[None]:
        """Inside, collectives come after the copies on this lane, and the device does not wait for those."""


@dataclass(frozen=True)
class CopyStreams:
    """Between one device and the host."""

    to_device: CopyStream
    """To the device."""
    to_host: CopyStream


def create_copy_streams(device: torch.device) -> CopyStreams | None:
    """None where the device is the host."""
    if device.type == "cuda":
        return CopyStreams(_CudaCopyStream(device), _CudaCopyStream(device))
    return CopyStreams(SynchronousCopyStream(), SynchronousCopyStream()) if on_accelerator(device) else None


# -- a GPU ---------------------------------------------------------------------------------------------------------


class _CudaCopyStream:
    """What is copied from is held until the device has gone on after the copy: torch gives memory that was freed to
    others, and `record_stream`, which keeps it from that, keeps it until the host looks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held_sources: deque[tuple[Tensor, _CudaCopyEvent]] = deque()

    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        assert out.dtype == source.dtype, "a copy that converts would go through memory of its own"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for mark in after:
            if isinstance(mark, _CudaCopyEvent):
                self._stream.wait_event(mark.event)
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
        mark = _CudaCopyEvent(self._stream.record_event(), self._device, self)
        if source.is_cuda:
            self._held_sources.append((source, mark))
            if len(self._held_sources) > MAX_UNJOINED_SOURCES:
                self._held_sources[0][1].wait_on_device()
        return mark

    def release_sources(self, event: _CudaCopyEvent) -> None:
        """Of what the copies up to this one came from."""
        if any(mark is event for _, mark in self._held_sources):
            while self._held_sources.popleft()[1] is not event:
                pass

    @contextmanager
    def collectives_after_copies(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


@dataclass(frozen=True)
class _CudaCopyEvent:
    event: torch.cuda.Event
    device: torch.device
    stream: _CudaCopyStream

    def wait_on_device(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        self.stream.release_sources(self)

    def wait_on_host(self) -> None:
        self.event.synchronize()
        self.stream.release_sources(self)

    def is_done(self) -> bool:
        is_complete: bool = self.event.query()
        return is_complete


# -- the CPU, as an accelerator of its own -------------------------------------------------------------------------


class SynchronousCopyStream:
    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        out.copy_(source)
        return _COMPLETED_COPY

    @contextmanager
    def collectives_after_copies(self) -> Iterator[None]:
        yield


class _CompletedCopy:
    def wait_on_device(self) -> None:
        pass

    wait_on_host = wait_on_device

    def is_done(self) -> bool:
        return True


_COMPLETED_COPY = _CompletedCopy()
