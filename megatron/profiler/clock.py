"""Two ways to time what runs: the host's clock, and marks in the queue of a GPU, which nobody waits for."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class ProfilerClock(Protocol):
    def mark(self) -> Any:
        """The present moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks, once `wait` has returned."""

    def wait(self) -> None:
        """Until everything that was given to the device is done."""


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self) -> None:
        """The host computes while it is asked to."""


class DeviceClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return float(start.elapsed_time(stop)) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def build_clock(device: torch.device) -> ProfilerClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
