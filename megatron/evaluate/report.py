"""What is printed of an evaluation: a table for people, one JSON object for programs, of the same figures."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from data.facts import TokenizerFacts
from megatron.evaluate.outcome import Outcome
from megatron.evaluate.request import Asked


@dataclass(frozen=True, kw_only=True)
class Report:
    asked: Asked
    outcome: Outcome
    model: str
    dtype: str
    tokenizer: TokenizerFacts
    ranks: int
    model_parallel_size: int
    window: int
    """Tokens that are read at most."""
    stride: int | None
    truncated: int | None
    """Examples that are longer than that; None: it is not asked."""
    seconds: float
    published: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """By their names in JSON; the table has spaces for underscores."""
        asked, tokenizer = self.asked, self.tokenizer
        said: dict[str, Any] = {"task": asked.task, "protocol": asked.protocol, "data": asked.data,
                                "model": self.model, "dtype": self.dtype,
                                "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                                              "ids": tokenizer.vocab_size},
                                "ranks": self.ranks, "model_parallel_size": self.model_parallel_size}
        if asked.target is not None:
            said["target"] = asked.target
        if asked.part is not None:
            said["part"] = asked.part
        said |= {"window": self.window, "stride": self.stride}
        if self.truncated is not None:
            said["truncated"] = self.truncated
        return said | {**self.outcome.figures(), "published": self.published or None,
                       "seconds": round(self.seconds, 3)}

    def as_json(self) -> str:
        """What is too large for a number is null."""
        return json.dumps({name: None if isinstance(value, float) and not math.isfinite(value) else value
                           for name, value in self.values().items()})

    def as_text(self) -> str:
        found = self.values()
        found["published"] = ", ".join(f"{_words(name)} {value:g}" for name, value in self.published.items())
        found["tokenizer"] = self.tokenizer.described
        found["seconds"] = f"{self.seconds:.1f}"
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
