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

HEARTBEAT_MESSAGE: dict[str, Any] = {"pulse": True}
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0
"""Without a pulse: to blame, where ranks have waited in vain."""
SILENCE_WARNING_SECONDS = 10.0
"""Of silence until somebody is told, and again each time after twice as long."""
SLOW_HEARTBEAT_SECONDS = 60.0
"""From one pulse to the next for who is silent: it reads none, and what it does not read would fill the connection."""
RECENT_PAUSE_SECONDS = 1.0
"""After being away: what is heard then happened meanwhile."""


@dataclass
class _Peer:
    last_received: float
    last_sent: float = 0.0
    warned_at_seconds: float = 0.0
    """The silence at the last line about it."""


def boot_clock() -> float:
    """Goes on while the machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@final
class Heartbeat:
    def __init__(self, nodes: Iterable[int]) -> None:
        self._peers = {node: _Peer(boot_clock()) for node in nodes}
        self._last_check = boot_clock()
        self._paused_seconds, self._resumed_at = 0.0, 0.0

    def detect_own_pause(self) -> float:
        """To be called often. How long this launcher has not called: 0 where it was not away."""
        now, before = boot_clock(), self._last_check
        self._last_check = now
        if now - before < SILENT_SECONDS:
            return 0.0
        self._paused_seconds, self._resumed_at = now - before, now
        for peer in self._peers.values():
            peer.last_received, peer.warned_at_seconds = now, 0.0
        return self._paused_seconds

    @property
    def recent_pause(self) -> float:
        """Seconds, until a moment ago."""
        return self._paused_seconds if boot_clock() - self._resumed_at < RECENT_PAUSE_SECONDS else 0.0

    def record_message(self, node: int) -> float:
        """Something was heard of this node. How long it was silent, where somebody was told."""
        peer = self._peers[node]
        silence = boot_clock() - peer.last_received if peer.warned_at_seconds else 0.0
        peer.last_received, peer.warned_at_seconds = boot_clock(), 0.0
        return silence

    def forget(self, node: int) -> None:
        self._peers.pop(node, None)

    def nodes_due(self) -> list[int]:
        """Whom to send a pulse now."""
        now, found = boot_clock(), []
        for node, peer in self._peers.items():
            rest = HEARTBEAT_SECONDS if now - peer.last_received < SLOW_HEARTBEAT_SECONDS else SLOW_HEARTBEAT_SECONDS
            if now - peer.last_sent >= rest:
                peer.last_sent = now
                found.append(node)
        return found

    def silent_nodes(self) -> dict[int, float]:
        """Nodes of which nothing is heard, and for how long."""
        now = boot_clock()
        return {
            node: now - peer.last_received
            for node, peer in self._peers.items() if now - peer.last_received >= SILENT_SECONDS
        }

    def silences_to_report(self) -> dict[int, float]:
        """The same, where it is time to tell somebody."""
        found = {node: seconds for node, seconds in self.silent_nodes().items()
                 if seconds >= max(SILENCE_WARNING_SECONDS, 2 * self._peers[node].warned_at_seconds)}
        for node, seconds in found.items():
            self._peers[node].warned_at_seconds = seconds
        return found
