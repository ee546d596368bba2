"""Ends a run whose ranks would deadlock, within seconds and with an error that names where each rank is.

A thread compares the log of its rank (collective_log.py) with the longest log of its group, through the store, when no
collective was recorded for some seconds. Only two logs that contradict each other end the run, never elapsed time.

Keys in the store: `longest/G` longest log of group G; `divergence` the two logs that contradict each other; `rank/R`
the log of rank R; `error`, composed by the rank that found the divergence; `acknowledged` how many ranks have read it.
The main thread may hang inside gloo or NCCL, so the watchdog exits the process itself, as NCCL's own watchdog does.
Not covered: killed ranks, and ranks of one tensor parallel group that differ.
"""

from __future__ import annotations

import atexit
import ctypes
import secrets
import sys
import time
import weakref
from contextlib import suppress
from functools import cache
from threading import Event, RLock, Thread
from typing import Any, Protocol

from megatron.distributed import exit_codes, process_group
from megatron.distributed.collective_log import (ENDED, FAILED, INTERRUPTED, CollectiveLog, CollectiveLogSnapshot,
                                                 describe_positions, describe_setting_differences, divergence_positions,
                                                 logs_diverged)
from megatron.distributed.rank_text import format_ranks
from megatron.distributed.signals import write_lines
from megatron.errors import ConfigError, PeerError, TrainerError
from mpu import collective_tracker
from mpu.collectives import broadcast_json
from mpu.groups import Groups
from mpu.store import StoreKV

CHECK_SECONDS = 1.0
CHECKS_BEFORE_COMPARING = 4  # checks without a new collective before a rank compares logs, and between comparisons
CHECKS_BEFORE_WAIT_NOTE = 60  # checks without a new collective after which one waiting rank prints a note for all
POLL_SECONDS = 0.2
EXIT_GRACE_SECONDS = 1.5  # seconds after success for the other ranks to finish as well
MAX_FAILED_CHECKS = 5  # failed checks in a row after which a rank disables its watchdog
REPORTER_POLLS = 25  # polls for the logs of the other ranks, by the rank that reports the error
REPORTER_TIMEOUT_POLLS = 40  # polls for the error by another rank, which then reports what it knows
ROOT_CAUSE_POLLS = 6  # polls for the root cause of a lost peer
TERMINATE_DELAY_SECONDS = 15.0  # before gloo's std::terminate: time to print the error

_ERROR_CLASSES = {cls.__name__: cls for cls in (ConfigError, PeerError)}
_REMEDY = ("every data parallel rank must run the same blocks in the same order (at ZeRO stage 3), and as many "
           "forwards, backwards and steps: give every rank as many batches, and draw alike what is random in the "
           "forward (layer drop)")
_STORE_LOST = ("the ranks wait for each other forever, and the one that hosts the store has left before this one read "
               "the error")
_RESUME = "look for the first failure among the ranks, then start the same command to resume"


class WatchedEngine(Protocol):
    log: CollectiveLog
    groups: Groups


def start_watchdog(engine: WatchedEngine) -> None:
    """Watch `engine` until it is freed. Collective. Without a second connection to the store, only print a note."""
    groups = engine.groups
    if groups.dp.is_solo:
        return
    name = broadcast_json(secrets.token_hex(8), groups.world)
    try:
        store = StoreKV(f"watch/{name}")
    except RuntimeError as error:
        note_missing_watchdog(groups.world.rank, error)
        return
    if groups.dp.own_backend_serves_cpu:
        _delay_gloo_terminate()
    watchdog = DesyncWatchdog(engine.log, groups, store)
    engine.log.raise_root_cause = watchdog.raise_root_cause
    weakref.finalize(engine, watchdog.mark_finished)
    process_group.before_shutdown(watchdog.close)
    exit_codes.before_failure(watchdog.mark_failed)
    watchdog.start()


def note_missing_watchdog(rank: int, error: RuntimeError) -> None:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    write_lines(f"note: ranks that wait for each other forever end by the time-out only, because rank {rank} has "
                f"no second connection to the store where they met ({why:.200}); see docs/launch.md\n".encode())


