"""Copies between device and host that overlap computation: one CUDA stream for each direction.

    event = streams.to_host.copy(host_tensor, gradients)    # starts after all work queued on the device so far
    event.wait_on_device()                                  # work queued from now on runs after the copy
    event.wait_on_host()                                    # the host may read the result, or overwrite the source

`GradOffloader` copies the reduced gradients of a bucket to the host while backward runs, and takes their row norms
first. `StagingDoubleBuffer` is a pair of buffers for updated weights that are copied to the other side. Tests also give
a CPU device copy streams, which copy at once or as late as allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.zero.offload.direct_io import page_aligned_zeros
from mpu.device import on_accelerator
from mpu.grads import NORM_ROW, row_norms

# Device tensors that pending copies of a stream may hold; beyond this the device waits for the oldest copy.
MAX_UNJOINED_SOURCES = 2


class CopyEvent:
    """The completion of a copy; of this class, of one that is done."""

    def wait_on_device(self) -> None:
        """Work queued on the device from now on runs after the copy; the host does not block."""

    def wait_on_host(self) -> None:
        """Block the host until the copy is done."""


class CopyStream:
    """One direction; its copies run in the order they were requested. This class copies at once: in tests it is the
    stream of a CPU treated as an accelerator."""

    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        """out <- source, of equal dtype, one of them on the host (page-locked for speed). The copy starts after the
        work queued on the device so far and after the events in `after`. Until `wait_on_device` or `wait_on_host`,
        `out` must not be touched and `source` must not be written; a device `source` may be freed."""
        out.copy_(source)
        return CopyEvent()

    def collectives_after_copies(self) -> AbstractContextManager[None]:
        """Collectives issued inside run after the copies of this stream; the device does not wait for the copies."""
        return nullcontext()


@dataclass(frozen=True)
class CopyStreams:
    """The two directions between one device and the host."""

    to_device: CopyStream
    to_host: CopyStream


def create_copy_streams(device: torch.device) -> CopyStreams | None:
    """None if the device is the host."""
    if device.type == "cuda":
        return CopyStreams(_CudaCopyStream(device), _CudaCopyStream(device))
    return CopyStreams(CopyStream(), CopyStream()) if on_accelerator(device) else None


class _CudaCopyStream(CopyStream):
    """Holds a reference to each source until the device has waited for its copy. The caching allocator would reuse
    freed memory earlier, and with `record_stream` it would not reuse it until the host polls the event."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held_sources: deque[tuple[Tensor, _CudaCopyEvent]] = deque()

    def copy(self, out: Tensor, source: Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        assert out.dtype == source.dtype, "a copy that converts would go through memory of its own"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            if isinstance(event, _CudaCopyEvent):
                self._stream.wait_event(event.event)
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)
        event = _CudaCopyEvent(self._stream.record_event(), self._device, self)
        if source.is_cuda:
            self._held_sources.append((source, event))
            if len(self._held_sources) > MAX_UNJOINED_SOURCES:
                self._held_sources[0][1].wait_on_device()
        return event

    def release_sources(self, event: _CudaCopyEvent) -> None:
        """Drop the sources of all copies up to this event."""
        if any(held is event for _, held in self._held_sources):
            while self._held_sources.popleft()[1] is not event:
                pass

    @contextmanager
    def collectives_after_copies(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


@dataclass(frozen=True)
class _CudaCopyEvent(CopyEvent):
    event: torch.cuda.Event
    device: torch.device
    stream: _CudaCopyStream

    def wait_on_device(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        self.stream.release_sources(self)

    def wait_on_host(self) -> None:
        self.event.synchronize()
        self.stream.release_sources(self)


class StagingDoubleBuffer:
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | None, *, pinned: bool = False) -> None:
        """Buffers on `device`, copied to the host; or with None on the host, copied to the device."""
        self._from_host = device is None
        # With the copy of each; the buffer that was sent first comes first.
        self._buffers = deque((page_aligned_zeros(size, dtype, pinned=pinned) if device is None else
                               torch.empty(size, dtype=dtype, device=device), CopyEvent()) for _ in range(2))

    def acquire(self, count: int) -> Tensor:
        """[count] of the buffer that was sent first, after its copy is done. The caller owns it until `mark_sent`."""
        buffer, copy = self._buffers[0]
        if self._from_host:
            copy.wait_on_host()
        else:
            copy.wait_on_device()
        return buffer[:count]

    def mark_sent(self, copy: CopyEvent) -> None:
        self._buffers.append((self._buffers.popleft()[0], copy))


class GradOffloader:
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, copy_streams: CopyStreams, *,
                 pinned: bool) -> None:
        self._copy_streams, self._pinned = copy_streams, pinned
        self._sums = page_aligned_zeros(numel, dtype, pinned=pinned)
        self._row_norms = torch.zeros(numel // NORM_ROW, device=device)
        self._spare_sums: Tensor | None = None
        self._last_copy: CopyEvent | None = None
        self._prefetched: tuple[Tensor, CopyEvent] | None = None
        self._version = self._sums._version

    def prefetch_sums(self) -> None:
        """The next `offload` adds to the sums on the host: start to copy them to the device."""
        before = torch.empty(len(self._sums), dtype=self._sums.dtype, device=self._row_norms.device)
        self._prefetched = before, self._copy_streams.to_device.copy(
            before, self._sums, [self._last_copy] if self._last_copy is not None else [])

    def offload(self, grads: Tensor) -> CopyEvent:
        """sums <- grads, plus the prefetched sums. The device may overwrite `grads` after the event."""
        if self._prefetched is not None:
            (before, arrival), self._prefetched = self._prefetched, None
            arrival.wait_on_device()
            grads = before.add_(grads)
        row_norms(grads, self._row_norms)
        self._last_copy = self._copy_streams.to_host.copy(self._sums, grads)
        self._version = self._sums._version
        return self._last_copy

    def cancel_prefetch(self) -> None:
        """The prefetched sums are not needed: no gradients follow."""
        if self._prefetched is not None:
            self._prefetched[1].wait_on_device()
            self._prefetched = None

    def detach_sums(self) -> Tensor:
        """The sums, owned by the caller until the next call; the next step accumulates into the spare buffer."""
        sums = self.sums
        if self._spare_sums is None:
            self._spare_sums = page_aligned_zeros(len(sums), sums.dtype, pinned=self._pinned)
        self._sums, self._spare_sums, self._last_copy = self._spare_sums, sums, None
        return sums

    @property
    def sums(self) -> Tensor:
        """The host tensor, after its copy is done. Changing it changes the gradients."""
        if self._last_copy is not None:
            self._last_copy.wait_on_host()
        return self._sums

    def row_norms(self, out: Tensor) -> None:
        """out <- `mpu.grads.row_norms` of the sums, on the device."""
        if self._sums._version != self._version:  # the user edited gradients on the host
            self._row_norms.copy_(row_norms(self.sums))
            self._version = self._sums._version
        out.copy_(self._row_norms)
