"""An ordered map over processes that neither reorders, nor hangs on a dead worker, nor leaves one behind.

Each worker has a pipe of its own and one item at a time; the next item goes to whoever is free. A result whose turn has
not come waits, and when many do, no item is given out. A worker that dies closes its pipe, which is an error at once;
`multiprocessing.Pool` waits for ever in that case. A worker whose parent dies sees its pipe close too, and ends.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from data.storage import Unfinished

Item = TypeVar("Item")
Result = TypeVar("Result")
Answer = tuple[Any, Exception | None]

AHEAD = 4
"""Items a worker that are under way or wait for their turn."""


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
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:  # now that all have been started: a large one is taken when a worker is up
            _send(pipe, function)
        yield from _in_order(items, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _in_order(items: Iterable[Any], pipes: Sequence[Connection]) -> Iterator[Any]:
    free, at_work = deque(pipes), dict[Connection, int]()
    answers: dict[int, Answer] = {}
    given = turn = 0  # items given to a worker, results handed on

    def collect() -> None:
        for pipe in wait(list(at_work)):
            assert isinstance(pipe, Connection)
            answers[at_work.pop(pipe)] = _receive(pipe)
            free.append(pipe)

    def results(most: int) -> Iterator[Any]:
        """Those whose turn has come; waits for more while more than `most` items are without theirs."""
        nonlocal turn
        while turn in answers or given - turn > most:
            if turn in answers:
                result, error = answers.pop(turn)
                if error is not None:
                    raise error
                yield result
                turn += 1
            else:
                collect()

    for item in items:
        if not free:
            collect()
        at_work[pipe := free.popleft()] = given
        _send(pipe, item)  # before results are used: the worker goes on meanwhile
        given += 1
        yield from results(AHEAD * len(pipes))
    yield from results(0)


def _send(pipe: Connection, item: object) -> None:
    try:
        pipe.send(item)
    except OSError as gone:
        raise _died() from gone


def _receive(pipe: Connection) -> Answer:
    try:
        answer: Answer = pipe.recv()
    except (EOFError, OSError) as gone:
        raise _died() from gone
    return answer


def _died() -> Unfinished:
    return Unfinished("a worker process died; out of memory, perhaps: fewer --workers need less")


def _work(pipe: Connection) -> None:
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent is done, or gone
        function = pipe.recv()
        while True:
            pipe.send(_answer(function, pipe.recv()))


def _answer(function: Callable[[Any], object], item: object) -> Answer:
    try:
        return function(item), None
    except Exception as error:
        return None, error
