"""What the command lines of this package share: one-line errors, exit codes, progress.

Exit codes: 0 done, 2 usage, 3 data, 7 storage, 130 interrupted. Every failure prints one line beginning `error:`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from data.storage import DataError, StorageFault


class Parser(argparse.ArgumentParser):
    """argparse whose usage errors are one line and whose flags are never abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"error: {self.prog}: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def run(main: Callable[[], None]) -> NoReturn:
    """Run a command and leave with its exit code."""
    try:
        main()
    except (DataError, StorageFault, KeyboardInterrupt) as error:
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        sys.exit(3 if isinstance(error, DataError) else 7 if isinstance(error, StorageFault) else 130)
    sys.exit(0)


class Progress:
    """Counts documents and bytes, and says how fast they go."""

    def __init__(self, interval: int) -> None:
        self._interval, self._next = interval, interval
        self._start = time.monotonic()
        self.documents, self.bytes = 0, 0

    def add(self, documents: int, size: int) -> None:
        """Prints a line whenever another `interval` documents are complete (0: never)."""
        self.documents += documents
        self.bytes += size
        if self._interval and self.documents >= self._next:
            self._next = self.documents - self.documents % self._interval + self._interval
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return (f"{self.documents} documents in {seconds:.1f} s: {self.documents / seconds:.0f} documents/s, "
                f"{self.bytes / seconds / 1e6:.2f} MB/s")
