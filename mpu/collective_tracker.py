"""Tracks whether this process is inside a collective, and how many it has started: two numbers for the watchdog.

A rank that waits is not the culprit of a hang. A collective that raises leaves its state in place. Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CollectiveState(IntEnum):
    IDLE = 0
    LAUNCHING = 1
    WAITING = 2  # for other ranks


class CollectiveCounters(Protocol):
    """Two integers: the CollectiveState, and the number of collectives that this rank has started."""

    def __getitem__(self, place: int) -> int: ...

    def __setitem__(self, place: int, number: int) -> None: ...


# The counters of this process: [state, collectives started].
_COUNTERS: list[CollectiveCounters] = [memoryview(array("Q", [0, 0]))]


def write_counters_to(counters: CollectiveCounters) -> None:
    """Move the counters to another memory, such as the launcher's shared file."""
    counters[0], counters[1] = _COUNTERS[0][0], _COUNTERS[0][1]
    _COUNTERS[0] = counters


def current_counters() -> CollectiveCounters:
    return _COUNTERS[0]


def mark_waiting() -> None:
    _COUNTERS[0][0] = CollectiveState.WAITING


def mark_idle() -> None:
    _COUNTERS[0][0] = CollectiveState.IDLE


def is_waiting() -> bool:
    return bool(_COUNTERS[0][0] == CollectiveState.WAITING)


def track_collective(collective: Callable[P, T], state: CollectiveState = CollectiveState.WAITING) -> Callable[P, T]:
    """Wrap a function that runs one collective, or (state LAUNCHING) starts one without waiting."""
    @wraps(collective)
    def tracked(*args: P.args, **kwargs: P.kwargs) -> T:
        counters = _COUNTERS[0]
        counters[1] += 1
        counters[0] = state
        # No try: after an exception the state stays, so that the launcher sees where this rank was.
        result = collective(*args, **kwargs)
        counters[0] = CollectiveState.IDLE
        return result
    return tracked


def track_async_collective(collective: Callable[P, T]) -> Callable[P, T]:
    return track_collective(collective, CollectiveState.LAUNCHING)
