"""`StoreKV`: JSON values in the c10d store of the default process group, readable while a collective hangs.

It uses a connection of its own, because torch's may be blocked. No call waits for another rank. If the process that
hosts the store is gone, every method raises RuntimeError; `reconnect` replaces a failed connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

STORE_TIMEOUT = timedelta(seconds=10)


class _StoreConnection:
    """One connection for all StoreKVs of a process: the store's host needs a file descriptor for each."""

    def __init__(self, known: dist.Store) -> None:
        self.is_unusable = False
        self.connect(known)

    def connect(self, known: dist.Store) -> None:
        """Connect to the host of the store `known`."""
        self.store = known.clone()  # type: ignore[attr-defined]
        self.store.set_timeout(STORE_TIMEOUT)


# torch's store -> our connection; the entry goes with the process group.
_CONNECTION_OF_STORE: WeakKeyDictionary[dist.Store, _StoreConnection] = WeakKeyDictionary()


class StoreKV:
    """`name` must be unique in the run. Raises RuntimeError if no connection is possible."""

    def __init__(self, name: str) -> None:
        known = distributed_c10d._get_default_store()
        if known not in _CONNECTION_OF_STORE:
            _CONNECTION_OF_STORE[known] = _StoreConnection(known)
        self._name, self._connection = name, _CONNECTION_OF_STORE[known]
        self._failed: dist.Store | None = None

    @property
    def is_unusable(self) -> bool:
        return self._connection.is_unusable

    def reconnect(self) -> None:
        """Reconnect after an error: a failed connection never works again."""
        if self._failed is not None and self._connection.store is self._failed:  # no other StoreKV has done so
            self._connection.connect(self._failed)

    @contextmanager
    def _store_request(self) -> Iterator[dist.Store]:
        if self.is_unusable:
            raise RuntimeError("a message could not be written to the store")
        own = self._connection.store
        try:
            yield dist.PrefixStore(self._name, own)
        except RuntimeError as error:
            self._failed = own
            # A write to a FileStore that fails half way leaves half a message, which every later read would meet.
            if isinstance(error, dist.DistStoreError):
                while isinstance(own, dist.PrefixStore):
                    own = own.underlying_store
                self._connection.is_unusable = isinstance(own, dist.FileStore)
            raise

    def read(self, key: str) -> Any:
        """The value, or None if there is none."""
        with self._store_request() as store:
            return json.loads(store.get(key)) if store.check([key]) else None

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """These values in one request; every key must have been written (None is enough)."""
        with self._store_request() as store:
            return [json.loads(value) for value in store.multi_get(list(keys))]

    def write(self, key: str, value: Any) -> None:
        with self._store_request() as store:
            store.set(key, json.dumps(value))

    def compare_and_set(self, key: str, old: Any, new: Any) -> bool:
        """Write if the value is still `old` (None: missing); False if another process wrote first."""
        text = json.dumps(new)
        with self._store_request() as store:
            # The store returns what it holds now: our text if the write took place.
            return bool(store.compare_set(key, "" if old is None else json.dumps(old), text) == text.encode())

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter that starts at 0; returns the new value."""
        with self._store_request() as store:
            return store.add(key, amount)
