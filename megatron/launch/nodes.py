"""How the other nodes of a job fare, as their launchers say. Standard library only.

Each launcher has a connection to that of node 0, which passes on what it hears. A launcher warns the others when the
first of its ranks fails, and says once how they ended; one that leaves without a word is *lost*. One whose ranks have
all gone, some with exit code 0 and in the middle of something, says that it has *left* and waits whether the others do
as well. The first that is no victim (supervise.py) is the culprit, and every node's launcher names it. Where all are
victims, it is one that is *silent* (pulse.py); the others hear of it from node 0, and so does it, when it is back. How
they meet: meeting.py.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from megatron.errors import EXIT_OK, EXIT_PEER
from megatron.launch.link import Closed, Link, shortened
from megatron.launch.pulse import NEWS_SECONDS, PULSE, Pulse

WARNING, OF_ITS_OWN, OF_A_VICTIM, LEFT = "warning", "a failure of its own", "a victim", "left"
SILENT = "silent"
WORD_SECONDS = 0.5
"""For node 0 to say who is silent, before the others end."""
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
    silent: float = 0.0
    """For so many seconds; what it `said` is then what others know of it."""

    @property
    def failed(self) -> bool:
        return self.code != EXIT_OK

    def describe(self) -> str:
        if self.silent:
            return (f"error: {self.place.described} did not answer for {self.silent:.0f} s{self.said}; it is stopped "
                    f"or suspended, or it swaps; {AGAIN}")
        if self.said:
            return f"error: {self.place.described}: {self.said.removeprefix('error: ')}"
        return (f"error: {self.place.described} is gone without a word: its launcher was killed, or the machine or its "
                f"network failed; {AGAIN}")


@final
class Nodes:
    def __init__(self, own: Place, links: Mapping[int, Link] | None = None, places: Mapping[int, Place] | None = None,
                 say: Callable[[str], None] = lambda line: None) -> None:
        """`links`: of node 0 to every other node, of these to node 0. `say`: to whoever started this launcher."""
        self._say, self._pulse = say, Pulse(links or {})
        self._given_up = 0.0
        """For so many seconds the others have not heard of this node, and have ended without it."""
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

    def keep_in_touch(self) -> None:
        """To be called often."""
        away = self._pulse.look()
        if away >= NEWS_SECONDS and self._links:
            self._say(f"warning: the launcher of {self._own.described}, this node, did not run for {away:.0f} s: it "
                      "was stopped or suspended, or this machine swaps")
        for node in self._pulse.due():
            self._links[node].send(PULSE)
        for node, seconds in self._pulse.news().items():
            self._say(f"warning: the launcher of {self._places[node].described} has not answered for {seconds:.0f} s: "
                      "it is stopped or suspended, or its machine swaps; the run goes on as long as its ranks do")

    def hear(self, seconds: float = 0.0) -> None:
        """Take in what other launchers have said, and wait so long for it."""
        self.keep_in_touch()
        for key, _ in self._selector.select(seconds):
            node, link = key.data, self._links[key.data]
            try:
                messages = link.receive()
                silence = self._pulse.note(node)
                if silence:
                    self._say(f"note: the launcher of {self._places[node].described} answers again, after "
                              f"{silence:.0f} s")
                for message in messages:
                    self._note(message, node)
            except Closed:
                self._selector.unregister(link)
                link.close()
                del self._links[node]
                self._pulse.forget(node)
                if node not in self._ends:
                    self._note({"node": node, "code": EXIT_PEER}, node)

    def _note(self, message: Mapping[str, Any], source: int) -> None:
        node, silent = message.get("node"), message.get(SILENT)
        if node == self._own.node and isinstance(silent, float):
            self._given_up, self.are_failing = max(silent, self._pulse.was_away), True
        if node not in self._places or node in self._ends:
            return
        if message.get(LEFT) is True:
            self._have_left.add(node)
        elif WARNING in message:
            self.are_failing, self.has_culprit = True, self.has_culprit or message[WARNING] == OF_ITS_OWN
        else:
            code, said = message.get("code"), message.get("said")
            end = End(self._places[node], code if isinstance(code, int) else EXIT_PEER,
                      said if isinstance(said, str) else "", message.get("is_victim") is True,
                      silent if isinstance(silent, float) else 0.0)
            self._ends[node] = end
            if not end.said and not end.silent and end.failed and self._pulse.was_away >= NEWS_SECONDS:
                self._given_up = self._pulse.was_away  # the connection was cut meanwhile
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

    @property
    def is_given_up(self) -> bool:
        """The job has ended without this node."""
        return self._given_up > 0

    def describe_absence(self, where: str) -> str:
        """For the node that is back."""
        return (f"error: this node ({self._own.described.partition(' (')[0]}, {self._own.host}) was away for "
                f"{self._given_up:.0f} s{where}, and the job has ended without it; it was stopped or suspended, or it "
                f"swaps; {AGAIN}")

    def culprit(self, seconds: float, where: str = "") -> End | None:
        """The node that ended the job for a reason of its own, if its launcher says so within this time; else one that
        is silent, for which this node waited there (`where`)."""
        until = time.monotonic() + seconds - (WORD_SECONDS if self._own.node == 0 else 0.0)
        while True:
            self.hear()
            for end in self.failed:
                if not end.is_victim:
                    return end
            left = until - time.monotonic()
            if left <= 0 or not self._links:
                return self._silent(where)
            self.hear(min(left, 0.5))

    def _silent(self, where: str) -> End | None:
        """Who has not answered for longest. All are told; who is silent, for its return."""
        found = sorted(self._pulse.silent().items(), key=lambda one: -one[1])
        for node, seconds in found:
            self._note({"node": node, "code": EXIT_PEER, "said": where, SILENT: seconds}, self._own.node)
        return self._ends.get(found[0][0]) if found else None

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
