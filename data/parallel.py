"""An ordered map over processes that keeps the order, does not hang on a dead worker, and leaves no worker behind.

Each worker has its own pipe and one item at a time; a free worker gets the next item. Results wait for their turn, and
if many do, no new item is sent. A worker that dies closes its pipe, which raises at once; `multiprocessing.Pool` would
wait forever. A worker whose parent dies sees its pipe close and exits.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from data.storage import ResumableError

Item = TypeVar("Item")
Result = TypeVar("Result")
WorkerResult = tuple[Any, Exception | None]

MAX_PENDING_PER_WORKER = 4  # items per worker that are in progress or wait for their turn


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)` in `workers` processes (1: in this one). The function and its results are pickled."""
    if workers <= 1:
        yield from map(function, items)
        return
    # Spawned, not forked: the caller may have threads, and a forked child would inherit the pipes of the others.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker_loop, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:  # after all have started: a large function is received once a worker runs
            with _report_dead_worker():
                pipe.send(function)
        yield from _results_in_order(items, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _results_in_order(items: Iterable[Any], pipes: Sequence[Connection]) -> Iterator[Any]:
    free, busy = deque(pipes), dict[Connection, int]()
    finished: dict[int, WorkerResult] = {}
    num_sent = next_result = 0  # items sent, results yielded

    def collect() -> None:
        for pipe in wait(list(busy)):
            assert isinstance(pipe, Connection)
            with _report_dead_worker():
                finished[busy.pop(pipe)] = pipe.recv()
            free.append(pipe)

    def results(most: int) -> Iterator[Any]:
        """Results in order; waits while more than `most` items are outstanding."""
        nonlocal next_result
        while next_result in finished or num_sent - next_result > most:
            if next_result in finished:
                result, error = finished.pop(next_result)
                if error is not None:
                    raise error
                yield result
                next_result += 1
            else:
                collect()

    for item in items:
        if not free:
            collect()
        busy[pipe := free.popleft()] = num_sent
        with _report_dead_worker():
            pipe.send(item)  # before yielding, so that the worker is busy meanwhile
        num_sent += 1
        yield from results(MAX_PENDING_PER_WORKER * len(pipes))
    yield from results(0)


@contextmanager
def _report_dead_worker() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as gone:
        raise ResumableError("a worker process died; out of memory, perhaps: fewer --workers need less") from gone


def _worker_loop(pipe: Connection) -> None:
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent has finished or died
        function = pipe.recv()
        while True:
            pipe.send(_call_function(function, pipe.recv()))


def _call_function(function: Callable[[Any], object], item: object) -> WorkerResult:
    try:
        return function(item), None
    except Exception as error:
        return None, error


def call_within(function: Callable[[Item], Result], item: Item, seconds: float, memory: int) -> Result | None:
    """`function(item)` in a forked process limited to `seconds` of CPU time and `memory` more bytes; None if it exceeds
    them. For C libraries, which cannot be interrupted otherwise."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def limited(item: Item) -> Result:
        (used, *_), (_, most) = Path("/proc/self/statm").read_text().split(), resource.getrlimit(resource.RLIMIT_AS)
        limit = int(used) * resource.getpagesize() + memory
        # close all descriptors: locks must not outlive their owner, and a C library may print
        os.closerange(0, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        return function(item)

    try:
        child = os.fork()
    except OSError as failed:
        raise ResumableError(f"cannot start a process: {failed.strerror}") from failed
    if child == 0:
        try:
            theirs.send(_call_function(limited, item))
        finally:
            os._exit(0)
    theirs.close()
    try:
        answer: tuple[Result, Exception | None] = ours.recv()
    except EOFError:
        return None
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
