"""Monitor the other nodes of a job: JSON messages and heartbeats between launchers. Standard library only.

Every launcher has a connection to node 0's, which forwards what it receives. A closed connection means a lost node; a
node without heartbeats is *silent* (stopped, suspended, swapping). A launcher that was paused itself detects that on
its own clock and blames no other node. The first exit of a node that is not a victim names the culprit on every node;
otherwise a silent node is blamed.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, final

from megatron.distributed.rank_text import format_ranks
from megatron.errors import EXIT_OK, EXIT_PEER

MAX_MESSAGE_BYTES = 1 << 20  # node 0 sends about a hundred bytes for each of thousands of nodes
MAX_ERROR_TEXT = 16_000  # characters of an error: JSON needs at most 12 bytes for each, less than MAX_MESSAGE_BYTES
SEND_SECONDS = 5.0
# TCP keepalive: seconds idle before the first probe, seconds between probes, number of probes
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 5, 5, 3


class JsonConnectionClosed(Exception):
    """The peer closed the connection, or sent something that no launcher sends."""


@final
class JsonConnection:
    """A connection to another launcher."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._partial_line = connection, b""
        self.last_received = self.last_sent = 0.0  # on boot_clock, for a NodeMonitor
        self.warned_at_seconds = 0.0  # silence in seconds at the last warning; 0.0: not warned
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

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Ignores a lost peer: the next `receive` reports it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(dict(message)).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Messages received; call it when the socket is readable. Raises JsonConnectionClosed."""
        try:
            received = self._socket.recv(MAX_MESSAGE_BYTES)
            *lines, self._partial_line = (self._partial_line + received).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise JsonConnectionClosed from error
        if not received or len(self._partial_line) > MAX_MESSAGE_BYTES or \
                not all(isinstance(message, dict) for message in messages):
            raise JsonConnectionClosed
        return messages

    def close(self) -> None:
        """Close without losing sent data: the kernel resets a connection closed with unread input, so read first."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(0)
            while self._socket.recv(MAX_MESSAGE_BYTES):
                pass
        self._socket.close()


def shorten_error_text(text: str) -> str:
    """Shorten a long error to its beginning (what is wrong) and its end (what to do)."""
    if len(text) <= MAX_ERROR_TEXT:
        return text
    half = MAX_ERROR_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters are left out here) ... {text[-half:]}"


HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0  # seconds without a heartbeat after which a node is silent, and blamed if ranks waited in vain
SILENCE_WARNING_SECONDS = 10.0  # silence before the first warning; each further one comes after twice as long
SLOW_HEARTBEAT_SECONDS = 60.0  # between heartbeats to a silent node: unread ones would fill the connection
RECENT_PAUSE_SECONDS = 1.0  # seconds after a pause of this launcher in which received messages date from the pause


