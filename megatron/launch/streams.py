"""Standard streams that were closed before the program began (`>&-`): what is written to them goes nowhere.

Python has None in their place, which no program expects, and the next file to be opened gets a stream's number: error
lines would land in it. Not here: streams that fail later (a full disk, a reader that leaves).
"""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """To be called before a command opens anything: a file gets the lowest number that is free, here the stream's own.
    Programs that it starts inherit it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8", errors="replace")
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
