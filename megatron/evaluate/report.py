"""What is printed of an evaluation: a table for people, one JSON object for programs, of the same figures; and those
that others found with OpenAI's GPT-2 weights, which a model of that shape is beside.

`openai` of the paper (table 3, where WikiText is "WikiText103"); `lm-eval` by lm-eval itself; LAMBADA's last token by
openai/gpt-2, issue 131. Megatron-LM has published none for these weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.facts import TokenizerFacts
from megatron.config.model import ModelConfig
from megatron.config.presets import PRESETS
from megatron.evaluate.request import Asked
from megatron.evaluate.task import Outcome

GPT2_TOKENS = 50257
SHAPES = ("124M", "345M", "774M", "1.5B")

PUBLISHED: Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]] = {
    ("wikitext", "openai"): {"adjusted_perplexity": dict(zip(SHAPES, (37.50, 26.37, 22.05, 17.48)))},
    ("wikitext", "lm-eval"): {"adjusted_perplexity": {"124M": 37.37}},
    ("lambada", "openai"): {"acc": dict(zip(SHAPES, (0.4599, 0.5548, 0.6012, 0.6324)))},
    ("lambada", "megatron"): {"acc": {"124M": 0.4689}},
    ("lambada", "lm-eval"): {"acc": {"124M": 0.3256}, "adjusted_perplexity": {"124M": 40.06, "1.5B": 10.63}},
}


def size_of(shape: ModelConfig) -> str | None:
    """The one of GPT-2's four sizes that has this shape."""
    if shape.known_vocab_size != GPT2_TOKENS:
        return None
    for size in SHAPES:
        if all(getattr(shape, name) == value for name, value in PRESETS[size].items() if name != "tokenizer_type"):
            return size
    return None


def published(shape: ModelConfig, task: str, protocol: str, strict: bool) -> dict[str, float]:
    """By figure; nothing where nothing is known of this very protocol."""
    size = size_of(shape)
    if size is None or strict:
        return {}
    found = PUBLISHED.get((task, protocol), {})
    return {name: values[size] for name, values in found.items() if size in values}


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
        found["tokenizer"] = self.tokenizer.description
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
