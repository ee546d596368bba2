"""Threads that work off pieces of work in the order given: some at the disk, some beside it.

A piece takes a *slot* for the time it needs the disk and does the rest, such as a checksum, without one. With more
threads than slots the disk is busy while pieces are prepared and checked; pieces then end in no certain order.

The threads are daemons: neither a disk that hangs nor work that is queued keeps a process alive.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import BoundedSemaphore, RLock, Thread, current_thread
from typing import final

IoTask = Callable[[], None]
"""Raises nothing: there is nobody to catch it."""


@final
class IoThreadPool:
    def __init__(self, name: str, slots: int, extra_threads: int) -> None:
        """So many pieces at the disk at a time, and so many more beside it."""
        self.io_slots = BoundedSemaphore(slots)
        self._name, self._num_threads = name, slots + extra_threads
        self._queue: SimpleQueue[IoTask | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._lock = RLock()

    def submit(self, task: IoTask) -> None:
        with self._lock:
            self._start_threads()
            if self._threads:
                return self._queue.put(task)
        return task()  # stopped, or no thread can be had: the interpreter is ending, for one

    def stop(self, timeout: float) -> bool:
        """Let the threads end when the queue is empty; False if they have not within `patience` seconds or so. Pieces
        that come later are worked off by whoever puts them."""
        with self._lock:
            threads, self._threads, self._num_threads = self._threads, [], 0
            for _ in threads:
                self._queue.put(None)
        others = [thread for thread in threads if thread is not current_thread()]  # the garbage collector runs anywhere
        for thread in others:
            thread.join(timeout)
            timeout = timeout if not thread.is_alive() else 0.0
        return not any(thread.is_alive() for thread in others)

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads:
            thread = Thread(target=_run_tasks, args=(self._queue,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._num_threads = len(self._threads)
            else:
                self._threads.append(thread)


def _run_tasks(queue: SimpleQueue[IoTask | None]) -> None:
    """Refers to nothing but the queue while it waits: what made the pieces may be let go meanwhile."""
    while (piece := queue.get()) is not None:
        piece()
        del piece


@final
class IoThreadPools:
    """One of each kind, for all files of a folder: a read that is waited for does not stand behind writes."""

    def __init__(self, slots: int, extra_threads: int) -> None:
        self.read, self.write = IoThreadPool("tiles: reads", slots,
                                             extra_threads), IoThreadPool("tiles: writes", slots, extra_threads)

    def stop(self, timeout: float) -> bool:
        ended = self.read.stop(timeout)
        return self.write.stop(timeout if ended else 0.0) and ended
