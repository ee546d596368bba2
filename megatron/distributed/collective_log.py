"""Records the collectives that this rank ran (a flight recorder), and checks that all ranks make the same call.

An *entry* names what was exchanged and in which phase. Ranks of one data parallel group add the same entries in the
same order, so two logs agree as far as both go; a shorter log belongs to a slower rank. Gradient reductions are
entries too, except at stage 3 on a CPU: there their order may differ between ranks, and they are only counted.
A *use* is a unit that the rank waited for; uses show where the ranks parted when units are gathered ahead of time.

Recording sends nothing; watchdog.py compares logs when a run hangs. `assert_collective_call` is for public calls that
a script may make on one rank only (getters, GatheredParameters, saves), before they exchange data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from threading import Event
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.rank_text import format_ranks, join_limited
from megatron.errors import ConfigError
from mpu.collectives import all_gather
from mpu.groups import Group

# Entries kept per rank. Ranks of one group are never that far apart: a host runs at most two steps ahead of its device.
MAX_ENTRIES = 1024
NO_ENTRY, NO_REDUCTION = -1, (-1, "")  # `awaited_entry` and `awaited_reduction` while the host waits for nothing

BACKWARD_END, STEP, SAVE, LOAD = "the end of a backward", "a step", "a save", "a load"
ENDED, FAILED, INTERRUPTED = "the end of its program", "an error of its own", "an interruption (Ctrl-C)"
FINAL_ENTRIES = frozenset({ENDED, FAILED, INTERRUPTED})  # the rank records nothing after one of these
BARRIER_ENTRIES = FINAL_ENTRIES | {STEP, SAVE, LOAD}  # a rank leaves one of these only when all ranks have reached it
AFTER_STEP = "after a step"  # purpose of the all-gathers that every rank starts then, in no order of the forward
FORGOTTEN_ENTRY = "an earlier place", ""


class CollectiveLog:
    def __init__(self, *, reductions_in_order: bool) -> None:
        self.entry_count = self.reduction_count = 0
        self.purpose = ""  # purpose of the collectives that follow (forward, backward, ...)
        # called with the error of a failed collective; raises the root cause if the watchdog knows it
        self.raise_root_cause: Callable[[BaseException], object] = lambda error: None
        # decides when this rank communicates; shown in the error if diverging ranks differ in it
        self.accumulation_setting = ""
        self._reductions_in_order = reductions_in_order
        self._awaited_entry = NO_ENTRY
        self.awaited_reduction = NO_REDUCTION  # that the host waits for now: (number, parameter unit)
        self._entries = [("", "")] * MAX_ENTRIES
        self._uses: deque[UnitUse] = deque(maxlen=MAX_ENTRIES)

    def record_collective(self, what: str, purpose: str | None = None) -> int:
        """Record a collective that starts now; returns its entry number. The purpose is `self.purpose` by default."""
        number = self.entry_count
        if purpose is None:
            purpose = "" if what in FINAL_ENTRIES else self.purpose
        self._entries[number % MAX_ENTRIES] = what, purpose
        self.entry_count += 1  # last: another thread may read the log (`snapshot`)
        return number

    def record_barrier(self, where: str) -> None:
        """Record a point that every rank reaches before any rank leaves it."""
        self.purpose = ""
        self.record_collective(where)

    def record_reduction(self, name: str) -> int:
        """Record that the gradient reduction of `name` starts now; returns its reduction number."""
        if self._reductions_in_order:
            self.record_collective(f"the gradients of {name}", "")
        self.reduction_count += 1
        return self.reduction_count - 1

    @property
    def awaited_entry(self) -> int:
        """Number of the entry that the host waits for now, or NO_ENTRY."""
        return self._awaited_entry

    @awaited_entry.setter
    def awaited_entry(self, number: int) -> None:
        self._awaited_entry = number
        if number != NO_ENTRY:
            what, started_for = self._entries[number % MAX_ENTRIES]
            if started_for != AFTER_STEP:
                self._uses.append((what, self.purpose, self.entry_count))

    @property
    def awaited_collective(self) -> str:
        """Name of the entry or reduction that the host waits for now; "" for none."""
        if self.awaited_reduction != NO_REDUCTION:
            return f"the gradients of {self.awaited_reduction[1]}"
        return "" if self._awaited_entry == NO_ENTRY else ", ".join(
            filter(None, self._entries[self._awaited_entry % MAX_ENTRIES]))

    @property
    def is_finished(self) -> bool:
        return self.entry_count > 0 and self._entries[(self.entry_count - 1) % MAX_ENTRIES][0] in FINAL_ENTRIES

    def snapshot(self, rank: int) -> CollectiveLogSnapshot:
        """Copy the log. Safe while another thread records more: repeats until no entry was added meanwhile."""
        while True:
            # read first: entries added meanwhile can only end a wait
            waits = self.awaited_entry, self.awaited_reduction
            count = self.entry_count
            first = max(0, count - MAX_ENTRIES)
            entries = [self._entries[number % MAX_ENTRIES] for number in range(first, count)]
            snapshot = CollectiveLogSnapshot(rank, first, entries, self.reduction_count, *waits, tuple(self._uses),
                                             self.accumulation_setting)
            if count == self.entry_count:
                return snapshot


UnitUse = tuple[str, str, int]  # (unit, purpose, number of entries recorded before the use)


@dataclass(frozen=True)
class CollectiveLogSnapshot:
    """One rank's log at one time, as other ranks read it from the store."""

    rank: int
    first_number: int  # number of `entries[0]`; older entries were overwritten
    entries: Sequence[tuple[str, str]]
    reduction_count: int = 0
    awaited_entry: int = NO_ENTRY
    awaited_reduction: tuple[int, str] = NO_REDUCTION
    uses: Sequence[UnitUse] = ()
    accumulation_setting: str = ""

    @property
    def entry_count(self) -> int:
        return self.first_number + len(self.entries)

    def entry_at(self, number: int) -> tuple[str, str] | None:
        return self.entries[number - self.first_number] if self.first_number <= number < self.entry_count else None

    @property
    def blocking_entry(self) -> int:
        """Number of the entry that this rank cannot proceed without, or NO_ENTRY."""
        if self.entries and self.entries[-1][0] in BARRIER_ENTRIES:
            return self.entry_count - 1
        return self.awaited_entry

    @property
    def current_position(self) -> tuple[str, str]:
        """(what, purpose) of the collective that the rank waits for, else of the last one recorded."""
        if self.awaited_reduction != NO_REDUCTION:
            return f"the gradients of {self.awaited_reduction[1]}", ""
        return self.entry_at(self.blocking_entry) or self.entry_at(self.entry_count - 1) or ("the beginning", "")

    def pack(self) -> list[Any]:
        """The log as a JSON value that holds each text once."""
        texts = list(dict.fromkeys([*self.entries, *(use[:2] for use in self.uses)]))
        index_of = {text: number for number, text in enumerate(texts)}
        return [self.rank, self.first_number, texts, [index_of[entry] for entry in self.entries], self.reduction_count,
                self.awaited_entry, self.awaited_reduction, [(index_of[use[:2]], use[2]) for use in self.uses],
                self.accumulation_setting]

    @staticmethod
    def unpack(packed: list[Any]) -> CollectiveLogSnapshot:
        rank, first, texts, entries, reductions, awaited, (number, name), uses, setting = packed
        return CollectiveLogSnapshot(rank, first, [tuple(texts[index]) for index in entries], reductions, awaited,
                                     (number, name), tuple((*texts[index], count) for index, count in uses), setting)


