"""One training job at a time saves into a folder: a second one would mix its tags with the first one's.

The lock is the kernel's (flock), so it goes with the process that holds it and a dead job blocks nobody. The file's
content only names the holder, for people. Rank 0 takes the lock at start-up, for the whole run. No torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.storage import letting_go
from megatron.checkpoint.commit import storing
from megatron.errors import ConfigError

LOCK = ".lock"


def _no_link(path: str, flags: int) -> int:
    """The file is emptied below: a symbolic link in its place must not lead to another one."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def locked(root: str | Path) -> Iterator[None]:
    """Hold the lock of the existing save root, or raise a ConfigError naming the holder."""
    path = Path(root) / LOCK
    with storing(path, 0):
        file = open(path, "a+", encoding="utf-8", errors="replace", opener=_no_link)
    with file, letting_go(file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = " ".join(file.read(200).split()) or "another process"
            raise ConfigError(f"--save {root}: locked by {holder}; stop it or choose another folder") from error
        with storing(path, 0):
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
