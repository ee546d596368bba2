"""Signs of life among the launchers of a job: who is *silent*, and was this one away itself?

A process that is stopped, a machine that is suspended or swaps keeps its connections open, and its kernel answers for
it. So each launcher sends a *pulse* a second, and notes when it last heard anything of its peers. Between two looks at
its own clock it notices that it was *away*: then nobody else is to blame for the silence. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

PULSE: dict[str, Any] = {"pulse": True}
PULSE_SECONDS = 1.0
SILENT_SECONDS = 4.0
"""Without a pulse: to blame, where ranks have waited in vain."""
NEWS_SECONDS = 10.0
"""Of silence until somebody is told, and again each time after twice as long."""
RARE_SECONDS = 60.0
"""From one pulse to the next for who is silent: it reads none, and what it does not read would fill the connection."""
RETURN_SECONDS = 1.0
"""After being away: what is heard then happened meanwhile."""


@dataclass
class _Peer:
    heard: float
    sent: float = 0.0
    told: float = 0.0
    """The silence at the last line about it."""


def wall() -> float:
    """Goes on while the machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@final
class Pulse:
    def __init__(self, nodes: Iterable[int]) -> None:
        self._peers = {node: _Peer(wall()) for node in nodes}
        self._looked = wall()
        self._away, self._back = 0.0, 0.0

    def look(self) -> float:
        """To be called often. How long this launcher has not called: 0 where it was not away."""
        now, before = wall(), self._looked
        self._looked = now
        if now - before < SILENT_SECONDS:
            return 0.0
        self._away, self._back = now - before, now
        for peer in self._peers.values():
            peer.heard, peer.told = now, 0.0
        return self._away

    @property
    def was_away(self) -> float:
        """Seconds, until a moment ago."""
        return self._away if wall() - self._back < RETURN_SECONDS else 0.0

    def note(self, node: int) -> float:
        """Something was heard of this node. How long it was silent, where somebody was told."""
        peer = self._peers[node]
        silence = wall() - peer.heard if peer.told else 0.0
        peer.heard, peer.told = wall(), 0.0
        return silence

    def forget(self, node: int) -> None:
        self._peers.pop(node, None)

    def due(self) -> list[int]:
        """Whom to send a pulse now."""
        now, found = wall(), []
        for node, peer in self._peers.items():
            rest = PULSE_SECONDS if now - peer.heard < RARE_SECONDS else RARE_SECONDS
            if now - peer.sent >= rest:
                peer.sent = now
                found.append(node)
        return found

    def silent(self) -> dict[int, float]:
        """Nodes of which nothing is heard, and for how long."""
        now = wall()
        return {node: now - peer.heard for node, peer in self._peers.items() if now - peer.heard >= SILENT_SECONDS}

    def news(self) -> dict[int, float]:
        """The same, where it is time to tell somebody."""
        found = {node: seconds for node, seconds in self.silent().items()
                 if seconds >= max(NEWS_SECONDS, 2 * self._peers[node].told)}
        for node, seconds in found.items():
            self._peers[node].told = seconds
        return found
