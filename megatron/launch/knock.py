"""Wait until rank 0 listens where the ranks meet, and say why it does not: torch retries in silence, and prints its own
stack when it gives up. Standard library only."""

from __future__ import annotations

import socket
import time

from megatron.errors import PeerError

RETRY_SECONDS = 0.2
SLOWEST_SECONDS = 2.0
"""From one knock to the next, at first and after a while: many ranks may wait for long."""


def wait_until_listening(address: str, port: int, seconds: float) -> None:
    """A PeerError where nobody does within this time."""
    until, pause = time.monotonic() + seconds, RETRY_SECONDS
    while True:
        reason = _knock(address, port, max(0.1, min(5.0, until - time.monotonic())))
        if reason is None:
            return
        if time.monotonic() + pause >= until:
            raise PeerError(
                f"rank 0 did not answer at {address}:{port} within {seconds:g} s ({reason}): look for its "
                "error, and whether all ranks were started with the same MASTER_ADDR and MASTER_PORT")
        time.sleep(pause)
        pause = min(1.5 * pause, SLOWEST_SECONDS)


def _knock(address: str, port: int, seconds: float) -> str | None:
    """Why nobody answers."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            if connection.getsockname() != connection.getpeername():
                return None
            return "nobody listens there"  # it met itself, on a port that was free
    except OSError as error:
        return error.strerror or str(error)
