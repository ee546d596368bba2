"""Figures that others found with OpenAI's GPT-2 weights, by shape and protocol: what a model of that shape is beside.

`openai` of the paper (table 3, where WikiText is "WikiText103"); `lm-eval` by lm-eval itself; LAMBADA's last token by
openai/gpt-2, issue 131. Megatron-LM has published none for these weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.model import ModelConfig
from megatron.config.presets import PRESETS

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
    if shape.tokens != GPT2_TOKENS:
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
