"""A connection to the launcher of another node: messages are JSON objects, one a line. Standard library only.

The kernel asks a silent peer for a sign of life, so that a machine that lost its power or its network ends the
connection as a process that is killed does. What comes from a stranger is bounded, and checked by who reads it.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any, final

LONGEST = 1 << 20
"""Bytes of a message: node 0 says about a hundred of each node, of thousands."""
LONGEST_TEXT = 16_000
"""Characters of an error that is sent: in JSON each is twelve bytes at most, so that a message is never too long."""
SEND_SECONDS = 5.0
QUIET_SECONDS, ASK_SECONDS, ASKED = 5, 5, 3
"""After so long without a word the peer is asked for one, so often and so many times."""


class Closed(Exception):
    """The other side has left, or says what no launcher says."""


@final
class Link:
    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._begun = connection, b""
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", QUIET_SECONDS), ("TCP_KEEPINTVL", ASK_SECONDS), ("TCP_KEEPCNT", ASKED),
                            ("TCP_USER_TIMEOUT", 1000 * (QUIET_SECONDS + ASK_SECONDS * ASKED))):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """A peer that has left will be noticed when it is read from."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come; to be called when there is something."""
        try:
            found = self._socket.recv(LONGEST)
        except OSError as error:
            raise Closed from error
        if not found:
            raise Closed
        *lines, self._begun = (self._begun + found).split(b"\n")
        if len(self._begun) > LONGEST:
            raise Closed
        return [_message(line) for line in lines]

    def close(self) -> None:
        """What was sent arrives: a connection that is closed with something unread is reset, and loses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(0)
            while self._socket.recv(LONGEST):
                pass
        self._socket.close()


def shortened(text: str) -> str:
    """What is sent of it: the beginning, which says what is wrong, and the end, which says what to do."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters are left out here) ... {text[-half:]}"


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Closed from error
    if not isinstance(found, dict):
        raise Closed
    return found
