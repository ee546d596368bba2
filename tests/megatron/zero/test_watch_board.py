"""What the watches of many ranks leave each other on the board, without ranks: who reads what, who takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.distributed import exit_codes, watchdog
from megatron.distributed.collective_log import MAX_ENTRIES, CollectiveLog
from megatron.distributed.watchdog import DesyncWatchdog
from megatron.errors import TrainerError
from mpu import store
from mpu.groups import Group, Groups
from mpu.store import StoreKV

QUICK = {"CHECK_SECONDS": 0.01, "POLL_SECONDS": 0.01}


class CountingBoard(StoreKV):
    """Knows which notes were asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked_for: list[str] = []

    def read(self, key: str) -> Any:
        self.asked_for.append(key)
        return super().read(key)

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        self.asked_for += keys
        return super().read_all(keys)


@pytest.fixture(autouse=True)
def one_store() -> Iterator[None]:
    with patch.object(store.distributed_c10d, "_get_default_store", lambda store=dist.HashStore(): store), \
            patch.multiple(watchdog, **QUICK):
        yield


def log_of(*entries: str) -> CollectiveLog:
    log = CollectiveLog(reductions_in_order=True)
    for entry in entries:
        log.record_collective(entry)
    return log


def watch_of(rank: int, world: int, log: CollectiveLog) -> DesyncWatchdog:
    group = Group(rank, world, tuple(range(world)))
    return DesyncWatchdog(log, Groups(group, dp=group), CountingBoard("watch"))


def board_of(watch: DesyncWatchdog) -> CountingBoard:
    assert isinstance(watch._store, CountingBoard)
    return watch._store


def _look_until_told(each: DesyncWatchdog) -> TrainerError:
    while (error := each.compare_logs()) is None:
        pass
    return error


def test_one_rank_collects_the_logs_and_no_other_reads_them() -> None:
    world = 24
    watches = [watch_of(rank, world, log_of("a", "c" if rank == 5 else "b")) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool, \
            patch.multiple(watchdog, REPORTER_POLLS=1000, REPORTER_TIMEOUT_POLLS=1000):
        errors = set(map(str, pool.map(_look_until_told, watches)))
    assert len(errors) == 1
    assert "forever: ranks 0-4, 6-23 are at b, rank 5 is at c; " in errors.pop()
    readers = [each for each in watches if any(key.startswith("rank/") for key in board_of(each).asked_for)]
    assert len(readers) == 1


def test_a_rank_takes_the_place_of_a_reporter_that_has_gone() -> None:
    """It names the fault even where a log has gone on since."""
    far = log_of("b")
    first, second = watch_of(0, 2, far), watch_of(1, 2, log_of("a"))
    assert first.compare_logs() is None
    with patch.multiple(watchdog, REPORTER_TIMEOUT_POLLS=5, REPORTER_POLLS=3):
        with patch.object(watchdog.DesyncWatchdog, "_write_report", lambda self, fault: None):
            assert second.compare_logs() is None  # it has found the fault, and is gone
        for _ in range(2 * MAX_ENTRIES):
            far.record_collective("c")
        error = first.compare_logs()
    assert "rank 0 is at b, rank 1 is at a" in str(error)


def _told_by_itself(each: DesyncWatchdog) -> str:
    """What the thread of the watch ends its rank with."""
    told: list[str] = []

    def leave(code: int) -> None:
        told.append(str(code))
        each._closed.set()

    with patch.multiple(exit_codes, write_error=told.append, exit_now=leave):
        each.start()
        each._thread.join(10)
    assert not each._thread.is_alive()
    return " ".join(reversed(told))


def test_a_rank_that_loses_the_store_when_a_fault_is_known_leaves() -> None:
    first, second = watch_of(0, 2, log_of("a")), watch_of(1, 2, log_of("b"))
    assert first.compare_logs() is None
    with patch.object(board_of(second), "write", side_effect=RuntimeError("the store is gone")):
        assert _told_by_itself(second).startswith("5 the ranks wait for each other forever, and the one that hosts")


@pytest.mark.parametrize("failures, ends", [(watchdog.MAX_FAILED_CHECKS - 1, "2 "), (watchdog.MAX_FAILED_CHECKS, "")])
def test_a_connection_that_fails_now_and_then_is_made_anew(failures: int, ends: str) -> None:
    first, second = watch_of(0, 2, log_of("a")), watch_of(1, 2, log_of("b"))
    assert first.compare_logs() is None
    fails = partial(_fail_until, [RuntimeError("Broken pipe")] * failures, board_of(second).read)
    with patch.object(board_of(second), "read", fails), patch.object(watchdog, "REPORTER_POLLS", 3), \
            patch.object(board_of(second), "reconnect") as reconnect:
        assert _told_by_itself(second)[:2] == ends
    assert reconnect.call_count == watchdog.MAX_FAILED_CHECKS - 1


def _fail_until(errors: list[RuntimeError], read: Callable[[str], Any], key: str) -> Any:
    if errors:
        raise errors.pop()
    return read(key)


@pytest.mark.parametrize("error, told", [
    (ValueError("x"), "rank 0 is at an error of its own, rank 1 is at b"),
    (RuntimeError("Connection closed by peer"), "")])
def test_a_rank_that_fails_by_itself_says_so_before_it_leaves(error: Exception, told: str) -> None:
    first, second = watch_of(0, 2, log_of("a")), watch_of(1, 2, log_of("a", "b"))
    first.start()
    exit_codes.before_failure(first.mark_failed)

    def fail() -> None:
        raise error

    with patch.multiple(exit_codes, has_other_ranks=lambda: True, exit_now=lambda code: None), \
            patch.object(watchdog, "REPORTER_POLLS", 3):
        exit_codes.run(fail, debug=False)
        assert told in str(second.compare_logs()) and (told != "" or second.compare_logs() is None)
    first.close()


class Nothing:
    """In place of an engine."""

    def __init__(self) -> None:
        group = Group(3, 8, tuple(range(8)))
        self.log, self.groups = log_of("a"), Groups(group, dp=group)


def test_a_rank_without_a_watch_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    refused = RuntimeError("Too many open files\nC++ CapturedTraceback:")
    with patch.object(watchdog, "broadcast_json", lambda name, world: name), \
            patch.object(watchdog, "StoreKV", side_effect=refused):
        watchdog.start_watchdog(Nothing())
    assert capfd.readouterr().err == (
        "note: ranks that wait for each other forever end by the time-out only, because rank 3 has no second "
        "connection to the store where they met (Too many open files); see docs/launch.md\n")
