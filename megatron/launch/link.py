"""A connection to the launcher of another node: messages are JSON objects, one a line. Standard library only.

The kernel asks a silent peer for a sign of life, so that a machine that lost its power or its network ends the
connection as a process that is killed does. What comes from a stranger is bounded, and checked by who reads it.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any, final

MAX_MESSAGE_BYTES = 1 << 20
"""Bytes of a message: node 0 says about a hundred of each node, of thousands."""
MAX_ERROR_TEXT = 16_000
"""Characters of an error that is sent: in JSON each is twelve bytes at most, so that a message is never too long."""
SEND_SECONDS = 5.0
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 5, 5, 3
"""After so long without a word the peer is asked for one, so often and so many times."""


class JsonConnectionClosed(Exception):
    """The other side has left, or says what no launcher says."""


@final
class JsonConnection:
    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._partial_line = connection, b""
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS), ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
                            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
                            ("TCP_USER_TIMEOUT",
                             1000 * (KEEPALIVE_IDLE_SECONDS + KEEPALIVE_INTERVAL_SECONDS * KEEPALIVE_PROBES))):
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
            found = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise JsonConnectionClosed from error
        if not found:
            raise JsonConnectionClosed
        *lines, self._partial_line = (self._partial_line + found).split(b"\n")
        if len(self._partial_line) > MAX_MESSAGE_BYTES:
            raise JsonConnectionClosed
        return [_parse_message(line) for line in lines]

    def close(self) -> None:
        """What was sent arrives: a connection that is closed with something unread is reset, and loses it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(0)
            while self._socket.recv(MAX_MESSAGE_BYTES):
                pass
        self._socket.close()


def shorten_error_text(text: str) -> str:
    """What is sent of it: the beginning, which says what is wrong, and the end, which says what to do."""
    if len(text) <= MAX_ERROR_TEXT:
        return text
    half = MAX_ERROR_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters are left out here) ... {text[-half:]}"


def _parse_message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise JsonConnectionClosed from error
    if not isinstance(found, dict):
        raise JsonConnectionClosed
    return found
