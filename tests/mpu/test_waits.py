"""Two numbers say whether this process is in an exchange, and how many it has begun."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from mpu import collective_tracker
from mpu.collective_tracker import CollectiveState


@pytest.fixture
def numbers() -> Iterator[memoryview]:
    """This process's: (state, exchanges begun)."""
    with patch.object(collective_tracker, "_COUNTERS", [memoryview(array("Q", [0, 0]))]):
        shown = memoryview(array("Q", [9, 9]))
        collective_tracker.write_counters_to(shown)
        yield shown


def test_an_exchange_is_marked_while_it_lasts_and_counted(numbers: memoryview) -> None:
    inside = []
    exchange, send = (mark(lambda: inside.append(list(numbers)))
                      for mark in (collective_tracker.track_collective, collective_tracker.track_async_collective))
    exchange()
    send()
    collective_tracker.mark_waiting()
    inside.append(list(numbers))
    collective_tracker.mark_idle()
    assert inside == [[CollectiveState.WAITING, 1], [CollectiveState.LAUNCHING, 2],
                      [CollectiveState.WAITING, 2]]
    assert list(numbers) == [0, 2]


def test_an_error_that_comes_out_of_an_exchange_leaves_the_mark_until_the_next(numbers: memoryview) -> None:
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError):
        collective_tracker.track_collective(fail)()
    assert list(numbers) == [CollectiveState.WAITING, 1]
    collective_tracker.track_collective(lambda: None)()
    assert list(numbers) == [0, 2]


def test_numbers_go_on_where_they_are_shown_from_now_on(numbers: memoryview) -> None:
    collective_tracker.track_collective(lambda: None)()
    collective_tracker.mark_waiting()
    elsewhere = memoryview(array("Q", [0, 0]))
    collective_tracker.write_counters_to(elsewhere)
    collective_tracker.mark_idle()
    assert list(elsewhere) == [0, 1] and list(numbers) == [CollectiveState.WAITING, 1]
