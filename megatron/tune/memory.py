"""Memory of a rank by place: what a choice needs, and what there is.

A trial that found no memory does not say in which place. So it rules out what needs as much in both; one that keeps
less on the host may run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.plan.footprint import Run
from megatron.plan.memory import peak
from megatron.plan.remedies import size


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    device: float
    """Of a GPU, or of the CPU where that is the device."""
    host: float = 0.0
    """Beside a GPU."""

    def __str__(self) -> str:
        return size(int(self.device)) + (f" of the GPU and {size(int(self.host))} of the host" if self.host else "")

    def holds(self, other: Memory) -> bool:
        return other.device <= self.device and other.host <= self.host

    def share_of(self, room: Memory) -> float:
        """Of the place that is the tightest; more than 1 where this does not fit."""
        return max(self.device / max(room.device, 1.0), self.host / max(room.host, 1.0))


def needed_by(run: Run) -> Memory:
    """At the fullest moment of the device."""
    return Memory(peak(run).total, run.elsewhere.host)


def nearest(needs: Iterable[Memory], room: Memory) -> Memory:
    """That of the choice which lacks least."""
    return min(needs, key=lambda one: one.share_of(room))
