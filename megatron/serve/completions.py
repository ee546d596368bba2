"""OpenAI's completions: what `POST /v1/completions` asks for, and what it is answered."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from megatron.inference.generation import End, Text
from megatron.inference.wording import Detokenizer, Wording
from megatron.serve.asked import (LONGEST_STOP, MOST_STOPS, Asked, Fields, Subject, fresh_seed, plain, sampling_of,
                                  temperature_of)
from megatron.serve.leader import Verdict
from megatron.serve.limits import Refusal, wrong

MOST_LOGPROBS = 5
REASONS: dict[End, str] = {"eod": "stop", "stop": "stop", "length": "length", "positions": "length",
                           "dropped": "length", "not finite": "error"}


@final
@dataclass
class Completion:
    subject: Subject
    id: str
    asked: Asked
    shown: tuple[str, ...]
    """What an answer begins with: the text of each prompt, where it is to be repeated."""
    echoes: bool
    scored: bool
    """With the log-probabilities of tokens."""
    streams: bool
    with_usage: bool
    """Of a stream: a last part says how many tokens were read and made."""
    created: int = field(default_factory=lambda: int(time.time()))
    _sent: dict[int, str] = field(default_factory=dict)
    _wording: Wording = field(init=False)
    _tokens: dict[int, int] = field(default_factory=dict)
    _over: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._wording = Wording(self.subject.tokenizer)

    def whole(self, texts: Sequence[Text], verdicts: Mapping[int, Verdict]) -> dict[str, Any]:
        choices = [self._choice(place, text) for place, text in enumerate(texts)]
        for choice, text in zip(choices, texts, strict=True):
            if text.request.number in verdicts:
                choice["logprobs"] = self._judged(text, verdicts[text.request.number], len(choice["text"]))
        return {**self._frame(), "choices": choices, "usage": self._usage(texts)}

    def more(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        choices = [self._choice(place, text) for place, text in enumerate(texts) if place not in self._over]
        return [{**self._frame(), "choices": [choice]} for choice in choices
                if choice["text"] or choice["finish_reason"] is not None]

    def last(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        return [{**self._frame(), "choices": [], "usage": self._usage(texts)}] if self.with_usage else []

    def _frame(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.subject.name,
                "seed": self.asked.seed}

    def _usage(self, texts: Sequence[Text]) -> dict[str, int]:
        made = sum(len(text.tokens) for text in texts)
        return {"prompt_tokens": self.asked.read, "completion_tokens": made, "total_tokens": self.asked.read + made}

    def _choice(self, place: int, text: Text) -> dict[str, Any]:
        """What is new of a text since it was last asked for."""
        found, sent = self.shown[place // self.asked.samples] + self._wording.settled(text), self._sent.get(place, "")
        self._sent[place] = found
        if text.ended is not None:
            self._over.add(place)
        return {"index": place, "text": found[len(sent):], "logprobs": self._scores(place, text, found),
                "finish_reason": REASONS[text.ended] if text.ended else None}

    def _judged(self, text: Text, verdict: Verdict, length: int) -> dict[str, Any]:
        """Of all tokens whose text is among the `length` characters of an answer."""
        decode, skipped = self.subject.tokenizer.decode, 0 if self.echoes else len(text.request.prompt)
        ids = text.ids[skipped:]
        starts = Detokenizer(decode, ids).starts
        kept = sum(start < length for start in starts) if text.ended == "stop" else len(ids)
        likeliest = [None, *({decode([token]): value for token, value in reversed(place)}
                             for place in verdict.likeliest)][skipped:] if self.asked.top else None
        return {"tokens": [decode([token]) for token in ids[:kept]],
                "token_logprobs": [None, *verdict.logprobs][skipped:][:kept],
                "top_logprobs": None if likeliest is None else likeliest[:kept], "text_offset": starts[:kept]}

    def _scores(self, place: int, text: Text, found: str) -> dict[str, Any] | None:
        """Of the tokens whose text is among what was `found`."""
        if not self.scored or self.asked.top is not None:
            return None
        decode, begun = self.subject.tokenizer.decode, len(self.shown[place // self.asked.samples])
        tokens, first, starts = text.tokens, self._tokens.get(place, 0), self._wording.starts_of(text)
        names, values, offsets = [], [], []
        for number in range(first, len(tokens)):
            start = begun + starts[number]
            if start >= len(found) and (start > len(found) or text.ended is None):
                break
            names.append(decode(tokens[number : number + 1]))
            values.append(text.logprobs[number])
            offsets.append(start)
        self._tokens[place] = first + len(names)
        return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def read(body: dict[str, Any], subject: Subject, identity: str) -> Completion:
    fields = Fields(body)
    model = fields.text("model")
    if model not in (None, subject.name):
        raise Refusal(404, f"model: here is {subject.name!r}, and no other", name="model", code="model_not_found")
    prompts, texts = _prompts(fields.take("prompt"), subject)
    samples = fields.integer("n", 1, 1, subject.limits.max_texts)
    subject.check_texts(len(prompts), samples, "n")
    _refuse(fields, samples)
    echoes, streams, top = fields.flag("echo"), fields.flag("stream"), _top(fields)
    judged = top is not None and (echoes or top > 0)
    if judged and streams:
        raise wrong("stream", "is not possible with the log-probabilities of other tokens, nor with those of a prompt")
    asked = Asked(prompts=prompts, samples=samples, top=top if judged else None,
                  most=fields.integer("max_tokens", min(16, subject.most), 0 if judged else 1, subject.most),
                  sampling=sampling_of(temperature_of(fields), top_k=fields.integer("top_k", 0, 0, 1 << 31),
                                       top_p=_top_p(fields), min_p=fields.number("min_p", 0.0, 0.0, 1.0),
                                       repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0)),
                  seed=fields.integer("seed", fresh_seed(), -(1 << 63), 1 << 63), stops=_stops(fields.take("stop")))
    shown = texts if echoes else ("",) * len(prompts)
    with_usage = _stream_options(fields, streams)
    fields.finish()
    return Completion(subject, identity, asked, shown, echoes, top is not None, streams, with_usage)


def _prompts(given: Any, subject: Subject) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """As tokens, and as text: a text, several, tokens, or several lists of tokens."""
    if given is None:
        given = ""
    if not isinstance(given, list):
        given = [plain(given, "prompt")]
    elif given and all(isinstance(token, int) for token in given):
        given = [given]
    subject.check_texts(len(given), 1, "prompt")
    if not given:
        raise wrong("prompt", "is empty")
    prompts = [_tokens(one, subject) if isinstance(one, list) else subject.prompt_of(plain(one, "prompt"), "prompt")
               for one in given]
    texts = [subject.tokenizer.decode(one) if isinstance(one, list) else str(one) for one in given]
    return tuple(prompts), tuple(texts)


def _tokens(given: list[Any], subject: Subject) -> tuple[int, ...]:
    if not given or not all(type(token) is int and 0 <= token < subject.tokenizer.vocab_size for token in given):
        raise wrong("prompt", f"expected texts, or lists of tokens from 0 to {subject.tokenizer.vocab_size - 1}")
    return subject.checked(tuple(given), "prompt")


def _top_p(fields: Fields) -> float:
    found = fields.number("top_p", 1.0, 0.0, 1.0)
    if found == 0:
        raise wrong("top_p", "expected more than 0; a temperature of 0 takes the likeliest token")
    return found


def _stops(given: Any) -> tuple[str, ...]:
    texts = [] if given is None else given if isinstance(given, list) else [given]
    found = tuple(plain(text, "stop") for text in texts[: MOST_STOPS + 1])
    if len(found) > MOST_STOPS or not all(0 < len(text) <= LONGEST_STOP for text in found):
        raise wrong("stop", f"expected at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
    return found


def _top(fields: Fields) -> int | None:
    """Of how many of the likeliest tokens log-probabilities are given, besides those that are taken."""
    found = fields.integer("logprobs", -1, 0, MOST_LOGPROBS)
    return None if found < 0 else found


def _stream_options(fields: Fields, streams: bool) -> bool:
    given = fields.take("stream_options")
    if given is None:
        return False
    if not streams or not isinstance(given, dict):
        raise wrong("stream_options", "expected an object, with stream: true")
    options = Fields(given)
    found = options.flag("include_usage")
    options.finish()
    return found


def _refuse(fields: Fields, samples: int) -> None:
    """What is not done here, unless it changes nothing."""
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, (0, 0.0), "is not done here; repetition_penalty is")
    fields.only("best_of", (samples,), "is not done here, only n")
    fields.only("suffix", ("",), "is not done here: the model goes on from a prompt")
    fields.only("logit_bias", ({},), "is not done here")
    fields.text("user")
