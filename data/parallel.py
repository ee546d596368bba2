"""An ordered map over processes that neither reorders, nor hangs on a dead worker, nor leaves one behind.

Item i goes to worker i mod n through a pipe of its own, and results are collected in the same turn: order costs
nothing, each worker holds one item at a time, and a worker that dies closes its pipe, which is an error at once.
`multiprocessing.Pool` waits for ever in that case. A worker whose parent dies sees its pipe close too, and ends.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from data.storage import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)` by `workers` processes (1: in this one). The function and its results are pickled."""
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
            process = context.Process(target=_work, args=(function, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        given = 0
        for given, item in enumerate(items, start=1):
            pipe = pipes[(given - 1) % workers]
            if given > workers:
                yield _receive(pipe)
            _send(pipe, item)
        for number in range(max(0, given - workers), given):
            yield _receive(pipes[number % workers])
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _send(pipe: Connection, item: object) -> None:
    try:
        pipe.send(item)
    except OSError as gone:
        raise _died() from gone


def _receive(pipe: Connection) -> Any:
    try:
        result, error = pipe.recv()
    except (EOFError, OSError) as gone:
        raise _died() from gone
    if error is not None:
        raise error
    return result


def _died() -> DataError:
    return DataError("a worker process died; out of memory, perhaps: fewer --workers need less")


def _work(function: Callable[[Any], object], pipe: Connection) -> None:
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent is done, or gone
        while True:
            pipe.send(_answer(function, pipe.recv()))


def _answer(function: Callable[[Any], object], item: object) -> tuple[object, Exception | None]:
    try:
        return function(item), None
    except Exception as error:
        return None, error
