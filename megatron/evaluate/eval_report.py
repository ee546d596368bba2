"""The report of an evaluation as a table and as JSON, with results published for OpenAI's GPT-2 weights of the same
size.

Sources: `openai` is the GPT-2 paper, table 3 (WikiText is its "WikiText103"); `lm-eval` is lm-eval itself;
LAMBADA's last token is openai/gpt-2, issue 131. Megatron-LM published no results for these weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data.format import TokenizerFacts
from megatron.config.model_config import PRESETS, ModelConfig
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.task import EvalResult

GPT2_TOKENS = 50257
GPT2_SIZES = ("124M", "345M", "774M", "1.5B")

PUBLISHED: Mapping[tuple[str, str], Mapping[str, Mapping[str, float]]] = {
    ("wikitext", "openai"): {"adjusted_perplexity": dict(zip(GPT2_SIZES, (37.50, 26.37, 22.05, 17.48)))},
    ("wikitext", "lm-eval"): {"adjusted_perplexity": {"124M": 37.37}},
    ("lambada", "openai"): {"acc": dict(zip(GPT2_SIZES, (0.4599, 0.5548, 0.6012, 0.6324)))},
    ("lambada", "megatron"): {"acc": {"124M": 0.4689}},
    ("lambada", "lm-eval"): {"acc": {"124M": 0.3256}, "adjusted_perplexity": {"124M": 40.06, "1.5B": 10.63}}}


def published_results(shape: ModelConfig, task: str, protocol: str, strict: bool) -> dict[str, float]:
    """Metric -> value that is published for OpenAI's GPT-2 of this shape and for this protocol."""
    size = next((size for size in GPT2_SIZES if all(getattr(shape, name) == value for name, value in
                                                    PRESETS[size].items() if name != "tokenizer_type")), None)
    if size is None or strict or shape.known_vocab_size != GPT2_TOKENS:
        return {}
    published = PUBLISHED.get((task, protocol), {})
    return {name: values[size] for name, values in published.items() if size in values}


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    request: EvalRequest
    result: EvalResult
    model: str
    dtype: str
    tokenizer: TokenizerFacts
    ranks: int
    model_parallel_size: int
    window: int
    """Tokens that the model reads at once."""
    stride: int | None
    truncated: int | None
    """Examples that are longer; None: does not apply to the task."""
    seconds: float
    published: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Name -> value; the table prints spaces for underscores."""
        request, tokenizer = self.request, self.tokenizer
        values: dict[str, Any] = {"task": request.task, "protocol": request.protocol, "data": request.data,
                                  "model": self.model, "dtype": self.dtype,
                                  "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                                                "ids": tokenizer.vocab_size},
                                  "ranks": self.ranks, "model_parallel_size": self.model_parallel_size}
        if request.scored_target is not None:
            values["target"] = request.scored_target
        if request.part is not None:
            values["part"] = request.part
        values |= {"window": self.window, "stride": self.stride}
        if self.truncated is not None:
            values["truncated"] = self.truncated
        return values | {**self.result.metrics(), "published": self.published or None,
                         "seconds": round(self.seconds, 3)}

    def as_json(self) -> str:
        """Infinite and NaN values become null."""
        return json.dumps({name: None if isinstance(value, float) and not math.isfinite(value) else value
                           for name, value in self.as_dict().items()})

    def as_text(self) -> str:
        values = self.as_dict()
        values["published"] = ", ".join(f"{_label(name)} {value:g}" for name, value in self.published.items())
        values["tokenizer"] = self.tokenizer.description
        values["seconds"] = f"{self.seconds:.1f}"
        return "\n".join(f"{_label(name):20} {_format_value(value)}".rstrip() for name, value in values.items())


def _label(name: str) -> str:
    return name.replace("_", " ")


def _format_value(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
