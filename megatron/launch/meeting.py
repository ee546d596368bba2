"""The launchers of a job's nodes meet, before any of them starts a rank: that of node 0 listens where the ranks will
meet afterwards, and begins when every node has come. Standard library only.

What cannot become a job is said here, in seconds and with the node's name: nodes that were started differently, a
number given twice, a program of somebody else's on the port, a node that does not come.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, final

from megatron.errors import EXIT_CONFIG, ConfigError, PeerError, TrainerError
from megatron.launch.link import Closed, Link, shortened
from megatron.launch.nodes import Nodes, Place
from megatron.ranges import ranges

GREETING = "megatron.launch 1"
ANSWER_SECONDS = 10.0
"""For a launcher to say its first word."""
RETRY_SECONDS = 0.5
"""From one look, or knock, to the next."""
LINGER_SECONDS = 5.0
"""For every node to come and hear why the job does not begin."""
NEWS_SECONDS = 10.0
"""A line on who is waited for, at first after this time, then each time after twice as long."""

Say = Callable[[str], None]


def meet(own: Place, address: str, port: int, seconds: float, say: Say) -> Nodes:
    """All nodes are there, and `seconds` was enough for them to come."""
    if own.node == 0:
        with listen(address, port, say) as listener:
            return Gathering(own, listener, f"{address}:{port}", seconds, say).run()
    return Joining(own, address, port, seconds, say).run()


def listen(address: str, port: int, say: Say) -> socket.socket:
    """On the address that other nodes were given and on no other, where this machine knows it as one of its own."""
    where = f"{address}:{port}"
    try:
        family, _, _, _, bare = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"launcher: --master-addr {address}: {error.strerror}; give the address of node 0, which is "
                          "this machine") from error
    is_loopback = str(bare[0]).startswith("127.") or bare[0] == "::1"
    if is_loopback and address not in ("localhost", bare[0]):  # a name that leads elsewhere on other machines
        bare = ("", port)
    listener = _bound(family, bare, where)
    if listener is None:
        say(f"warning: --master-addr {address} is no address of this machine, which is node 0 by its --node-rank")
        bare, listener = ("", port), _bound(family, ("", port), where)
    if bare[0] == "" or not is_loopback:
        say(f"warning: the nodes meet at {where}, a port open to whoever reaches "
            f"{'this machine' if bare[0] == '' else 'that address'}; use a private network")
    assert listener is not None  # this machine has the address of all its addresses
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection a node
    listener.listen(1024)
    return listener


def _bound(family: int, address: Any, where: str) -> socket.socket | None:
    """None for an address of another machine."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise ConfigError(f"launcher: the nodes cannot meet: port {where.rpartition(':')[2]} of this node: "
                          f"{error.strerror}; choose a free one with --master-port, the same on every node") from error
    return listener


@final
class _News:
    """Lines for somebody who waits."""

    def __init__(self, say: Say) -> None:
        self._say, self._wait, self._next = say, NEWS_SECONDS, time.monotonic() + NEWS_SECONDS

    def tell(self, line: str) -> None:
        if time.monotonic() >= self._next:
            self._say(line)
            self._wait *= 2
            self._next = time.monotonic() + self._wait


