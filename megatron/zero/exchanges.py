"""ExchangeLog: what this rank last exchanged with its data parallel peers; and where the logs of several ranks differ.

An *entry* says what was exchanged (a block's parameters, a step, a save) and what for (forward, backward). Ranks of one
group exchange the same things in the same order. So their logs agree, entry by entry, as far as both have come: one
that is shorter is that of a slow rank, which is no fault. Where an entry differs, the ranks have received each other's
numbers, or will wait for each other for ever. What an exchange is for is not compared: what travels is the same.

Noting an entry takes a fraction of a microsecond, and sends nothing. watch.py compares the logs of a run that stands
still, step.py those of ranks whose digests differ.

A *use* is a block that the rank waited for because it was about to run it. Blocks are gathered ahead, in the order of
the pass before: where a rank then runs another block, its exchanges still agree for a while, and uses tell where it
parted from the others. They are never a fault by themselves.

*Sums* are the reductions of gradients. An accelerator does them in order with everything else, and below stage 3
nothing comes between them: there they are entries too. At stage 3 on a CPU they are messages of their own, which a rank
on which some parameter got no gradient rightly sends later; so they are counted beside the entries. A log then has a
second way to contradict another: each of two ranks waits for what the other, while it waits, cannot begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from megatron.ranges import named, ranges

KEPT = 1024
"""Entries that are kept: ranks are never that far apart. An accelerator's host runs ahead by two steps at most, and no
further than as many kernels as the driver keeps in its queue."""

NOTHING, NO_SUM = -1, (-1, "")
"""Not waiting."""

BACKWARD_ENDS, STEP, SAVE, LOAD = "the end of a backward", "a step", "a save", "a load"
ENDED, FAILED, INTERRUPTED = "the end of its program", "an error of its own", "an interruption (Ctrl-C)"
OVER = frozenset({ENDED, FAILED, INTERRUPTED})
"""After one of these nothing follows."""
MEETINGS = OVER | {STEP, SAVE, LOAD}
"""A rank does not go on from one of these until all have come."""
AFTER_A_STEP = "after a step"
"""What the new weights are gathered for, by all ranks and at once. Which of them is run first says nothing."""
EARLIER = "an earlier place", ""


class Follower(Protocol):
    """Hears of exchanges as they happen: entries and sums, by number."""

    def begins(self, kind: str, number: int, what: str) -> None: ...

    def is_awaited(self, kind: str, number: int) -> None: ...

    def is_over(self, kind: str, number: int) -> None: ...


class ExchangeLog:
    def __init__(self, *, sums_in_order: bool) -> None:
        self.count = self.sums = 0
        self.purpose = ""
        """What the next exchanges are for."""
        self.follower: Follower | None = None
        self.explain: Callable[[BaseException], None] = _know_nothing
        """Raises a better error in place of one that an exchange ended with, where there is one."""
        self.remark = ""
        """A setting that decides when this rank exchanges; not compared, and told of ranks that contradict each other
        and differ in it."""
        self._sums_in_order = sums_in_order
        self._awaited, self._sum_awaited = NOTHING, NO_SUM
        self._entries = [("", "")] * KEPT
        self._uses: deque[Use] = deque(maxlen=KEPT)

    def note(self, what: str) -> int:
        """It begins now; returns its number."""
        return self._note(what, "" if what in OVER else self.purpose)

    def _note(self, what: str, purpose: str) -> int:
        number = self.count
        self._entries[number % KEPT] = what, purpose
        self.count += 1
        if self.follower is not None:
            self.follower.begins("entry", number, f"{what}, {purpose}" if purpose else what)
        return number

    def meet(self, where: str) -> None:
        """Every rank comes to this place, whatever it exchanges there."""
        self.purpose = ""
        self.note(where)

    def begin_sum(self, name: str) -> int:
        """The gradients of `name` leave now; returns the number of the sum."""
        if self._sums_in_order:
            self._note(f"the gradients of {name}", "")
        self.sums += 1
        if self.follower is not None:
            self.follower.begins("sum", self.sums - 1, f"the gradients of {name}")
        return self.sums - 1

    @property
    def entry_awaited(self) -> int:
        """The number of the entry that the host waits for now."""
        return self._awaited

    @entry_awaited.setter
    def entry_awaited(self, number: int) -> None:
        before, self._awaited = self._awaited, number
        if self.follower is not None:
            self._tell("entry", before, number)
        if number != NOTHING:
            what, begun_for = self._entries[number % KEPT]
            if begun_for != AFTER_A_STEP:
                self._uses.append((what, self.purpose, self.count))

    @property
    def sum_awaited(self) -> tuple[int, str]:
        """The sum that the host waits for now: its number, and whose gradients they are."""
        return self._sum_awaited

    @sum_awaited.setter
    def sum_awaited(self, awaited: tuple[int, str]) -> None:
        before, self._sum_awaited = self._sum_awaited, awaited
        if self.follower is not None:
            self._tell("sum", before[0], awaited[0])

    def _tell(self, kind: str, before: int, now: int) -> None:
        assert self.follower is not None
        if now == NOTHING:
            self.follower.is_over(kind, before)
        else:
            self.follower.is_awaited(kind, now)

    @property
    def is_over(self) -> bool:
        return self.count > 0 and self._entries[(self.count - 1) % KEPT][0] in OVER

    def record(self, rank: int) -> Record:
        """A snapshot; the rank may go on meanwhile, in another thread."""
        while True:
            waits = self.entry_awaited, self.sum_awaited  # first: what it may begin meanwhile can only end a wait
            count = self.count
            first = max(0, count - KEPT)
            entries = [self._entries[number % KEPT] for number in range(first, count)]
            taken = Record(rank, first, entries, self.sums, *waits, tuple(self._uses), self.remark)
            if count == self.count:
                return taken


Use = tuple[str, str, int]
"""The block, what for, and how many entries there were by then."""


@dataclass(frozen=True)
class Record:
    """The log of one rank, as others see it."""

    rank: int
    first: int
    """The number of the first entry that is known."""
    entries: Sequence[tuple[str, str]]
    sums: int = 0
    entry_awaited: int = NOTHING
    sum_awaited: tuple[int, str] = NO_SUM
    uses: Sequence[Use] = ()
    remark: str = ""

    @property
    def count(self) -> int:
        return self.first + len(self.entries)

    def at(self, number: int) -> tuple[str, str] | None:
        return self.entries[number - self.first] if self.first <= number < self.count else None

    @property
    def needs(self) -> int:
        """The number of an entry that this rank cannot go on without."""
        if self.entries and self.entries[-1][0] in MEETINGS:
            return self.count - 1
        return self.entry_awaited

    @property
    def place(self) -> tuple[str, str]:
        """Where the rank stands."""
        if self.sum_awaited != NO_SUM:
            return f"the gradients of {self.sum_awaited[1]}", ""
        return self.at(self.needs) or self.at(self.count - 1) or ("the beginning", "")

    def uses_after(self, number: int) -> list[Use] | None:
        """Those since that entry; None where some of them are forgotten."""
        is_whole = len(self.uses) < KEPT or self.uses[0][2] <= number
        return [use for use in self.uses if use[2] > number] if is_whole else None

    def pack(self) -> list[Any]:
        """As a JSON value, each text once."""
        texts = list(dict.fromkeys([*self.entries, *(use[:2] for use in self.uses)]))
        place = {text: number for number, text in enumerate(texts)}
        return [self.rank, self.first, texts, [place[entry] for entry in self.entries], self.sums, self.entry_awaited,
                self.sum_awaited, [(place[use[:2]], use[2]) for use in self.uses], self.remark]

    @staticmethod
    def unpack(packed: list[Any]) -> Record:
        rank, first, texts, places, sums, entry, (number, name), used, remark = packed
        entries = [(what, purpose) for what, purpose in map(texts.__getitem__, places)]
        uses = tuple((*texts[place], count) for place, count in used)
        return Record(rank, first, entries, sums, entry, (number, name), uses, remark)


def contradict(mine: Record, other: Record) -> bool:
    """The two ranks cannot both go on. True for good, even where what is known of the other is old: it cannot have
    passed what this rank has not begun."""
    return first_difference([mine, other]) is not None or _waits_in_vain(mine, [other])


def _waits_in_vain(mine: Record, others: Sequence[Record]) -> bool:
    """One of the others will not begin the sum that this rank waits for, before this rank goes on."""
    awaited, count = mine.sum_awaited[0], mine.count
    return mine.sum_awaited != NO_SUM and any(awaited >= other.sums and other.needs >= count for other in others)


def first_difference(records: Sequence[Record]) -> int | None:
    """The number of the first entry in which two logs differ, as far as they are known."""
    for number in range(min(record.first for record in records), max(record.count for record in records)):
        if len({entry[0] for record in records if (entry := record.at(number)) is not None}) > 1:
            return number
    return None


def places_of(records: Sequence[Record]) -> dict[int, tuple[str, str]]:
    """Rank -> where it was when the ranks began to differ; or, where each waits for another, where it stands."""
    number = first_difference(records)
    if number is not None:
        return _uses_that_differ(records, number) or {record.rank: record.at(number) or EARLIER for record in records}
    needy = [record for record in records if record.needs != NOTHING]
    if any(_waits_in_vain(record, needy) for record in records):
        return {record.rank: record.place for record in records}
    return {}


def _uses_that_differ(records: Sequence[Record], number: int) -> dict[int, tuple[str, str]]:
    """Rank -> the block it ran when the ranks parted, where that was before they began entry `number`, which differs.
    Since the last place where they met: what they ran before that has done no harm."""
    first = min(record.first for record in records)
    met = max((place for place in range(first, number) for record in records
               if (record.at(place) or EARLIER)[0] in MEETINGS | {BACKWARD_ENDS}), default=first - 1)
    uses = [record.uses_after(met) for record in records]
    if None in uses:
        return {}
    for together in zip_longest(*(known or [] for known in uses)):
        known = [use for use in together if use is not None]
        if len({what for what, _, _ in known}) > 1:
            is_earlier = any(count <= number for _, _, count in known)
            return {record.rank: use[:2] if use else EARLIER
                    for record, use in zip(records, together, strict=True)} if is_earlier else {}
    return {}


def describe(places: Mapping[int, tuple[str, str]]) -> str:
    """"rank 0 is at blocks.3 (forward), ranks 1-7 are at a step"."""
    by_text: dict[str, list[int]] = {}
    for rank, (what, purpose) in sorted(places.items()):
        by_text.setdefault(f"{what} ({purpose})" if purpose else what, []).append(rank)
    return named([f"{ranges(ranks)} {'is' if len(ranks) == 1 else 'are'} at {text}" for text, ranks in by_text.items()],
                 "places")


def different_remarks(records: Sequence[Record]) -> str:
    """What the ranks have set differently, as one more clause about them; or nothing."""
    by_text: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda record: record.rank):
        by_text.setdefault(record.remark, []).append(record.rank)
    return "; they have set " + named([f"{text} on {ranges(ranks)}" for text, ranks in by_text.items()]) \
        if len(by_text) > 1 else ""


def _know_nothing(error: BaseException) -> None:
    """Nobody watches this engine."""
