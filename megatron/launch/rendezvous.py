"""Connect the launchers of all nodes before any of them starts a rank: node 0 listens, the others connect.

Refused within seconds, with the node's name: nodes started with different options, a node rank used twice, another
program on the port, a node that does not arrive. Standard library only.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, final

from megatron.distributed.process_group import raise_open_file_limit, try_connect
from megatron.distributed.rank_text import format_ranks
from megatron.errors import EXIT_CONFIG, ConfigError, PeerError, TrainerError
from megatron.launch.node_monitor import JsonConnection, JsonConnectionClosed, NodeInfo, NodeMonitor, shorten_error_text

GREETING = "megatron.launch 2"
GREETING_SECONDS = 10.0  # seconds for node 0 to answer a greeting
RETRY_SECONDS = 0.5  # seconds between polls or connection attempts
LINGER_SECONDS = 5.0  # seconds in which every node can connect and read why the job does not start
WAIT_NOTE_SECONDS = 10.0  # seconds to the first line that names missing nodes; each further one takes twice as long

PrintLine = Callable[[str], None]


def meet_nodes(own: NodeInfo, address: str, port: int, seconds: float, print_line: PrintLine) -> NodeMonitor:
    """Connect the launchers of all nodes within `seconds`; raises ConfigError or PeerError."""
    if own.node == 0:
        with open_listener(address, port, print_line) as listener:
            return RendezvousServer(own, listener, f"{address}:{port}", seconds, print_line).run()
    return join_node_0(own, address, port, seconds, print_line)


def open_listener(address: str, port: int, print_line: PrintLine) -> socket.socket:
    """Listen on --master-addr only, if it is an address of this machine; otherwise warn and listen on all."""
    where = f"{address}:{port}"
    try:
        family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"launcher: --master-addr {address}: {error.strerror}; give the address of node 0, which is "
                          "this machine") from error
    host = str(resolved[0])
    is_loopback = host.startswith("127.") or host == "::1"
    if is_loopback and address not in ("localhost", host):
        host = ""  # a name that resolves to another address on other machines
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(resolved if host else ("", port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            print_line(f"warning: --master-addr {address} is no address of this machine, which is node 0 by its "
                       "--node-rank")
            host = ""
            listener.bind(("", port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"launcher: the nodes cannot meet: port {port} of this node: {error.strerror}; choose a free "
                          "one with --master-port, the same on every node") from error
    if not host or not is_loopback:
        print_line(f"warning: the nodes meet at {where}, a port open to everything that reaches "
                   f"{'that address' if host else 'this machine'}; use a private network")
    raise_open_file_limit()
    listener.listen(1024)
    return listener


@final
class _WaitNotes:
    """Prints a line at growing intervals while waiting."""

    def __init__(self, print_line: PrintLine) -> None:
        self._print_line, self._wait, self._next = print_line, WAIT_NOTE_SECONDS, time.monotonic() + WAIT_NOTE_SECONDS

    def print_if_due(self, line: str) -> None:
        if time.monotonic() >= self._next:
            self._print_line(line)
            self._wait *= 2
            self._next = time.monotonic() + self._wait


@final
class RendezvousServer:
    """Node 0's side of the rendezvous."""

    def __init__(self, own: NodeInfo, listener: socket.socket, where: str, seconds: float,
                 print_line: PrintLine) -> None:
        self._own, self._listener, self._where, self._seconds, self._print_line = (
            own, listener, where, seconds, print_line)
        self._unidentified = set[JsonConnection]()  # connections without a greeting
        self._connections: dict[int, JsonConnection] = {}
        self._nodes = {own.node: own}
        self._refusal: dict[str, Any] | None = None  # reply to every further node once the job cannot start
        self._refused_count = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> NodeMonitor:
        until, wait_notes = time.monotonic() + self._seconds, _WaitNotes(self._print_line)
        try:
            while missing := [node for node in range(self._own.nodes) if node not in self._nodes]:
                which = format_ranks(missing, "node")
                if time.monotonic() >= until:
                    raise PeerError(
                        f"launcher: {which} of {self._own.nodes} did not come to {self._where} within "
                        f"{self._seconds:g} s; start the same command there with its --node-rank (docs/launch.md), or "
                        "wait longer with --meeting-timeout-seconds")
                wait_notes.print_if_due(f"waiting at {self._where} for {which} of {self._own.nodes}")
                self._handle_events(min(RETRY_SECONDS, until - time.monotonic()))
        except TrainerError as error:
            # also for nodes that connect within the next seconds and would otherwise wait in vain
            self._refusal = _refusal_message(error)
            for link in self._connections.values():
                link.send(self._refusal)
            self._refused_count += len(self._connections)
            until = min(until, time.monotonic() + LINGER_SECONDS)
            while self._refused_count < self._own.nodes - 1 and time.monotonic() < until:
                self._handle_events(min(RETRY_SECONDS, until - time.monotonic()))
            raise
        finally:
            self._selector.close()
            for link in self._unidentified:
                link.close()
        for link in self._connections.values():
            link.send({"begin": [asdict(self._nodes[node]) for node in sorted(self._nodes)]})
        return NodeMonitor(self._own, self._connections, {node: self._nodes[node]
                                                          for node in self._connections}, self._print_line)

    def _handle_events(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if isinstance(key.fileobj, JsonConnection):
                try:
                    for message in key.fileobj.receive():
                        self._handle_message(key.fileobj, message)
                except JsonConnectionClosed:
                    self._disconnect(key.fileobj)
                continue
            with suppress(OSError):  # the peer has disconnected already
                link = JsonConnection(self._listener.accept()[0])
                self._unidentified.add(link)
                self._selector.register(link, selectors.EVENT_READ)

    def _handle_message(self, connection: JsonConnection, message: dict[str, Any]) -> None:
        if connection not in self._unidentified or message.get("greeting") != GREETING:
            raise JsonConnectionClosed
        try:
            node_info = node_info_from_json(message)
        except (KeyError, TypeError, ValueError) as error:
            raise JsonConnectionClosed from error
        if self._refusal is not None:
            connection.send(self._refusal)
            self._refused_count += 1
            raise JsonConnectionClosed
        if (node_info.nodes, node_info.ranks) != (self._own.nodes, self._own.ranks):
            options = (f"--nnodes {one.nodes} --nproc-per-node {one.ranks} on node {one.node} ({one.host})"
                       for one in (self._own, node_info))
            mismatch = ConfigError(f"launcher: the nodes were started differently: {', '.join(options)}; give all "
                                   "the same")
            connection.send(_refusal_message(mismatch))
            self._refused_count += 1
            raise mismatch
        known = self._nodes.get(node_info.node)
        if known is not None:
            connection.send(_refusal_message(ConfigError(
                f"launcher: --node-rank {node_info.node} was given twice: on {known.host}, which came first, and on "
                f"{node_info.host}; each node needs a number of its own")))
            self._print_line(f"note: a second node {node_info.node} came, from {node_info.host}, and was sent away")
            raise JsonConnectionClosed
        self._unidentified.remove(connection)
        self._connections[node_info.node], self._nodes[node_info.node] = connection, node_info
        connection.send({"welcome": self._own.host})

    def _disconnect(self, connection: JsonConnection) -> None:
        """Drop a connection that closed or is not from one of our launchers."""
        self._selector.unregister(connection)
        connection.close()
        self._unidentified.discard(connection)
        for node in [node for node, other in self._connections.items() if other is connection]:
            del self._connections[node], self._nodes[node]


def _refusal_message(error: TrainerError) -> dict[str, Any]:
    return {"refused": shorten_error_text(str(error)), "code": error.code}


def join_node_0(own: NodeInfo, address: str, port: int, seconds: float, print_line: PrintLine) -> NodeMonitor:
    """The side of every other node."""
    where, until, wait_notes = f"{address}:{port}", time.monotonic() + seconds, _WaitNotes(print_line)
    while not isinstance(connection := try_connect(address, port, left := until - time.monotonic()), socket.socket):
        if left <= 0:
            raise PeerError(f"launcher: node 0 did not answer at {where} within {seconds:g} s ({connection}); start "
                            "the same command there with --node-rank 0, or wait longer with --meeting-timeout-seconds")
        wait_notes.print_if_due(f"waiting for node 0 at {where} ({connection})")
        time.sleep(min(RETRY_SECONDS, left))
    link, inbox = JsonConnection(connection), deque[dict[str, Any]]()

    def receive(expected: str, until: float) -> dict[str, Any]:
        """The next message, which must contain `expected`. Raises node 0's refusal, or JsonConnectionClosed."""
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while not inbox:
                if selector.select(min(RETRY_SECONDS, max(0.0, until - time.monotonic()))):
                    inbox.extend(link.receive())
                elif time.monotonic() >= until:
                    raise JsonConnectionClosed
                else:
                    wait_notes.print_if_due(f"waiting for the other nodes at {where}")
        message = inbox.popleft()
        if "refused" in message:
            raise (ConfigError if message.get("code") == EXIT_CONFIG else PeerError)(str(message["refused"]))
        if expected not in message:
            raise JsonConnectionClosed
        return message

    try:
        link.send({"greeting": GREETING, **asdict(own)})
        try:
            receive("welcome", min(until, time.monotonic() + GREETING_SECONDS))
        except JsonConnectionClosed as error:
            raise ConfigError(
                f"launcher: what answers at {where} is no launcher that waits for node {own.node}: another program, or "
                "a job that has begun already; see what runs there, and give all nodes one --master-port that is free "
                "on node 0") from error
        try:
            begin = receive("begin", until + GREETING_SECONDS)["begin"]
        except JsonConnectionClosed as error:
            raise PeerError(f"launcher: node 0 at {where} left before the job began; its output says why") from error
        others = {info.node: info for info in map(node_info_from_json, begin) if info.node != own.node}
        return NodeMonitor(own, {0: link}, others, print_line)
    except BaseException:
        link.close()
        raise


def node_info_from_json(fields: dict[str, Any]) -> NodeInfo:
    node_info = NodeInfo(int(fields["node"]), int(fields["nodes"]), int(fields["ranks"]), str(fields["host"]))
    if not 0 <= node_info.node < node_info.nodes or node_info.ranks < 1:
        raise ValueError
    return node_info
