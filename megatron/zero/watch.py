"""Watch: ends a run whose ranks wait for each other for ever, within seconds and in words.

At stage 3 a rank that runs another block than its peers receives theirs, or hangs; at every stage one that calls
`step()` while the others are in a backward, or that leaves its loop early, leaves them waiting until the process group
times out. A thread of each rank looks once a second whether its rank has begun another exchange (exchanges.py). While
it has, nothing is sent. After `PATIENCE` looks without one it asks the board (mpu/wire/board.py), and then less and
less often:

    furthest/G   the longest log of data parallel group G. A rank whose log is longer puts its own there; one whose
                 log contradicts it has found a fault. So each is compared with one, however many ranks there are.
    asked        a fault was found in group G, between these two logs; every rank of G that stands still leaves its own
                 under rank/R
    speaker      the one rank that collects them, and a number that grows while it lives; where that stands still, the
                 next rank claims the place
    said         the error that it puts together; every rank ends with it
    heard        how many ranks know it, or have ended: the rank that keeps the store leaves last

Time proves nothing here: a rank that saves, compiles or debugs for an hour is waited for, since its log is only
shorter. What ends a run is a contradiction between two logs, which cannot come right again.

How a rank ends. The main thread may sit in a wait of gloo's, which nothing can interrupt (neither shutdown nor abort of
the process group wakes it), or in a driver that waits for a kernel of NCCL's, which can only be ended together with the
numbers that others work with. So the watch writes the error and ends the process with the error's exit code, as NCCL's
own watchdog does; no `finally` and no atexit runs. Where torch raises first because a peer has left, the error is
raised in the main thread in place of torch's (`explain`). A rank that is not waiting (it has ended, or was interrupted)
is never ended from here.

Not here: a rank that was killed (torch and the launcher notice), ranks of one tensor parallel group that differ, and
two engines that are used in another order on another rank: each engine has a watch of its own.
"""

from __future__ import annotations

import secrets
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import Any, Protocol

from megatron.errors import ConfigError, PeerError, TrainerError
from megatron.launch import distributed, exits
from megatron.launch.signals import write_lines
from megatron.ranges import ranges
from megatron.zero.exchanges import (ENDED, FAILED, INTERRUPTED, ExchangeLog, Record, contradict, describe,
                                     different_remarks, places_of)
from mpu.collectives import broadcast_json
from mpu.groups import Groups
from mpu.wire import waits
from mpu.wire.abort import delay_gloo_terminate
from mpu.wire.board import StoreKV

LOOK_SECONDS = 1.0
PATIENCE = 3
"""Looks without a new exchange before a rank asks the board."""
RAREST = 8
"""Looks between two questions, at most."""
LONG = 60
"""Looks without a new exchange after which a rank that waits says so, once for all of them."""
POLL_SECONDS = 0.2
END_SECONDS = 1.5
"""At a good end, for the other ranks to come to theirs."""
FAILURES = 5
"""Looks in a row that fail before a rank gives its watch up."""
SPEAKER_POLLS, LISTENER_POLLS, EXPLAIN_POLLS = 25, 40, 6
"""How often the speaker asks for the logs of the others; how often others find no sign of life of it before one takes
its place; and how often one asks whose peer is gone."""

_FAMILY = {cls.__name__: cls for cls in (ConfigError, PeerError)}
_REMEDY = ("every data parallel rank must run the same blocks in the same order (at ZeRO stage 3), and as many "
           "forwards, backwards and steps: give every rank as many batches, and draw alike what is random in the "
           "forward (layer drop)")
_LOST = ("the ranks wait for each other for ever, and the one that kept what they know of each other has left before "
         "this one was told")
_RESUME = "look for the first failure among the ranks, then start the same command to resume"


class Watched(Protocol):
    """An engine, as far as it is needed here."""

    log: ExchangeLog
    groups: Groups


def watch_over(engine: Watched) -> None:
    """Watch an engine until it is gone. Collective. Where the store takes no second connection there is no watch, and a
    line says so."""
    groups = engine.groups
    if groups.dp.is_solo:
        return
    name = broadcast_json(secrets.token_hex(8), groups.world)
    try:
        board = StoreKV(f"watch/{name}")
    except RuntimeError as error:
        tell_unwatched(groups.world.rank, error)
        return
    if groups.dp.own_backend_serves_cpu:
        delay_gloo_terminate()
    watch = Watch(engine.log, groups, board)
    engine.log.explain = watch.explain
    weakref.finalize(engine, watch.end)
    distributed.before_shutdown(watch.close)
    exits.before_failing(watch.farewell)
    watch.start()