def logs_diverged(mine: CollectiveLogSnapshot, other: CollectiveLogSnapshot) -> bool:
    """Whether the two ranks can no longer both proceed. A True result is final even if `other` is outdated: the other
    rank cannot have passed a collective that this rank has not started."""
    return first_diverging_entry([mine, other]) is not None or _waits_forever(mine, [other])


def _waits_forever(mine: CollectiveLogSnapshot, others: Sequence[CollectiveLogSnapshot]) -> bool:
    """Whether this rank waits for a gradient reduction that another rank starts only after this rank proceeds."""
    awaited, count = mine.awaited_reduction[0], mine.entry_count
    return mine.awaited_reduction != NO_REDUCTION and any(
        awaited >= other.reduction_count and other.blocking_entry >= count for other in others)


def first_diverging_entry(records: Sequence[CollectiveLogSnapshot]) -> int | None:
    """Number of the first entry in which two logs differ, as far as both are known; None if there is none."""
    for number in range(min(record.first_number for record in records), max(record.entry_count for record in records)):
        if len({entry[0] for record in records if (entry := record.entry_at(number)) is not None}) > 1:
            return number
    return None


def divergence_positions(records: Sequence[CollectiveLogSnapshot]) -> dict[int, tuple[str, str]]:
    """Rank -> position at the first difference of the logs. If the logs agree but the ranks block each other: each
    rank's current position. Empty if the run can go on."""
    number = first_diverging_entry(records)
    if number is not None:
        return _diverging_uses(records, number) or {record.rank: record.entry_at(number) or FORGOTTEN_ENTRY
                                                    for record in records}
    blocked = [record for record in records if record.blocking_entry != NO_ENTRY]
    if any(_waits_forever(record, blocked) for record in records):
        return {record.rank: record.current_position for record in records}
    return {}


