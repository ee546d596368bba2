"""What is counted, in Prometheus' words."""

from __future__ import annotations

import time
from collections import Counter
from typing import final


@final
class ServerMetrics:
    """Of the clients' thread alone."""

    def __init__(self) -> None:
        self._began = time.time()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = 0.0
        self.prompt_tokens = self.generated_tokens = 0
        self.texts_running = self.texts_waiting = self.texts_dropped = 0
        self.connections = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """A request; `route` is one of ours, so that clients make no names."""
        self._requests[route, status] += 1
        self._seconds += seconds

    def format_prometheus(self) -> str:
        lines = ["# HELP gpt2_requests_total Requests by route and status.", "# TYPE gpt2_requests_total counter"]
        lines += [f'gpt2_requests_total{{route="{route}",status="{status}"}} {count}'
                  for (route, status), count in sorted(self._requests.items())]
        for name, kind, value, about in (
                ("request_seconds_total", "counter", self._seconds, "Time that requests took, added up."),
                ("prompt_tokens_total", "counter", self.prompt_tokens, "Tokens of prompts."),
                ("generated_tokens_total", "counter", self.generated_tokens, "Tokens of texts."),
                ("texts_dropped_total", "counter", self.texts_dropped, "Texts whose client left."),
                ("texts_running", "gauge", self.texts_running, "Texts that have a row of the model."),
                ("texts_waiting", "gauge", self.texts_waiting, "Texts that wait for a row."),
                ("connections", "gauge", self.connections, "Open connections."),
                ("start_time_seconds", "gauge", self._began, "When the server began, in seconds since 1970.")):
            lines += [f"# HELP gpt2_{name} {about}", f"# TYPE gpt2_{name} {kind}", f"gpt2_{name} {value:.15g}"]
        return "\n".join(lines) + "\n"
