"""A program at a terminal of its own: what a person types, and what they see.

    with AtTerminal([sys.executable, "-m", "megatron.generate", ...]) as program:
        program.sees("> ")
        program.types("hello\\n")
        program.presses("C")              # Ctrl-C
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final


@final
class AtTerminal:
    def __init__(self, command: Sequence[str], environ: Mapping[str, str], limit: float = 30) -> None:
        """`limit`: seconds that anything may take."""
        self._ours, theirs = pty.openpty()
        self._limit, self._seen = limit, b""

        def sit_down() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is for the programs of this terminal

        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environ),
                                        preexec_fn=sit_down)
        os.close(theirs)

    def __enter__(self) -> AtTerminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self.hangs_up()

    def hangs_up(self) -> None:
        """The terminal is gone."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def presses(self, letter: str) -> None:
        """With Ctrl."""
        self.types(chr(ord(letter) - ord("@")))

    def sees(self, text: str) -> str:
        """What comes up to and with `text`, which is waited for; line ends as a program wrote them."""
        return self._waits(lambda shown: shown.find(text) + len(text) if text in shown else 0, repr(text))

    def sees_more(self, count: int) -> str:
        """The next characters, so many."""
        return self._waits(lambda shown: count if len(shown) >= count else 0, f"{count} characters")

    def _waits(self, there: Callable[[str], int], what: str) -> str:
        """What is shown, up to where `there` says that it is."""
        until = time.monotonic() + self._limit
        while not (end := there(self._shown)):
            assert time.monotonic() < until, f"{what} did not come, but: {self._shown!r}"
            assert self._reads(0.2) or self.process.poll() is None, f"ended before {what}: {self._shown!r}"
        found = self._shown[:end]
        self._seen = self._shown[end:].encode()
        return found

    def ends(self) -> tuple[int, str]:
        """Its exit code, and what came last."""
        until = time.monotonic() + self._limit
        while self.process.poll() is None:
            assert time.monotonic() < until, f"did not end: {self._shown!r}"
            self._reads(0.1)
        while self._reads(0.0):
            """what is left"""
        return self.process.returncode, self._shown

    @property
    def _shown(self) -> str:
        return self._seen.decode("utf-8", "replace").replace("\r\n", "\n")

    def _reads(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # nobody has the terminal open any longer
            return False
        self._seen += chunk
        return bool(chunk)