@final
class Gathering:
    """Node 0's side."""

    def __init__(self, own: Place, listener: socket.socket, where: str, seconds: float, say: Say) -> None:
        self._own, self._listener, self._where, self._seconds, self._say = own, listener, where, seconds, say
        self._strangers: dict[Link, float] = {}
        """Connections that have not said who they are, and until when they may."""
        self._links: dict[int, Link] = {}
        self._places = {own.node: own}
        self._refusal: dict[str, Any] | None = None
        """What everybody is told from now on: the job does not begin."""
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> Nodes:
        until, news = time.monotonic() + self._seconds, _News(self._say)
        try:
            while missing := [node for node in range(self._own.nodes) if node not in self._places]:
                which = ranges(missing, "node")
                if time.monotonic() >= until:
                    raise PeerError(
                        f"launcher: {which} of {self._own.nodes} did not come to {self._where} within "
                        f"{self._seconds:g} s; start the same command there with its --node-rank (docs/launch.md), or "
                        "wait longer with --meeting-timeout-seconds")
                news.tell(f"waiting at {self._where} for {which} of {self._own.nodes}")
                self._wait(min(RETRY_SECONDS, until - time.monotonic()))
        except TrainerError as error:
            self._refuse_all(error, min(until, time.monotonic() + LINGER_SECONDS))
            raise
        finally:
            self._selector.close()
            for link in self._strangers:
                link.close()
        self._say_all({"begin": [asdict(self._places[node]) for node in sorted(self._places)]})
        return Nodes(self._own, self._links, {node: self._places[node] for node in self._links}, self._say)

    def _refuse_all(self, error: TrainerError, until: float) -> None:
        """Also who is about to knock, and would wait for nobody."""
        self._refusal = _refusal(error)
        self._say_all(self._refusal)
        self._refused += len(self._links)
        while self._refused < self._own.nodes - 1 and time.monotonic() < until:
            self._wait(min(RETRY_SECONDS, until - time.monotonic()))

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if isinstance(key.fileobj, Link):
                self._hear(key.fileobj)
            else:
                self._accept()
        for link, until in list(self._strangers.items()):
            if time.monotonic() >= until:
                self._drop(link)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again
            return
        link = Link(connection)
        self._strangers[link] = time.monotonic() + ANSWER_SECONDS
        self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, link: Link) -> None:
        try:
            for message in link.receive():
                self._on(link, message)
        except Closed:
            self._drop(link)

    def _on(self, link: Link, message: dict[str, Any]) -> None:
        place = place_in(message)
        if link not in self._strangers or place is None:
            raise Closed
        if self._refusal is not None:
            link.send(self._refusal)
            self._refused += 1
            raise Closed
        if (place.nodes, place.ranks) != (self._own.nodes, self._own.ranks):
            error = _differ(self._own, place)
            link.send(_refusal(error))
            self._refused += 1
            raise error
        known = self._places.get(place.node)
        if known is not None:
            link.send(_refusal(ConfigError(
                f"launcher: --node-rank {place.node} was given twice: on {known.host}, which came first, and on "
                f"{place.host}; each node needs a number of its own")))
            self._say(f"note: a second node {place.node} came, from {place.host}, and was sent away")
            raise Closed
        del self._strangers[link]
        self._links[place.node], self._places[place.node] = link, place
        link.send({"welcome": self._own.host})

    def _drop(self, link: Link) -> None:
        """It has left, or was never one of ours."""
        self._selector.unregister(link)
        link.close()
        self._strangers.pop(link, None)
        for node in [node for node, other in self._links.items() if other is link]:
            del self._links[node], self._places[node]

    def _say_all(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            link.send(message)


def _differ(*places: Place) -> ConfigError:
    said = (f"--nnodes {place.nodes} --nproc-per-node {place.ranks} on node {place.node} ({place.host})"
            for place in places)
    return ConfigError(f"launcher: the nodes were started differently: {', '.join(said)}; give all the same")


def _refusal(error: TrainerError) -> dict[str, Any]:
    return {"refused": shortened(str(error)), "code": error.code}


@final
class Joining:
    """Every other node's side."""

    def __init__(self, own: Place, address: str, port: int, seconds: float, say: Say) -> None:
        self._own, self._address, self._port, self._seconds = own, address, port, seconds
        self._where, self._until, self._news = f"{address}:{port}", time.monotonic() + seconds, _News(say)
        self._say = say
        self._heard: deque[dict[str, Any]] = deque()

    def run(self) -> Nodes:
        link = self._connect()
        try:
            link.send({"greeting": GREETING, **asdict(self._own)})
            try:
                self._answer(link, min(self._until, time.monotonic() + ANSWER_SECONDS), "welcome")
            except Closed as error:
                raise ConfigError(
                    f"launcher: what answers at {self._where} is no launcher that waits for node {self._own.node}: "
                    "another program, or a job that has begun already; see what runs there, and give all nodes one "
                    "--master-port that is free on node 0") from error
            try:
                places = self._answer(link, self._until + ANSWER_SECONDS, "begin")["begin"]
            except Closed as error:
                raise PeerError(f"launcher: node 0 at {self._where} left before the job began; its output says why"
                                ) from error
            found = {place.node: place for place in map(place_of, places)}
            return Nodes(self._own, {0: link}, {node: found[node] for node in found if node != self._own.node},
                         self._say)
        except BaseException:
            link.close()
            raise

    def _connect(self) -> Link:
        while True:
            left = self._until - time.monotonic()
            try:
                connection = socket.create_connection((self._address, self._port), timeout=max(0.1, min(5.0, left)))
                if connection.getsockname() != connection.getpeername():
                    return Link(connection)
                connection.close()  # nobody listens, and it met itself on a port that was free
                reason = "nobody listens there"
            except OSError as error:
                reason = error.strerror or str(error)
            if left <= 0:
                raise PeerError(f"launcher: node 0 did not answer at {self._where} within {self._seconds:g} s "
                                f"({reason}); start the same command there with --node-rank 0, or wait longer with "
                                "--meeting-timeout-seconds")
            self._news.tell(f"waiting for node 0 at {self._where} ({reason})")
            time.sleep(min(RETRY_SECONDS, left))

    def _answer(self, link: Link, until: float, expected: str) -> dict[str, Any]:
        """The next message, which has to be this one, or an error that node 0 has found."""
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while not self._heard:
                if selector.select(min(RETRY_SECONDS, max(0.0, until - time.monotonic()))):
                    self._heard.extend(link.receive())
                elif time.monotonic() >= until:
                    raise Closed
                else:
                    self._news.tell(f"waiting for the other nodes at {self._where}")
        message = self._heard.popleft()
        if "refused" in message:
            kind = ConfigError if message.get("code") == EXIT_CONFIG else PeerError
            raise kind(str(message["refused"]))
        if expected not in message:
            raise Closed
        return message


def place_in(message: dict[str, Any]) -> Place | None:
    """Of a greeting."""
    if message.get("greeting") != GREETING:
        return None
    try:
        return place_of({name: message[name] for name in ("node", "nodes", "ranks", "host")})
    except (KeyError, TypeError, ValueError):
        return None


def place_of(said: dict[str, Any]) -> Place:
    place = Place(int(said["node"]), int(said["nodes"]), int(said["ranks"]), str(said["host"]))
    if not 0 <= place.node < place.nodes or place.ranks < 1:
        raise ValueError
    return place
