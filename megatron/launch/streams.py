"""Standard streams that were closed before the program began (`>&-`): what is written to them goes nowhere.

Python has None in their place, which no program expects, and the next file to be opened gets a stream's number: error
lines would land in it. Not here: streams that fail later (a full disk, a reader that leaves). `data` has the same file:
it is usable alone, and here nothing of it may be imported before it is known to be ours.
"""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """To be called before a command opens anything. Programs that it starts inherit the streams."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            if not _is_open(number):
                _open_nowhere(number)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="replace"))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _open_nowhere(number: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(opened, number)
        os.close(opened)
