"""Which of the ranks of a node says an error that all of them end with.

Our launcher hears every rank and passes one line on; under torchrun, srun and mpirun each rank writes to the user by
itself. There the first that has something to say takes a name for it, and others, which find the name taken, are
silent. It goes for errors before the ranks have met as well, and nobody waits for anybody: the speaker keeps the name
for a moment, in which others that end for the same reason come.

The name is a socket's, in Linux's abstract name space: it is gone with its process. On other systems, where there are
no such names, all speak; so does one rank of each node.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from megatron.errors import ConfigError
from megatron.launch.distributed import read_environment

LINGER_SECONDS = 2.0
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
                 "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""What the environments of one job have in common, and those of two jobs have not."""

_CLAIMED_SOCKETS: list[socket.socket] = []
"""Of the process, as its standard error is."""


def is_error_reporter(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether no other rank of this node says the same."""
    if _CLAIMED_SOCKETS:
        return False  # this process has said why it ends
    if "MEGATRON_LAUNCHER" in environ or not _has_local_peers(environ):
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(_socket_name(text, environ))
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    _CLAIMED_SOCKETS.append(claim)
    return True


def linger(code: int) -> None:
    """To be called by a process that ends with this code, also if its launcher grows impatient."""
    if _CLAIMED_SOCKETS:
        with suppress(ValueError):  # only the main thread can
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(LINGER_SECONDS)


def _has_local_peers(environ: Mapping[str, str]) -> bool:
    try:
        return read_environment(environ).local_world_size > 1
    except ConfigError:
        return False


def _socket_name(text: str, environ: Mapping[str, str]) -> bytes:
    """The same error on two ranks may name them."""
    job = [str(os.getuid()), *(environ.get(name, "") for name in JOB_VARIABLES)]
    what = "\n".join([*job, re.sub(r"\brank \d+", "rank", text)])
    return b"\0megatron-error-" + hashlib.sha256(what.encode(errors="backslashreplace")).hexdigest().encode()
