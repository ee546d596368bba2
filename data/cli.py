"""What the command lines of this package share: one-line errors, exit codes, progress.

Exit codes: 0 done, 2 usage, 3 data, 7 storage, 130 interrupted. Every failure prints one line beginning `error:`; a
reader of standard output that has seen enough (`| head`) ends a command quietly with 141, as it ends `yes`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from data.storage import DataError, StorageFault, UsageError


CODES = ((UsageError, 2), (DataError, 3), (StorageFault, 7), (KeyboardInterrupt, 130))


def typed(otherwise: str) -> str:
    """The command as it was typed: one of an installation's, or else `otherwise`."""
    name = os.path.basename(sys.argv[0])
    return name if name.startswith("gpt2-") else otherwise


class Parser(argparse.ArgumentParser):
    """argparse whose usage errors are one line and whose flags are never abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        if prog.startswith("data."):  # otherwise a command of a command, whose prog argparse makes
            prog = typed(f"python -m {prog}")
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"error: {self.prog.removeprefix('python -m ')}: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def counted(number: int, what: str) -> str:
    """`1 file`, `1,234 files`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _open_closed_streams() -> None:
    """What was closed before the program began (`2>&-`) goes nowhere; otherwise the next file to be opened gets the
    number of a standard stream, and error lines."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
            os.set_inheritable(getattr(sys, name).fileno(), True)  # for programs that it starts


def run(main: Callable[[], None]) -> NoReturn:
    """Run a command and leave with its exit code."""
    _open_closed_streams()
    code = 0
    try:
        try:
            main()
        except SystemExit as leaving:  # --help
            code = leaving.code if isinstance(leaving.code, int) else 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would try once more to write what is left in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except (DataError, StorageFault, KeyboardInterrupt) as error:
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        code = next(code for kind, code in CODES if isinstance(error, kind))
    sys.exit(code)


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
