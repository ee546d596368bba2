"""How far it is, on standard error: a line that is written over on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import final

ERASE_LINE = "\r\x1b[K"


@final
class Progress:
    def __init__(self, speaks: bool, pause: float = 10.0) -> None:
        """`pause`: seconds between lines that stay."""
        self._speaks, self._is_terminal = speaks, sys.stderr.isatty()
        self._pause = 0.1 if self._is_terminal else pause
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._speaks or now - self._last < self._pause and not (self._is_terminal and done == total):
            return
        self._last = now
        if done == total:
            self._write(ERASE_LINE if self._is_terminal else "")
            return
        left = (now - self._began) / done * (total - done)
        line = f"{done:,} of {total:,} batches, {left:.0f} s left"
        self._write(f"{ERASE_LINE}{line}" if self._is_terminal else f"{line}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
