"""Megatron's text generation server: what `PUT /api` asks for, and what it is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from megatron.inference.generation import Text
from megatron.inference.request import Sampling
from megatron.serve.asked import Asked, Fields, Subject, fresh_seed, plain, sampling_of
from megatron.serve.leader import Verdict
from megatron.serve.limits import wrong

MOST_PROMPTS = 128
DEFAULT_TOKENS = 64
GPT2_EOD = 50256
"""Which old clients name, whatever the tokenizer."""


@final
@dataclass(frozen=True)
class Generation:
    subject: Subject
    asked: Asked
    shown: tuple[str, ...]
    streams: bool = False

    def whole(self, texts: Sequence[Text], verdicts: Mapping[int, Verdict]) -> dict[str, Any]:
        """Prompt and what follows, with the end of a line that it stopped at, as there."""
        decode = self.subject.tokenizer.decode
        return {"text": [shown + decode(text.tokens) for shown, text in zip(self.shown, texts, strict=True)],
                "segments": [[decode([token]) for token in text.ids] for text in texts],
                "logprobs": [verdicts[text.request.number].logprobs for text in texts] if verdicts else None,
                "random_seed": self.asked.seed}

    def more(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        return []

    def last(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        return []


def read(body: dict[str, Any], subject: Subject) -> Generation:
    fields = Fields(body)
    for old, new in (("max_len", "tokens_to_generate"), ("sentences", "prompts")):
        if fields.take(old) is not None:
            raise wrong(old, f"is no longer used; {new} has taken its place")
    shown = _prompts(fields, subject)
    begun = fields.flag("add_BOS")
    if "" in shown and not begun:
        raise wrong("prompts", "one is empty, which needs add_BOS")
    _refuse(fields, subject)
    asked = Asked(prompts=tuple(_tokens(text, begun, subject) for text in shown), samples=1,
                  most=fields.integer("tokens_to_generate", min(DEFAULT_TOKENS, subject.most), 0, subject.most),
                  sampling=_sampling(fields), seed=fields.integer("random_seed", fresh_seed(), 0, 1 << 63),
                  stops=_stops(fields), top=0 if fields.flag("logprobs") else None)
    if not asked.most and asked.top is None:
        raise wrong("tokens_to_generate", "0 needs logprobs: true")
    fields.finish()
    return Generation(subject, asked, shown)


def _prompts(fields: Fields, subject: Subject) -> tuple[str, ...]:
    given = fields.take("prompts")
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_PROMPTS:
        raise wrong("prompts", f"expected a list of 1 to {MOST_PROMPTS} texts")
    subject.check_texts(len(given), 1, "prompts")
    return tuple(plain(one, "prompts") for one in given)


def _tokens(text: str, begun: bool, subject: Subject) -> tuple[int, ...]:
    ids = tuple(int(token) for token in subject.tokenizer.encode(text))
    if begun and subject.eod is None:
        raise wrong("add_BOS", "this model has no token that begins a document")
    return subject.checked((subject.eod, *ids) if begun and subject.eod is not None else ids, "prompts")


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0.001, 100.0)
    top_k, top_p = fields.integer("top_k", 0, 0, 1000), fields.number("top_p", 0.0, 0.0, 1.0)
    if top_k and top_p:
        raise wrong("top_p", "cannot be set together with top_k")
    bound = fields.number("top_p_bound", 0.0, 0.0, 1.0)
    if bound > top_p:
        raise wrong("top_p_bound", "expected at most top_p")
    fields.only("top_p_decay", (0, 0.0), "is not done here")
    return sampling_of(0.0 if top_k == 1 else temperature, top_k=top_k, top_p=top_p or 1.0)


def _stops(fields: Fields) -> tuple[str, ...]:
    line, two = fields.flag("stop_on_eol"), fields.flag("stop_on_double_eol")
    return ("\n",) * line + ("\n\n",) * two


def _refuse(fields: Fields, subject: Subject) -> None:
    """What is not done here, unless it changes nothing."""
    fields.only("prevent_newline_after_colon", (False,), "is not done here")
    fields.only("beam_width", (), "beam search is not done here")
    fields.only("length_penalty", (1, 1.0), "belongs to beam search, which is not done here")
    fields.only("stop_token", (subject.eod, GPT2_EOD), "a text ends with its document, or as stop_on_eol says")
    fields.flag("no_log")
