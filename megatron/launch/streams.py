"""Standard streams: UTF-8 whatever the locale says, as files are; those closed before the start (`>&-`) go nowhere.

In place of a closed stream Python has None, and the next file to be opened gets its number: error lines would land in
it. Not here: streams that fail later (a full disk, a reader that leaves).
"""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """To be called before a command opens anything: a file gets the lowest number that is free, here the stream's own.
    Programs that it starts inherit it. What is no text, as a file name may be, is printed with backslashes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream, errors = getattr(sys, name), "surrogateescape" if mode == "r" else "backslashreplace"
        if stream is None:
            nowhere = open(os.devnull, mode, encoding="utf-8", errors=errors)
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper) and (stream.encoding, stream.errors) != ("utf-8", errors):
            stream.reconfigure(encoding="utf-8", errors=errors)