def boot_clock() -> float:
    """Seconds on a clock that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


FAILURE, LEFT_EARLY, SILENT_SECONDS_KEY = "failure", "left_early", "silent_seconds"  # keys of messages
SILENCE_REPORT_SECONDS = 0.5  # seconds by which node 0 reports a silent node before the other launchers give up waiting
RESTART_ADVICE = "start the same command on every node to resume from the last checkpoint"


class Failure(IntEnum):
    """The worst failure among the ranks of a node, or of several."""

    NONE = 0
    VICTIM = 1  # a rank failed because of another rank
    CULPRIT = 2  # a rank failed by itself


@dataclass(frozen=True)
class NodeInfo:
    """What a launcher announces about its node."""

    node: int
    nodes: int
    ranks: int  # ranks per node
    host: str

    @property
    def description(self) -> str:
        ranks = format_ranks(range(self.node * self.ranks, (self.node + 1) * self.ranks))
        return f"node {self.node} ({self.host}, {ranks})"


@dataclass(frozen=True)
class NodeExit:
    """How the ranks of a node ended."""

    node_info: NodeInfo
    code: int
    error_line: str = ""  # empty if the node was lost
    is_victim: bool = False
    silent_seconds: float = 0.0  # if the node was given up; `error_line` then says what other nodes know

    @property
    def failure(self) -> Failure:
        return Failure.NONE if self.code == EXIT_OK else Failure.VICTIM if self.is_victim else Failure.CULPRIT

    def describe(self) -> str:
        if self.silent_seconds:
            return (f"error: {self.node_info.description} did not answer for {self.silent_seconds:.0f} "
                    f"s{self.error_line}; it is stopped or suspended, or it swaps; {RESTART_ADVICE}")
        if self.error_line:
            return f"error: {self.node_info.description}: {self.error_line.removeprefix('error: ')}"
        return (f"error: {self.node_info.description} is gone without a word: its launcher was killed, or the machine "
                f"or its network failed; {RESTART_ADVICE}")


@final
class NodeMonitor:
    def __init__(self, own: NodeInfo, connections: Mapping[int, JsonConnection] | None = None,
                 other_nodes: Mapping[int, NodeInfo] | None = None,
                 print_line: Callable[[str], None] = lambda line: None) -> None:
        """`connections`: node 0 has one per other node, every other node has one to node 0."""
        self._print_line, self._last_check = print_line, boot_clock()
        self._paused_seconds, self._resumed_at = 0.0, 0.0  # the last pause of this launcher, and when it ended
        # seconds that the other nodes missed this one before they ended the job without it; 0.0: they did not
        self.given_up_after_seconds = 0.0
        self._own, self._nodes = own, dict(other_nodes or {})
        self._peers = dict(connections or {})
        self._exits: dict[int, NodeExit] = {}  # exits of other nodes in order of arrival
        self._left_early: set[int] = set()
        self.others_failure = Failure.NONE  # of all other nodes together
        self._announced_failure = Failure.NONE
        self._selector = selectors.DefaultSelector()
        for node, peer in self._peers.items():
            peer.last_received = self._last_check
            self._selector.register(peer, selectors.EVENT_READ, node)

    def fileno(self) -> int:
        """epoll descriptor; readable when a message has arrived."""
        return self._selector.fileno()

    def send_heartbeats(self) -> None:
        """Send due heartbeats and print warnings. Call it often."""
        now, since_last = boot_clock(), boot_clock() - self._last_check
        self._last_check = now
        if since_last >= SILENT_SECONDS:  # this launcher was paused, and heard nothing meanwhile
            self._paused_seconds, self._resumed_at = since_last, now
            for peer in self._peers.values():
                peer.last_received, peer.warned_at_seconds = now, 0.0
            if since_last >= SILENCE_WARNING_SECONDS and self._peers:
                self._print_line(f"warning: the launcher of {self._own.description}, this node, did not run for "
                                 f"{since_last:.0f} s: it was stopped or suspended, or this machine swaps")
        for node, peer in self._peers.items():
            silence = now - peer.last_received
            if now - peer.last_sent >= (
                    SLOW_HEARTBEAT_SECONDS if silence >= SLOW_HEARTBEAT_SECONDS else HEARTBEAT_SECONDS):
                peer.last_sent = now
                peer.send({"heartbeat": True})
            if silence >= max(SILENCE_WARNING_SECONDS, 2 * peer.warned_at_seconds):
                peer.warned_at_seconds = silence
                self._print_line(
                    f"warning: the launcher of {self._nodes[node].description} has not answered for {silence:.0f} s: "
                    "it is stopped or suspended, or its machine swaps; the run goes on as long as its ranks do")

    @property
    def _recent_pause(self) -> float:
        """Length of a pause of this launcher that ended less than RECENT_PAUSE_SECONDS ago, else 0."""
        return self._paused_seconds if boot_clock() - self._resumed_at < RECENT_PAUSE_SECONDS else 0.0

    def receive(self, seconds: float = 0.0) -> None:
        """Process messages of other launchers, waiting up to `seconds` for the first."""
        self.send_heartbeats()
        for key, _ in self._selector.select(seconds):
            node, peer = key.data, self._peers[key.data]
            try:
                messages = peer.receive()
            except JsonConnectionClosed:
                self._selector.unregister(peer)
                peer.close()
                del self._peers[node]
                if node not in self._exits:
                    self._process_message({"node": node, "code": EXIT_PEER}, node)
                continue
            if peer.warned_at_seconds:
                self._print_line(f"note: the launcher of {self._nodes[node].description} answers again, after "
                                 f"{boot_clock() - peer.last_received:.0f} s")
            peer.last_received, peer.warned_at_seconds = boot_clock(), 0.0
            for message in messages:
                self._process_message(message, node)

    def _process_message(self, message: Mapping[str, Any], source: int) -> None:
        node, silent = message.get("node"), message.get(SILENT_SECONDS_KEY)
        if node == self._own.node and isinstance(silent, float):
            self.given_up_after_seconds = max(silent, self._recent_pause)
            self.others_failure = max(self.others_failure, Failure.VICTIM)
        if node not in self._nodes or node in self._exits:
            return
        if message.get(LEFT_EARLY) is True:
            self._left_early.add(node)
        elif FAILURE in message:
            is_culprit = message[FAILURE] == Failure.CULPRIT
            self.others_failure = max(self.others_failure, Failure.CULPRIT if is_culprit else Failure.VICTIM)
        else:
            code, error_line = message.get("code"), message.get("error_line")
            end = NodeExit(self._nodes[node], code if isinstance(code, int) else EXIT_PEER,
                           error_line if isinstance(error_line, str) else "", message.get("is_victim") is True,
                           silent if isinstance(silent, float) else 0.0)
            self._exits[node] = end
            if not end.error_line and not end.silent_seconds and end.failure \
                    and self._recent_pause >= SILENCE_WARNING_SECONDS:
                # the other side closed the connection during the pause
                self.given_up_after_seconds = self._recent_pause
            self.others_failure = max(self.others_failure, end.failure)
        for other, peer in self._peers.items():
            if other != source:
                peer.send(message)

    @property
    def others_are_running(self) -> bool:
        """Whether ranks of other nodes have neither ended nor left early."""
        return not self._nodes.keys() <= self._exits.keys() | self._left_early

    @property
    def failed_nodes(self) -> list[NodeExit]:
        """Failed nodes in order of arrival."""
        return [end for end in self._exits.values() if end.failure]

    def describe_absence(self, where: str) -> str:
        """The error line of a node that was paused while the others ended the job."""
        return (f"error: this node ({self._own.description.partition(' (')[0]}, {self._own.host}) was away for "
                f"{self.given_up_after_seconds:.0f} s{where}, and the job has ended without it; it was stopped or "
                f"suspended, or it swaps; {RESTART_ADVICE}")

    def wait_for_culprit(self, seconds: float, where: str = "") -> NodeExit | None:
        """The first node that failed without being a victim, if its launcher reports within `seconds`; else a silent
        node. `where` says where this node's ranks waited."""
        until = time.monotonic() + seconds - (SILENCE_REPORT_SECONDS if self._own.node == 0 else 0.0)
        while True:
            self.receive()
            for end in self.failed_nodes:
                if not end.is_victim:
                    return end
            left = until - time.monotonic()
            if left <= 0 or not self._peers:
                break
            self.receive(min(left, 0.5))
        # announce every silent node to all launchers (it reads that when it resumes), the one silent for longest first
        now = boot_clock()
        silent = sorted((peer.last_received, node) for node, peer in self._peers.items()
                        if now - peer.last_received >= SILENT_SECONDS)
        for since, node in silent:
            self._process_message({"node": node, "code": EXIT_PEER, "error_line": where,
                                   SILENT_SECONDS_KEY: now - since}, self._own.node)
        return self._exits.get(silent[0][1]) if silent else None

    def announce_failure(self, *, is_victim: bool) -> None:
        """Announce that a rank of this node fails; the other launchers then check their own ranks."""
        failure = Failure.VICTIM if is_victim else Failure.CULPRIT
        if failure > self._announced_failure:
            self._announced_failure = failure
            self._announce({FAILURE: failure})

    def announce_early_exit(self) -> None:
        self._announce({LEFT_EARLY: True})

    def announce_exit(self, code: int, error_line: str = "", *, is_victim: bool = False) -> None:
        """Announce how this node ended. A message that is too long would be refused, and the node seem lost."""
        self._announce({"code": code, "error_line": shorten_error_text(error_line), "is_victim": is_victim})

    def _announce(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            peer.send({"node": self._own.node, **message})

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._selector.close()
