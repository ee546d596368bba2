"""Logs of ranks: when two of them contradict each other, and how that is said."""

from __future__ import annotations

import json
import random

import pytest

from megatron.distributed.collective_log import (ENDED, MAX_ENTRIES, NO_ENTRY, SAVE, STEP, CollectiveLog,
                                                 CollectiveLogSnapshot, describe_positions,
                                                 describe_setting_differences, divergence_positions,
                                                 first_diverging_entry, logs_diverged)
from megatron.distributed.rank_text import format_ranks


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


@pytest.mark.parametrize("before", [0, 1, MAX_ENTRIES - 1, MAX_ENTRIES, 3 * MAX_ENTRIES + 5])
def test_the_first_difference_is_found_however_long_the_logs_are(before: int) -> None:
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


@pytest.mark.parametrize("steps", [0, 3, MAX_ENTRIES])
def test_the_place_is_where_ranks_ran_another_block_though_it_was_gathered_ahead(steps: int) -> None:
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


@pytest.mark.parametrize("looks", range(4))
def test_a_rank_that_goes_on_while_it_is_looked_at_contradicts_nobody(looks: int) -> None:
    mine, other = log_of("a", sums=1), LogThatGoesOn(reductions_in_order=False)
    mine.awaited_reduction = 0, "block 0"
    other.record_collective("a")
    other.record_collective("b")

    def goes_on() -> None:
        other.record_reduction("block 0")
        other.awaited_entry = 1

    other.steps = [*[lambda: None] * looks, goes_on]
    assert not logs_diverged(mine.snapshot(0), other.snapshot(1))