@cache
def _delay_gloo_terminate() -> None:
    """Delay the std::terminate that gloo triggers, so that our error is printed first. No effect with another C++
    library."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return
    handler_type = ctypes.CFUNCTYPE(None)
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def delayed_terminate() -> None:
        Event().wait(TERMINATE_DELAY_SECONDS)
        handler_type(previous_handler)()

    handler = handler_type(delayed_terminate)
    previous_handler = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    # Reset it at exit: no Python runs in other threads during finalization. The lambda also keeps `handler` alive.
    atexit.register(lambda: handler and set_terminate(previous_handler))


class DesyncWatchdog:
    def __init__(self, log: CollectiveLog, groups: Groups, store: StoreKV) -> None:
        self._log, self._store = log, store
        self._rank, self._ranks = groups.world.rank, groups.dp.ranks
        self._group = self._ranks[0]  # names the group
        self._world_size = groups.world.size
        self._divergence_is_known = False
        self._closed = Event()
        self._report_lock = RLock()  # the holder prints or raises the error
        self._thread = Thread(target=self._run, name="zero-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def mark_finished(self) -> None:
        """The engine is freed: record that no collective follows. Does not join the thread, which informs the other
        ranks: garbage collection runs at a different time on each rank, so ranks would wait for each other."""
        failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
        if not self._log.is_finished:
            self._log.record_collective(FAILED if failed else ENDED)
        self._closed.set()

    def close(self) -> None:
        """Finish before the program, and perhaps the store, ends."""
        self.mark_finished()
        self._thread.join(timeout=2)

    def mark_failed(self) -> None:
        """This rank fails and exits without destructors: publish its end to waiting ranks."""
        self.close()
        self._acknowledge_error(0)

    def raise_root_cause(self, error: BaseException) -> None:
        """Raise the divergence error, if there is one, in place of torch's error that a peer is lost."""
        if not exit_codes.is_peer_loss(error):
            return
        for _ in range(ROOT_CAUSE_POLLS):
            try:
                divergence_error = self.compare_logs()
            except RuntimeError:  # the store is gone with the peer
                return
            if divergence_error is not None:
                self._report_lock.acquire()
                self._acknowledge_error()
                raise divergence_error from error
            self._closed.wait(POLL_SECONDS)

    def _run(self) -> None:
        count, idle_checks, failures = -1, 0, 0
        while not self._closed.wait(CHECK_SECONDS) and not self._log.is_finished:
            idle_checks += 1
            if count != self._log.entry_count:
                count, idle_checks = self._log.entry_count, 0
                continue
            if idle_checks == CHECKS_BEFORE_WAIT_NOTE and collective_tracker.is_waiting():
                with suppress(RuntimeError):
                    self._note_long_wait(idle_checks)
            if idle_checks % CHECKS_BEFORE_COMPARING == 0:
                try:
                    self._exit_with(self.compare_logs())
                    failures = 0
                except RuntimeError as error:  # the store is gone, or only this connection
                    if self._store.is_unusable and not self._log.is_finished:
                        reason = exit_codes.exit_reason_of(error)
                        exit_codes.exit_with_error(reason.text, reason.code)
                    failures += 1
                    if self._divergence_is_known:
                        self._exit_with(PeerError(f"{_STORE_LOST}: {_RESUME}"))
                    if failures == MAX_FAILED_CHECKS:
                        return note_missing_watchdog(self._rank, error)
                    with suppress(RuntimeError):
                        self._store.reconnect()
        with suppress(RuntimeError):
            self.compare_logs()  # publishes that nothing follows on this rank
            self._keep_store_alive(self._store.add("acknowledged"), EXIT_GRACE_SECONDS)

    def _note_long_wait(self, idle_checks: int) -> None:
        """Print where the ranks wait. No error: a rank may be in a collective of the script itself, and still come."""
        if self._store.add(f"wait_note/{self._log.entry_count}", 1) == 1:
            what, purpose = self._log.snapshot(self._rank).current_position
            where = f"{what} ({purpose})" if purpose else what
            write_lines(f"note: rank {self._rank} has waited {idle_checks * CHECK_SECONDS:.3g} s at {where} for ranks "
                        "that are not there yet: every rank has to come to it\n".encode())

    def _exit_with(self, error: TrainerError | None) -> None:
        if error is not None and not self._log.is_finished and self._report_lock.acquire(blocking=False):
            self._acknowledge_error()
            exit_codes.exit_with_error(str(error), error.code)

    def _acknowledge_error(self, more: int = 1) -> None:
        """Count this rank as a reader of the error (0: it was counted before); the store's host waits for all."""
        with suppress(RuntimeError):
            self._keep_store_alive(self._store.add("acknowledged", more),
                                   (CHECKS_BEFORE_COMPARING + 2) * CHECK_SECONDS)

    def _keep_store_alive(self, acknowledged: int, seconds: float) -> None:
        """If this rank hosts the store, wait up to `seconds` for the other ranks to read it."""
        waited = 0.0
        while process_group.hosts_store() and acknowledged < self._world_size and waited < seconds:
            time.sleep(POLL_SECONDS)
            acknowledged, waited = self._store.add("acknowledged", 0), waited + POLL_SECONDS

    # ---- comparison through the store

    def compare_logs(self) -> TrainerError | None:
        """Compare logs through the store; returns the error if the run cannot go on, else None."""
        mine = self._log.snapshot(self._rank)
        if self._log.is_finished:
            self._store.write(f"rank/{self._rank}", mine.pack())
        divergence, is_reporter = self._store.read("divergence"), False
        if divergence is None:
            divergence = self._find_divergence(mine)
            if divergence is None:
                return None
            is_reporter = self._store.compare_and_set("divergence", None, divergence)
            if not is_reporter:
                divergence = self._store.read("divergence")
        if self._log.is_finished:
            return None
        self._divergence_is_known = True
        if divergence[0] != self._group:
            return self._reported_error()
        self._store.write(f"rank/{self._rank}", mine.pack())
        polls = 0
        while not is_reporter and polls < REPORTER_TIMEOUT_POLLS:
            error = self._reported_error()
            if error is not None:
                return error
            if self._closed.wait(POLL_SECONDS):
                return None
            polls += 1
        self._write_report([CollectiveLogSnapshot.unpack(log) for log in divergence[1]])
        return self._reported_error()

    def _find_divergence(self, mine: CollectiveLogSnapshot) -> list[Any] | None:
        """[group, two packed logs] if this log contradicts the longest one; else None, after storing the longer one."""
        key = f"longest/{self._group}"
        while True:
            packed = self._store.read(key)
            if packed is not None:
                longest = CollectiveLogSnapshot.unpack(packed)
                if longest == mine:
                    return None  # nothing to write: a FileStore grows with every write
                if logs_diverged(mine, longest):
                    return [self._group, [mine.pack(), packed]]
                if longest.entry_count > mine.entry_count or longest.entry_count == mine.entry_count \
                        and longest.rank != mine.rank:
                    return None
            if self._store.compare_and_set(key, packed, mine.pack()):
                return None

    def _write_report(self, divergence: list[CollectiveLogSnapshot]) -> None:
        """Collect the logs of all waiting ranks and store the error."""
        logs: dict[int, CollectiveLogSnapshot] = {}
        missing = list(self._ranks)
        for rank in missing:
            self._store.compare_and_set(f"rank/{rank}", None, None)  # multi_get needs every key to exist
        for _ in range(REPORTER_POLLS):
            received = zip(missing, self._store.read_all([f"rank/{rank}" for rank in missing]), strict=True)
            logs |= {rank: CollectiveLogSnapshot.unpack(packed) for rank, packed in received if packed is not None}
            missing = [rank for rank in missing if rank not in logs]
            if not missing or self._closed.wait(POLL_SECONDS):
                break
        known = {**{record.rank: record for record in divergence}, **logs}
        positions = (divergence_positions(list(known.values()))
                     or divergence_positions(divergence))  # newer logs may have overwritten the position
        where = describe_positions(positions)
        if unknown := sorted(set(self._ranks) - positions.keys()):
            where += f" (nothing is known of {format_ranks(unknown)})"
        if any(what in (FAILED, INTERRUPTED) for what, _ in positions.values()):
            report = PeerError.__name__, f"{where}, so that the ranks would wait for each other forever: {_RESUME}"
        else:
            report = ConfigError.__name__, (
                "the ranks do not do the same, and would wait for each other forever: "
                f"{where}{describe_setting_differences(list(known.values()))}; {_REMEDY}")
        self._store.compare_and_set("error", None, report)

    def _reported_error(self) -> TrainerError | None:
        report = self._store.read("error")
        return None if report is None else _ERROR_CLASSES[report[0]](report[1])
