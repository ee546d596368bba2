"""Memory of a rank by place: what a choice needs, and what there is.

A trial that found no memory does not say in which place. So it rules out what needs as much in both; one that keeps
less on the host may run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import peak_memory
from megatron.plan.remedies import format_bytes


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes."""

    device: float
    """Of a GPU, or of the CPU where that is the device."""
    host: float = 0.0
    """Beside a GPU."""

    def __str__(self) -> str:
        return format_bytes(int(
            self.device)) + (f" of the GPU and {format_bytes(int(self.host))} of the host" if self.host else "")

    def can_hold(self, other: MemoryBudget) -> bool:
        return other.device <= self.device and other.host <= self.host

    def usage_of(self, budget: MemoryBudget) -> float:
        """Of the place that is the tightest; more than 1 where this does not fit."""
        return max(self.device / max(budget.device, 1.0), self.host / max(budget.host, 1.0))


def memory_needed_by(run: PlannedRun) -> MemoryBudget:
    """At the fullest moment of the device."""
    return MemoryBudget(peak_memory(run).total, run.offloaded_bytes.host)


def least_exceeding(needs: Iterable[MemoryBudget], budget: MemoryBudget) -> MemoryBudget:
    """That of the choice which lacks least."""
    return min(needs, key=lambda one: one.usage_of(budget))