def _diverging_uses(records: Sequence[CollectiveLogSnapshot], number: int) -> dict[int, tuple[str, str]]:
    """Rank -> the unit it ran when the ranks diverged, if that use came before entry `number`, the first that differs.
    With units gathered ahead of time, the uses diverge before the entries do. Only uses after the last common barrier
    are compared: earlier ones caused no harm."""
    first = min(record.first_number for record in records)
    barrier = max((place for place in range(first, number) for record in records if (
        record.entry_at(place) or FORGOTTEN_ENTRY)[0] in BARRIER_ENTRIES | {BACKWARD_END}), default=first - 1)
    if any(len(record.uses) == MAX_ENTRIES and record.uses[0][2] > barrier for record in records):
        return {}  # some of these uses were overwritten
    for together in zip_longest(*([use for use in record.uses if use[2] > barrier] for record in records)):
        known = [use for use in together if use is not None]
        if len({what for what, _, _ in known}) > 1:
            is_earlier = any(count <= number for _, _, count in known)
            return {record.rank: use[:2] if use else FORGOTTEN_ENTRY
                    for record, use in zip(records, together, strict=True)} if is_earlier else {}
    return {}


def describe_positions(positions: Mapping[int, tuple[str, str]]) -> str:
    """"rank 0 is at blocks.3 (forward), ranks 1-7 are at a step"."""
    by_text: dict[str, list[int]] = {}
    for rank, (what, purpose) in sorted(positions.items()):
        by_text.setdefault(f"{what} ({purpose})" if purpose else what, []).append(rank)
    return join_limited([f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {text}"
                         for text, ranks in by_text.items()], "places")


def describe_setting_differences(records: Sequence[CollectiveLogSnapshot]) -> str:
    """A clause naming the ranks' different `accumulation_setting`s, or ""."""
    by_text: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        by_text.setdefault(record.accumulation_setting, []).append(record.rank)
    return "; they have set " + join_limited([f"{text} on {format_ranks(ranks)}" for text, ranks in by_text.items()]) \
        if len(by_text) > 1 else ""


# `assert_collective_call` waits this long before its own error: the watchdog names the positions of all ranks sooner.
WATCHDOG_REPORT_SECONDS = 20.0


def assert_collective_call(log: CollectiveLog, group: Group, call: str, value: Tensor | None = None,
                           details: str = "") -> bool:
    """Check that every rank of `group` makes this `call` with the same `details`; returns whether all have the same
    `value`. ConfigError if a rank is in another call. Collective: an all-gather of two int64 per rank."""
    log.record_barrier(call)
    if group.is_solo:
        return True
    log.awaited_entry = log.entry_count - 1
    value_bytes = b"" if value is None else value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
    local_digests = torch.tensor([int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
                                  for data in (f"{call} {details}".encode(), value_bytes)])
    try:
        # [2] per rank -> [group.size, 2]: digest of the call, digest of the value
        all_digests = all_gather(local_digests, group, dim=0).view(group.size, 2)
        if not bool((all_digests[:, 0] == local_digests[0]).all()):
            Event().wait(WATCHDOG_REPORT_SECONDS)
            raise ConfigError(f"the ranks do not do the same: this one is at {call}, another one is not; every data "
                              "parallel rank must make this call, at the same place")
    except RuntimeError as error:
        log.raise_root_cause(error)
        raise
    log.awaited_entry = NO_ENTRY
    return bool((all_digests[:, 1] == local_digests[1]).all())
