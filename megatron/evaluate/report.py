"""What is printed of an evaluation: a table for people, one JSON object for programs, of the same figures."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from megatron.evaluate.outcome import Outcome
from megatron.evaluate.request import Asked


@dataclass(frozen=True, kw_only=True)
class Report:
    asked: Asked
    outcome: Outcome
    model: str
    window: int
    """Tokens that are read at most."""
    stride: int | None
    seconds: float
    published: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        asked = self.asked
        said: dict[str, Any] = {"task": asked.task, "protocol": asked.protocol, "data": asked.data,
                                "model": self.model}
        if asked.task == "lambada":
            said["strict"] = asked.strict
        if asked.part is not None:
            said["part"] = asked.part
        return said | {"window": self.window, "stride": self.stride, **self.outcome.figures(),
                       "published": self.published or None, "seconds": round(self.seconds, 3)}

    def as_json(self) -> str:
        """What is too large for a number is null."""
        return json.dumps({name: None if isinstance(value, float) and not math.isfinite(value) else value
                           for name, value in self.values().items()})

    def as_text(self) -> str:
        found = self.values()
        published = found.pop("published")
        found["published"] = ", ".join(f"{_words(name)} {value:g}" for name, value in (published or {}).items())
        found["time"] = f"{found.pop('seconds'):.1f} s"
        return "\n".join(f"{_words(name):20} {_shown(value)}".rstrip() for name, value in found.items())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
