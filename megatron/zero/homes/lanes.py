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

Piece = Callable[[], None]
"""Raises nothing: there is nobody to catch it."""


@final
class Lane:
    def __init__(self, name: str, slots: int, beside: int) -> None:
        """So many pieces at the disk at a time, and so many more beside it."""
        self.slots = BoundedSemaphore(slots)
        self._name, self._wanted = name, slots + beside
        self._queue: SimpleQueue[Piece | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._lock = RLock()

    def put(self, piece: Piece) -> None:
        with self._lock:
            self._start()
            if self._threads:
                return self._queue.put(piece)
        return piece()  # stopped, or no thread can be had: the interpreter is ending, for one

    def stop(self, patience: float) -> bool:
        """Let the threads end when the queue is empty; False if they have not within `patience` seconds or so. Pieces
        that come later are worked off by whoever puts them."""
        with self._lock:
            threads, self._threads, self._wanted = self._threads, [], 0
            for _ in threads:
                self._queue.put(None)
        others = [thread for thread in threads if thread is not current_thread()]  # the garbage collector runs anywhere
        for thread in others:
            thread.join(patience)
            patience = patience if not thread.is_alive() else 0.0
        return not any(thread.is_alive() for thread in others)

    def _start(self) -> None:
        while len(self._threads) < self._wanted:
            thread = Thread(target=_work_off, args=(self._queue,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._wanted = len(self._threads)
            else:
                self._threads.append(thread)


def _work_off(queue: SimpleQueue[Piece | None]) -> None:
    """Refers to nothing but the queue while it waits: what made the pieces may be let go meanwhile."""
    while (piece := queue.get()) is not None:
        piece()
        del piece


@final
class Lanes:
    """One of each kind, for all files of a folder: a read that is waited for does not stand behind writes."""

    def __init__(self, slots: int, beside: int) -> None:
        self.read, self.write = Lane("tiles: reads", slots, beside), Lane("tiles: writes", slots, beside)

    def stop(self, patience: float) -> bool:
        ended = self.read.stop(patience)
        return self.write.stop(patience if ended else 0.0) and ended
