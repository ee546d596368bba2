"""Without ranks: when the logs of two ranks contradict each other and how that is said; and what the watches of many
ranks leave each other on the board, who reads what and who takes over."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.distributed import exit_codes, watchdog
from megatron.distributed.collective_log import (ENDED, MAX_ENTRIES, NO_ENTRY, SAVE, STEP, CollectiveLog,
                                                 CollectiveLogSnapshot, describe_positions,
                                                 describe_setting_differences, divergence_positions,
                                                 first_diverging_entry, logs_diverged)
from megatron.distributed.rank_text import format_ranks
from megatron.distributed.watchdog import DesyncWatchdog
from megatron.errors import TrainerError
from mpu import store
from mpu.groups import Group, Groups
from mpu.store import StoreKV


def log_of(*entries: str, sums: int = 0, in_order: bool = False) -> CollectiveLog:
    log = CollectiveLog(reductions_in_order=in_order)
    for entry in entries:
        log.purpose = "forward"
        log.record_collective(entry)
    for number in range(sums):
        log.record_reduction(f"block {number}")
    return log


def test_a_log_that_is_only_shorter_contradicts_nothing() -> None:
    everything = [str(number) for number in range(20)]
    for length in range(20):
        short, long = log_of(*everything[:length]).snapshot(0), log_of(*everything).snapshot(1)
        assert not logs_diverged(short, long) and not logs_diverged(long, short)


def test_the_first_difference_is_found_however_long_the_logs_are() -> None:
    for before in (0, 1, MAX_ENTRIES - 1, MAX_ENTRIES, 3 * MAX_ENTRIES + 5):
        common = [str(number % 7) for number in range(before)]
        records = [log_of(*common, "x", "y").snapshot(0), log_of(*common, "x", "z", "y").snapshot(1)]
        assert first_diverging_entry(records) == before + 1
        assert logs_diverged(records[0], records[1]) and logs_diverged(records[1], records[0])
        assert describe_positions(divergence_positions(records)) == "rank 0 is at y (forward), rank 1 is at z (forward)"


def log_ahead(events: str, log: CollectiveLog | None = None) -> CollectiveLog:
    """`+a` gathers block a, `a` runs it, `>` turns to the backward, `|` is a step."""
    log = log or CollectiveLog(reductions_in_order=False)
    log.purpose = "forward"
    for event in events.split():
        name = event.lstrip("+")
        if event == ">":
            log.purpose = "backward"
        elif event == "|":
            log.record_barrier(STEP)
            log.purpose = "forward"
        elif event[0] == "+":
            log.record_collective(name)
        else:
            log.awaited_entry = max(n for n in range(log.entry_count) if log._entries[n % MAX_ENTRIES][0] == name)
            log.awaited_entry = NO_ENTRY
    return log


def places(*events: str) -> str:
    records = [log_ahead(one).snapshot(rank) for rank, one in enumerate(events)]
    return describe_positions(
        divergence_positions(
            [CollectiveLogSnapshot.unpack(json.loads(json.dumps(record.pack()))) for record in records]))


def test_the_place_is_where_ranks_ran_another_block_though_it_was_gathered_ahead() -> None:
    for steps in (0, 3, MAX_ENTRIES):
        before = "+a a | " * steps
        without_c, without_d = before + "+a +b a b +c +d d > +d d", before + "+a +b a b +c c +d > +c c"
        assert places(without_c, without_d) == "rank 0 is at d (forward), rank 1 is at c (forward)"


def test_a_use_that_is_no_cause_is_no_place() -> None:
    apart = "rank 0 is at x (backward), rank 1 is at y (backward)"
    assert places("+a +b a | > +x x", "+a +b b | > +y y") == apart  # the ranks have met since
    assert places("+a +b a > +x a", "+a +b a > +y b") == apart  # what followed the difference
    many = "+a +b " + "a " * MAX_ENTRIES
    assert places(f"{many} a > +x", f"{many} b > +y") == apart  # what came before is forgotten
    assert places("+a +b a > +x", "+a +b > +y") == apart  # one rank is slow


def test_a_sum_and_an_end_are_not_said_to_come_after_a_step() -> None:
    log = log_of(in_order=True)
    log.purpose = "after a step"
    log.record_reduction("a")
    log.record_collective(ENDED)
    log.awaited_entry = log.record_collective("b")
    assert log.snapshot(0).entries == [("the gradients of a", ""), (ENDED, ""), ("b", "after a step")]
    assert not log.snapshot(0).uses  # of the weights that all gather at once


def test_of_logs_that_are_too_far_apart_nothing_is_said() -> None:
    near, far = log_of("x").snapshot(0), log_of(*"ab" * MAX_ENTRIES).snapshot(1)
    assert not logs_diverged(near, far) and not logs_diverged(far, near)


@pytest.mark.parametrize("waits", ["entry", STEP, SAVE, ENDED])
def test_two_ranks_that_wait_for_each_other(waits: str) -> None:
    mine, other = log_of("a", sums=2), log_of("a", "b", sums=1)
    mine.awaited_reduction = 1, "block 1"
    if waits == "entry":
        assert not logs_diverged(mine.snapshot(0), other.snapshot(1))  # it may be slow on its way to the sum
        other.awaited_entry = 1
    else:
        other.record_barrier(waits)
    records = [mine.snapshot(0), other.snapshot(1)]
    assert logs_diverged(*records)
    place = "b (forward)" if waits == "entry" else waits
    assert describe_positions(divergence_positions(
        records)) == f"rank 0 is at the gradients of block 1, rank 1 is at {place}"
    mine.record_collective("b")
    mine.record_collective("another")
    assert waits != "entry" or not logs_diverged(mine.snapshot(0),
                                                 other.snapshot(1))  # it has begun what the other waits for
    other.record_reduction("block 1")
    assert waits != "entry" or not logs_diverged(mine.snapshot(0), other.snapshot(1))


def test_sums_that_are_done_in_order_are_entries() -> None:
    mine, other = log_of("a", sums=1, in_order=True), log_of("a", "b", sums=1, in_order=True)
    assert logs_diverged(mine.snapshot(0), other.snapshot(1))


def test_a_record_survives_its_way() -> None:
    log = log_of(*random.Random(0).choices("abc", k=2 * MAX_ENTRIES), sums=3)
    log.awaited_reduction = 2, "block 2"
    record = log.snapshot(7)
    assert CollectiveLogSnapshot.unpack(json.loads(json.dumps(record.pack()))) == record
    assert len(json.dumps(record.pack())) < 8 * MAX_ENTRIES


def test_ranks_are_named_in_ranges() -> None:
    assert [format_ranks(ranks) for ranks in ([3], [0, 1], [0, 1, 2, 5], range(1000))] == [
        "rank 3", "ranks 0-1", "ranks 0-2, 5", "ranks 0-999"]
    assert format_ranks(range(0, 4000, 2)) == f"ranks {', '.join(map(str, range(0, 32, 2)))} and 1984 others"
    assert format_ranks([*range(0, 34, 2)]).endswith("28, 30 and 1 other")


def test_what_ranks_that_contradict_each_other_have_set_differently_is_told() -> None:
    records = [CollectiveLogSnapshot(rank, 0, [], accumulation_setting=f"accumulation {1 + rank // 2}")
               for rank in (3, 0, 2, 1)]
    assert describe_setting_differences(
        records) == "; they have set accumulation 1 on ranks 0-1, accumulation 2 on ranks 2-3"
    assert describe_setting_differences(records[1:2] + records[3:]) == ""


class LogThatGoesOn(CollectiveLog):
    """Between two looks at it the rank begins its sum, and then waits for an entry."""

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name in ("reduction_count", "awaited_entry", "awaited_reduction") and "steps" in vars(self) and self.steps:
            self.steps.pop(0)()
        return found


def test_a_rank_that_goes_on_while_it_is_looked_at_contradicts_nobody() -> None:
    for looks in range(4):
        mine, other = log_of("a", sums=1), LogThatGoesOn(reductions_in_order=False)
        mine.awaited_reduction = 0, "block 0"
        other.record_collective("a")
        other.record_collective("b")

        def goes_on(other: LogThatGoesOn = other) -> None:
            other.record_reduction("block 0")
            other.awaited_entry = 1

        other.steps = [*[lambda: None] * looks, goes_on]
        assert not logs_diverged(mine.snapshot(0), other.snapshot(1))


# ---- the board -----------------------------------------------------------------------------------------------------

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


def log_without_purpose(*entries: str) -> CollectiveLog:
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
    watches = [watch_of(rank, world, log_without_purpose("a", "c" if rank == 5 else "b")) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool, \
            patch.multiple(watchdog, REPORTER_POLLS=1000, REPORTER_TIMEOUT_POLLS=1000):
        errors = set(map(str, pool.map(_look_until_told, watches)))
    assert len(errors) == 1
    assert "forever: ranks 0-4, 6-23 are at b, rank 5 is at c; " in errors.pop()
    readers = [each for each in watches if any(key.startswith("rank/") for key in board_of(each).asked_for)]
    assert len(readers) == 1


def test_a_rank_takes_the_place_of_a_reporter_that_has_gone() -> None:
    """It names the fault even where a log has gone on since."""
    far = log_without_purpose("b")
    first, second = watch_of(0, 2, far), watch_of(1, 2, log_without_purpose("a"))
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
    first, second = watch_of(0, 2, log_without_purpose("a")), watch_of(1, 2, log_without_purpose("b"))
    assert first.compare_logs() is None
    with patch.object(board_of(second), "write", side_effect=RuntimeError("the store is gone")):
        assert _told_by_itself(second).startswith("5 the ranks wait for each other forever, and the one that hosts")


@pytest.mark.parametrize("failures, ends", [(watchdog.MAX_FAILED_CHECKS - 1, "2 "), (watchdog.MAX_FAILED_CHECKS, "")])
def test_a_connection_that_fails_now_and_then_is_made_anew(failures: int, ends: str) -> None:
    first, second = watch_of(0, 2, log_without_purpose("a")), watch_of(1, 2, log_without_purpose("b"))
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
    first, second = watch_of(0, 2, log_without_purpose("a")), watch_of(1, 2, log_without_purpose("a", "b"))
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
        self.log, self.groups = log_without_purpose("a"), Groups(group, dp=group)


def test_a_rank_without_a_watch_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    refused = RuntimeError("Too many open files\nC++ CapturedTraceback:")
    with patch.object(watchdog, "broadcast_json", lambda name, world: name), \
            patch.object(watchdog, "StoreKV", side_effect=refused):
        watchdog.start_watchdog(Nothing())
    assert capfd.readouterr().err == (
        "note: ranks that wait for each other forever end by the time-out only, because rank 3 has no second "
        "connection to the store where they met (Too many open files); see docs/launch.md\n")
