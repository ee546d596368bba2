"""How the other nodes of a job fare, as their launchers say. Standard library only.

Each launcher has a connection to that of node 0, which passes on what it hears. A launcher warns the others when the
first of its ranks fails, and says once how they ended; one that leaves without a word is *lost*. One whose ranks have
all gone, some with exit code 0 and in the middle of something, says that it has *left* and waits whether the others do
as well. The first that is no victim (supervise.py) is the culprit, and every node's launcher names it. How they meet:
meeting.py.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from megatron.errors import EXIT_OK, EXIT_PEER
from megatron.launch.link import Closed, Link, shortened

WARNING, OF_ITS_OWN, OF_A_VICTIM, LEFT = "warning", "a failure of its own", "a victim", "left"
AGAIN = "start the same command on every node to resume from the last checkpoint"


@dataclass(frozen=True)
class Place:
    """What a launcher says of its node."""

    node: int
    nodes: int
    ranks: int
    """Of each node."""
    host: str

    @property
    def described(self) -> str:
        first = self.node * self.ranks
        ranks = f"rank {first}" if self.ranks == 1 else f"ranks {first}-{first + self.ranks - 1}"
        return f"node {self.node} ({self.host}, {ranks})"


@dataclass(frozen=True)
class End:
    """Of a node."""

    place: Place
    code: int
    said: str = ""
    """Its error line; empty where it is lost."""
    is_victim: bool = False

    @property
    def failed(self) -> bool:
        return self.code != EXIT_OK

    def describe(self) -> str:
        if self.said:
            return f"error: {self.place.described}: {self.said.removeprefix('error: ')}"
        return (f"error: {self.place.described} is gone without a word: its launcher was killed, or the machine or its "
                f"network failed; {AGAIN}")


@final
class Nodes:
    def __init__(self, own: Place, links: Mapping[int, Link] | None = None, places: Mapping[int, Place] | None = None
                 ) -> None:
        """`links`: of node 0 to every other node, of these to node 0."""
        self._own, self._links, self._places = own, dict(links or {}), dict(places or {})
        self._ends: dict[int, End] = {}
        """Of other nodes, in the order of the news."""
        self.are_failing = self.has_culprit = False
        """Ranks of other nodes fail; and one of them for a reason of its own."""
        self._have_left: set[int] = set()
        self._warned = ""
        self._selector = selectors.DefaultSelector()
        for node, link in self._links.items():
            self._selector.register(link, selectors.EVENT_READ, node)

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._selector.fileno()  # that of epoll

    def hear(self, seconds: float = 0.0) -> None:
        """Take in what other launchers have said, and wait so long for it."""
        for key, _ in self._selector.select(seconds):
            node, link = key.data, self._links[key.data]
            try:
                for message in link.receive():
                    self._note(message, node)
            except Closed:
                self._selector.unregister(link)
                link.close()
                del self._links[node]
                if node not in self._ends:
                    self._note({"node": node, "code": EXIT_PEER}, node)

    def _note(self, message: Mapping[str, Any], source: int) -> None:
        node = message.get("node")
        if node not in self._places or node in self._ends:
            return
        if message.get(LEFT) is True:
            self._have_left.add(node)
        elif WARNING in message:
            self.are_failing, self.has_culprit = True, self.has_culprit or message[WARNING] == OF_ITS_OWN
        else:
            code, said = message.get("code"), message.get("said")
            end = End(self._places[node], code if isinstance(code, int) else EXIT_PEER,
                      said if isinstance(said, str) else "", message.get("is_victim") is True)
            self._ends[node] = end
            self.are_failing, self.has_culprit = (self.are_failing or end.failed,
                                                  self.has_culprit or end.failed and not end.is_victim)
        for other, link in self._links.items():
            if other != source:
                link.send(dict(message))

    @property
    def are_at_work(self) -> bool:
        """Ranks of other nodes have neither ended nor left."""
        return not self._places.keys() <= self._ends.keys() | self._have_left

    @property
    def failed(self) -> list[End]:
        """In the order of the news."""
        return [end for end in self._ends.values() if end.failed]

    def culprit(self, seconds: float) -> End | None:
        """The node that ended the job for a reason of its own, if its launcher says so within this time."""
        until = time.monotonic() + seconds
        while True:
            self.hear()
            for end in self.failed:
                if not end.is_victim:
                    return end
            left = until - time.monotonic()
            if left <= 0 or not self._links:
                return None
            self.hear(left)

    def warn(self, *, is_victim: bool) -> None:
        """A rank of this node fails. Others look at once who of theirs it may have waited for."""
        kind = OF_A_VICTIM if is_victim else OF_ITS_OWN
        if self._warned not in (kind, OF_ITS_OWN):
            self._warned = kind
            for link in self._links.values():
                link.send({"node": self._own.node, WARNING: kind})

    def tell_left(self) -> None:
        for link in self._links.values():
            link.send({"node": self._own.node, LEFT: True})

    def tell(self, code: int, said: str = "", *, is_victim: bool = False) -> None:
        """How this node ended: a line that is too long for a message in part, since a launcher whose message is refused
        seems to be lost."""
        message = {"node": self._own.node, "code": code, "said": shortened(said), "is_victim": is_victim}
        for link in self._links.values():
            link.send(message)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._selector.close()
