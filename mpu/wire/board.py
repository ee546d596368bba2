"""Board: notes that ranks leave for each other without meeting, in the store through which torch's ranks have met.

Nothing here waits for another rank, so it can be asked while an exchange hangs. The connection is one of its own: that
of torch may be in use. A note is a JSON value. Where the rank (or the launcher) that keeps the store is gone, every
method raises a RuntimeError. So does every one after a message that could not be written, without another look: a file
that ends in the midst of it would keep its reader for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

TIMEOUT = timedelta(seconds=10)


class Board:
    """`name` is one that no other board of the run has."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_cut_off = False
        self._connect(distributed_c10d._get_default_store())

    def _connect(self, known: dist.Store) -> None:
        self._own = known.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(self._name, self._own)
        self._store.set_timeout(TIMEOUT)

    def reconnect(self) -> None:
        """After an error: a connection that has failed once never works again."""
        self._connect(self._own)

    @contextmanager
    def _asking(self) -> Iterator[dist.Store]:
        if self.is_cut_off:
            raise RuntimeError("a message could not be written to the store")
        try:
            yield self._store
        except dist.DistStoreError:
            self.is_cut_off = _is_file(self._own)
            raise

    def read(self, key: str) -> Any:
        """The note, or None where there is none."""
        with self._asking() as store:
            return json.loads(store.get(key)) if store.check([key]) else None

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """All of these notes, in one message; every one must have been written (`None` will do)."""
        with self._asking() as store:
            return [json.loads(note) for note in store.multi_get(list(keys))]

    def write(self, key: str, note: Any) -> None:
        with self._asking() as store:
            store.set(key, json.dumps(note))

    def replace(self, key: str, old: Any, new: Any) -> bool:
        """Write where the note is still `old` (None: where there is none); False where somebody was faster."""
        text = json.dumps(new)
        with self._asking() as store:
            return bool(store.compare_set(key, "" if old is None else json.dumps(old), text) == text.encode())

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number that begins at 0, and is no note; returns what it is now."""
        with self._asking() as store:
            return store.add(key, more)


def _is_file(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)
