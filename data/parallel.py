"""An ordered map over processes that keeps the order, does not hang on a dead worker, and leaves no worker behind.

Each worker has its own pipe and one item at a time, for which a thread waits; a free worker gets the next item. Results
wait for their turn, and if many do, no new item is sent. A worker that dies closes its pipe, which raises an error;
`multiprocessing.Pool` would wait forever. A worker whose parent dies sees its pipe close and exits.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from data.storage import ResumableError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PENDING_PER_WORKER = 4  # items per worker that are in progress or wait for their turn


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)` in `workers` processes (1: in this one). The function and its results are pickled."""
    if workers <= 1:
        yield from map(function, items)
        return
    # Spawned, not forked: the caller may have threads, and a forked child would inherit the pipes of the others.
    context = multiprocessing.get_context("spawn")
    processes = []
    new, free = set[Connection](), SimpleQueue[Connection]()  # pipes to workers: without the function, without an item
    pending = deque[Future[Any]]()

    def call(pipe: Connection, item: Item) -> Any:
        try:
            if pipe in new:  # not an argument of the process: all start before the first has received a large function
                new.discard(pipe)
                pipe.send(function)
            pipe.send(item)
            result, error = pipe.recv()
        except (EOFError, OSError) as gone:
            raise ResumableError("a worker process died; out of memory, perhaps: fewer --workers need less") from gone
        finally:
            free.put(pipe)
        if error is not None:
            raise error
        return result

    with ThreadPoolExecutor(workers, "worker-pipe") as threads:
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_worker_loop, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                new.add(ours)
                free.put(ours)
                processes.append(process)
            for item in items:
                pending.append(threads.submit(call, free.get(), item))
                while pending and (pending[0].done() or len(pending) > MAX_PENDING_PER_WORKER * workers):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for process in processes:
                process.terminate()  # which ends the threads that wait for it
                process.join()


def _worker_loop(pipe: Connection) -> None:
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent has finished or died
        function = pipe.recv()
        while True:
            pipe.send(_call_function(function, pipe.recv()))


def _call_function(function: Callable[[Any], object], item: object) -> tuple[Any, Exception | None]:
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
