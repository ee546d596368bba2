"""Without ranks: when the logs of two ranks contradict each other, and how that is said."""

from __future__ import annotations

import json
import random

import pytest

from megatron.distributed.collective_log import (ENDED, MAX_ENTRIES, NO_ENTRY, SAVE, STEP, CollectiveLog,
                                                 CollectiveLogSnapshot, describe_positions,
                                                 describe_setting_differences, divergence_positions, logs_diverged)
from megatron.distributed.rank_text import format_ranks


def log_of(*entries: str, sums: int = 0, in_order: bool = False) -> CollectiveLog:
    log = CollectiveLog(reductions_in_order=in_order)
    log.purpose = "forward"
    for entry in entries:
        log.record_collective(entry)
    for number in range(sums):
        log.record_reduction(f"block {number}")
    return log


def test_logs_contradict_each_other_from_their_first_difference_and_not_where_one_is_only_shorter() -> None:
    for before in (0, 1, MAX_ENTRIES - 1, MAX_ENTRIES, 3 * MAX_ENTRIES + 5):
        common = [str(number % 7) for number in range(before)]
        short, first, second = (log_of(*common, *more).snapshot(rank)
                                for rank, more in enumerate(["", ("x", "y"), ("x", "z", "y")]))
        assert not logs_diverged(short, second) and not logs_diverged(second, short)
        assert logs_diverged(first, second) and logs_diverged(second, first)
        assert describe_positions(
            divergence_positions([first, second])) == "rank 1 is at y (forward), rank 2 is at z (forward)"
    far = log_of(*"ab" * MAX_ENTRIES).snapshot(1)
    assert not logs_diverged(short, far), "of logs that are too far apart nothing is known"


def log_ahead(events: str) -> CollectiveLog:
    """`+a` gathers block a, `a` runs it, `>` turns to the backward, `|` is a step."""
    log = CollectiveLog(reductions_in_order=False)
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
    """What is said of ranks with these logs, as they read them from the store."""
    packed = [json.dumps(log_ahead(one).snapshot(rank).pack()) for rank, one in enumerate(events)]
    return describe_positions(divergence_positions([CollectiveLogSnapshot.unpack(json.loads(one)) for one in packed]))


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


@pytest.mark.parametrize("waits", ["entry", SAVE, ENDED])
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
    said = describe_positions(divergence_positions(records))
    assert said == f"rank 0 is at the gradients of block 1, rank 1 is at {place}"
    if waits == "entry":
        mine.record_collective("b")
        mine.record_collective("another")
        assert not logs_diverged(mine.snapshot(0), other.snapshot(1))  # it has begun what the other waits for


def test_what_is_known_of_a_rank_survives_its_way_and_is_told_briefly() -> None:
    log = log_of(*random.Random(0).choices("abc", k=2 * MAX_ENTRIES), sums=3)
    log.awaited_reduction = 2, "block 2"
    record = log.snapshot(7)
    assert CollectiveLogSnapshot.unpack(json.loads(json.dumps(record.pack()))) == record
    assert len(json.dumps(record.pack())) < 8 * MAX_ENTRIES
    records = [CollectiveLogSnapshot(rank, 0, [], accumulation_setting=f"accumulation {1 + rank // 2}")
               for rank in (3, 0, 2, 1)]
    told = "; they have set accumulation 1 on ranks 0-1, accumulation 2 on ranks 2-3"
    assert describe_setting_differences(records) == told
    assert describe_setting_differences(records[1:2] + records[3:]) == ""
    assert [format_ranks(ranks) for ranks in ([3], [0, 1, 2, 5], range(1000))] == [
        "rank 3", "ranks 0-2, 5", "ranks 0-999"]
    assert format_ranks(range(0, 4000, 2)) == f"ranks {', '.join(map(str, range(0, 32, 2)))} and 1984 others"
