"""An ordered map over processes that keeps the order, does not hang on a dead worker, and leaves no worker behind.

Results wait for their turn, and if many do, no new item is sent. A worker that dies raises an error. A worker whose
parent dies exits.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from data.storage import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PENDING_PER_WORKER = 4  # items per worker that are in progress or wait for their turn


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)` in `workers` processes (1: in this one). The function and its results are pickled."""
    if workers <= 1:
        yield from map(function, items)
        return
    # Spawned, not forked: the caller may have threads.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (function,)) as pool:
        try:
            yield from ordered_results(lambda item: pool.submit(_call_worker_function, item), items,
                                       MAX_PENDING_PER_WORKER * workers)
        except BrokenProcessPool as gone:
            raise DataError("a worker process died; out of memory, perhaps: fewer --workers need less") from gone
        finally:
            for process in list((pool._processes or {}).values()):  # also those in the middle of an item
                process.terminate()


def ordered_results(submit: Callable[[Item], Future[Result]], items: Iterable[Item], in_flight: int
                    ) -> Iterator[Result]:
    """The results of submitted items in order. While `in_flight` wait for their turn, no further item is submitted."""
    pending = deque[Future[Result]]()
    for item in items:
        pending.append(submit(item))
        while pending and (pending[0].done() or len(pending) > in_flight):
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


_WORKER_FUNCTION: list[Callable[[Any], Any]] = []  # of this worker process, which receives it once


def _start_worker(function: Callable[[Any], Any]) -> None:
    _WORKER_FUNCTION.append(function)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    parent.join()
    os._exit(0)


def _call_worker_function(item: Any) -> Any:
    return _WORKER_FUNCTION[0](item)


def call_within(function: Callable[[Item], Result], item: Item, seconds: float, memory: int) -> Result | None:
    """`function(item)` in a forked process limited to `seconds` of CPU time and `memory` more bytes; None if it exceeds
    them. For C libraries, which cannot be interrupted otherwise."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def limited() -> tuple[Result | None, Exception | None]:
        try:
            (used, *_), (_, most) = Path("/proc/self/statm").read_text().split(), resource.getrlimit(resource.RLIMIT_AS)
            limit = int(used) * resource.getpagesize() + memory
            # close all descriptors: locks must not outlive their owner, and a C library may print
            os.closerange(0, theirs.fileno())
            os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
            return function(item), None
        except Exception as error:
            return None, error

    try:
        child = os.fork()
    except OSError as failed:
        raise DataError(f"cannot start a process: {failed.strerror}") from failed
    if child == 0:
        try:
            theirs.send(limited())
        finally:
            os._exit(0)
    theirs.close()
    try:
        answer, error = ours.recv()
    except EOFError:
        return None
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