def tell_unwatched(rank: int, error: RuntimeError) -> None:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    write_lines(f"note: ranks that wait for each other for ever end by the time-out only, because rank {rank} has "
                f"no second connection to the store where they met ({why:.200}); see docs/launch.md\n".encode())


class Watch:
    def __init__(self, log: ExchangeLog, groups: Groups, board: StoreKV) -> None:
        self._log, self._board = log, board
        self._rank, self._ranks = groups.world.rank, groups.dp.ranks
        self._group = self._ranks[0]  # names it
        self._ranks_in_all = groups.world.size
        self._fault_is_known = False
        self._closed = Event()
        self._floor = RLock()  # whose holder tells the error
        self._thread = Thread(target=self._run, name="zero-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """The engine is gone: nobody must wait for this rank any more. The thread tells the others, and is not waited
        for: the garbage collector comes at another time on each rank, so that each would wait for the next."""
        failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
        if not self._log.is_over:
            self._log.note(FAILED if failed else ENDED)
        self._closed.set()

    def close(self) -> None:
        """The program ends, and perhaps the store with it."""
        self.end()
        self._thread.join(timeout=2)

    def farewell(self) -> None:
        """This rank fails, and leaves without destructors: the board names it to those who wait for it."""
        self.close()
        self._leave_last(0)

    def explain(self, error: BaseException) -> None:
        """Raise what is wrong with the run, where torch's error only says that a peer has left."""
        if not exits.is_peer_loss(error):
            return
        for _ in range(EXPLAIN_POLLS):
            try:
                found = self.look()
            except RuntimeError:  # the store is gone with the peer
                return
            if found is not None:
                self._floor.acquire()
                self._leave_last()
                raise found from error
            self._closed.wait(POLL_SECONDS)

    def _run(self) -> None:
        count, still, due, failures, has_told = -1, 0, PATIENCE, 0, False
        while not self._closed.wait(LOOK_SECONDS) and not self._log.is_over:
            still += 1
            if count != self._log.count:
                count, still, due, has_told = self._log.count, 0, PATIENCE, False
                continue
            if still >= LONG and not has_told and waits.is_waiting():
                has_told = True
                with suppress(RuntimeError):
                    self._tell_of_wait(still)
            if still >= due:
                due = still + min(RAREST, still // PATIENCE)
                try:
                    self._leave_with(self.look())
                    failures = 0
                except RuntimeError as error:  # the store is gone, or only the connection
                    if self._board.is_unusable and not self._log.is_over:
                        exits.write_error(exits.explain(error).text)
                        exits.leave_now(exits.explain(error).code)
                    failures += 1
                    if self._fault_is_known:
                        self._leave_with(PeerError(f"{_LOST}: {_RESUME}"))
                    if failures == FAILURES:
                        return tell_unwatched(self._rank, error)
                    with suppress(RuntimeError):
                        self._board.reconnect()
        with suppress(RuntimeError):
            self.look()  # tells the others that nothing follows
            self._keep_store(self._board.add("heard"), END_SECONDS)

    def _tell_of_wait(self, looks: int) -> None:
        """It may be in vain: a rank that is in an exchange of the script's own, a barrier say, may never come."""
        if self._board.add(f"told/{self._log.count}", 1) == 1:
            what, purpose = self._log.record(self._rank).place
            where = f"{what} ({purpose})" if purpose else what
            seconds = looks * LOOK_SECONDS
            write_lines(f"note: rank {self._rank} has waited {seconds:.3g} s at {where} for ranks that are "
                        "not there yet: every rank has to come to it\n".encode())

    def _leave_with(self, error: TrainerError | None) -> None:
        if error is not None and not self._log.is_over and self._floor.acquire(blocking=False):
            self._leave_last()
            exits.write_error(str(error))
            exits.leave_now(error.code)

    def _leave_last(self, more: int = 1) -> None:
        """This rank knows the error (0: it has said before that it ends). Where it keeps the store, it waits until
        every rank that stands still has looked."""
        with suppress(RuntimeError):
            self._keep_store(self._board.add("heard", more), (RAREST + 2) * LOOK_SECONDS)

    def _keep_store(self, heard: int, seconds: float) -> None:
        """Where it ends with this rank, the others may look first."""
        waited = 0.0
        while distributed.keeps_store() and heard < self._ranks_in_all and waited < seconds:
            time.sleep(POLL_SECONDS)
            heard, waited = self._board.add("heard", 0), waited + POLL_SECONDS

    # ---- what the board says ------------------------------------------------------------------------------------

    def look(self) -> TrainerError | None:
        """Compare logs by way of the board; an error where the run cannot go on."""
        mine = self._log.record(self._rank)
        if self._log.is_over:
            self._board.write(f"rank/{self._rank}", mine.pack())
        asked = self._board.read("asked")
        if asked is None:
            asked = self._fault(mine)
            if asked is None:
                return None
            if not self._board.compare_and_set("asked", None, asked):
                asked = self._board.read("asked")
        if self._log.is_over:
            return None
        self._fault_is_known = True
        if asked[0] != self._group:
            return self._said()
        self._board.write(f"rank/{self._rank}", mine.pack())
        return self._hear_or_speak([Record.unpack(log) for log in asked[1]])

    def _fault(self, mine: Record) -> list[Any] | None:
        """What to ask, where this log contradicts the longest one; otherwise the longer of the two is there now."""
        key = f"furthest/{self._group}"
        while True:
            packed = self._board.read(key)
            if packed is not None:
                furthest = Record.unpack(packed)
                if furthest == mine:
                    return None  # a store that is a file grows with all that is written
                if contradict(mine, furthest):
                    return [self._group, [mine.pack(), packed]]
                if furthest.count > mine.count or furthest.count == mine.count and furthest.rank != mine.rank:
                    return None
            if self._board.compare_and_set(key, packed, mine.pack()):
                return None

    def _hear_or_speak(self, fault: list[Record]) -> TrainerError | None:
        """The error, as soon as somebody has put it together; None where the watch ends before."""
        seen, polls = None, 0
        while True:
            said = self._said()
            if said is not None:
                return said
            speaker = self._board.read("speaker")
            polls = polls + 1 if speaker == seen else 0
            seen = speaker
            is_free = speaker is None or polls == LISTENER_POLLS
            if is_free and self._board.compare_and_set("speaker", speaker, [self._rank, 0]):
                self._speak(fault)
            elif self._closed.wait(POLL_SECONDS):
                return None

    def _speak(self, fault: list[Record]) -> None:
        """Put the error together, from the logs of all who stand still as well."""
        logs: dict[int, Record] = {}
        missing = list(self._ranks)
        for rank in missing:
            self._board.compare_and_set(f"rank/{rank}", None, None)  # so that all can be read at once
        for poll in range(SPEAKER_POLLS):
            self._board.write("speaker", [self._rank, poll])
            notes = zip(missing, self._board.read_all([f"rank/{rank}" for rank in missing]), strict=True)
            logs |= {rank: Record.unpack(packed) for rank, packed in notes if packed is not None}
            missing = [rank for rank in missing if rank not in logs]
            if not missing or self._closed.wait(POLL_SECONDS):
                break
        error = _verdict(fault, logs, self._ranks)
        self._board.write("said", [type(error).__name__, str(error)])

    def _said(self) -> TrainerError | None:
        said = self._board.read("said")
        return None if said is None else _FAMILY[said[0]](said[1])


def _verdict(fault: Sequence[Record], logs: Mapping[int, Record], ranks: Sequence[int]) -> TrainerError:
    known = {**{record.rank: record for record in fault}, **logs}
    places = places_of(list(known.values())) or places_of(fault)  # a log may have gone on, and forgotten the place
    where = describe(places)
    unknown = sorted(set(ranks) - places.keys())
    if unknown:
        where += f" (nothing is known of {ranges(unknown)})"
    if any(what in (FAILED, INTERRUPTED) for what, _ in places.values()):
        return PeerError(f"{where}, so that the ranks would wait for each other for ever: {_RESUME}")
    return ConfigError(f"the ranks do not do the same, and would wait for each other for ever: {where}"
                       f"{different_remarks(list(known.values()))}; {_REMEDY}")
