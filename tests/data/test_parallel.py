"""The map over processes keeps the order and hangs on no dead worker; `call_within` gives the result or the error of a
function, within bounds of time and memory that end it even in C."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.parallel import MAX_PENDING_PER_WORKER, call_within, ordered_map
from data.storage import DataError, ResumableError


def _pid_or_die(item: int) -> int:
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def _refuse(item: int) -> int:
    raise DataError(f"item {item}")


def test_the_map_keeps_order_and_passes_errors_on() -> None:
    assert list(ordered_map(abs, range(-7, 0), workers=3)) == [7, 6, 5, 4, 3, 2, 1]
    assert list(ordered_map(abs, [], workers=2)) == [] and list(ordered_map(abs, [-1], workers=3)) == [1]
    with pytest.raises(DataError, match="item 0"):
        list(ordered_map(_refuse, range(9), workers=2))


def _number(item: tuple[int, Path]) -> int:
    """The first item is done when the last one that is given out beside it is."""
    number, reached = item
    end = time.monotonic() + 30
    while number == 0 and not reached.exists():
        assert time.monotonic() < end, "nobody goes on"
        time.sleep(0.01)
    if number == 2 * MAX_PENDING_PER_WORKER:
        reached.touch()
    return number


def test_the_map_gives_the_next_item_to_whoever_is_free_and_waits_for_the_slow_one(tmp_path: Path) -> None:
    taken: list[int] = []

    def items() -> Iterator[tuple[int, Path]]:
        for number in range(100):
            taken.append(number)
            yield number, tmp_path / "reached"

    results = ordered_map(_number, items(), workers=2)
    assert next(results) == 0
    assert len(taken) == 2 * MAX_PENDING_PER_WORKER + 1, (
        "the other worker went on while the first one waited, but not without end")
    assert list(results) == list(range(1, 100))


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    with pytest.raises(ResumableError, match="a worker process died"):  # so what was done is kept
        list(ordered_map(_pid_or_die, range(100), workers=2))


def endless(_: object) -> object:
    return re.match("(a|a)*b", "a" * 100)


def crash(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def open_files(_: object) -> int:
    return sum(os.path.exists(f"/proc/self/fd/{number}") for number in range(1000))


def test_results_and_errors_are_those_of_the_function() -> None:
    assert call_within(len, "x" * 1_000_000, 10, 1 << 30) == 1_000_000
    with pytest.raises(ZeroDivisionError):
        call_within((1).__truediv__, 0, 10, 1 << 30)


def test_what_needs_more_gives_none_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    children, fork = list[int](), os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(child := fork()) or child)
    assert call_within(endless, None, 0.1, 1 << 30) is None
    assert call_within(crash, None, 10, 1 << 30) is None
    with pytest.raises(MemoryError):
        call_within(bytes, 1 << 30, 10, 1 << 28)
    assert len(children) == 3 and not any(Path(f"/proc/{child}").exists() for child in children)


def test_files_of_the_caller_are_closed(tmp_path: Path) -> None:
    """So that a lock goes with the process that holds it."""
    with (tmp_path / "lock").open("w"):
        assert call_within(open_files, None, 10, 1 << 30) == 1  # the pipe
