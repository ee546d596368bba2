"""Two numbers say whether this process is in an exchange, and how many it has begun."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from mpu.wire import waits


@pytest.fixture
def numbers() -> Iterator[memoryview]:
    """This process's: (state, exchanges begun)."""
    with patch.object(waits, "_NUMBERS", [memoryview(array("Q", [0, 0]))]):
        shown = memoryview(array("Q", [9, 9]))
        waits.show_in(shown)
        yield shown


def test_an_exchange_is_marked_while_it_lasts_and_counted(numbers: memoryview) -> None:
    inside = []
    exchange, send = (mark(lambda: inside.append(list(numbers))) for mark in (waits.exchanging, waits.sending))
    exchange()
    send()
    waits.begin()
    inside.append(list(numbers))
    waits.end()
    assert inside == [[waits.WAITING, 1], [waits.SENDING, 2], [waits.WAITING, 2]]
    assert list(numbers) == [0, 2]


def test_an_error_that_comes_out_of_an_exchange_leaves_the_mark_until_the_next(numbers: memoryview) -> None:
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError):
        waits.exchanging(fail)()
    assert list(numbers) == [waits.WAITING, 1]
    waits.exchanging(lambda: None)()
    assert list(numbers) == [0, 2]


def test_numbers_go_on_where_they_are_shown_from_now_on(numbers: memoryview) -> None:
    waits.exchanging(lambda: None)()
    waits.begin()
    elsewhere = memoryview(array("Q", [0, 0]))
    waits.show_in(elsewhere)
    waits.end()
    assert list(elsewhere) == [0, 1] and list(numbers) == [waits.WAITING, 1]
