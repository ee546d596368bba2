"""OpenAI's completions API: parses `POST /v1/completions` and builds its responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

from megatron.inference.generation import Detokenizer, FinishReason, GeneratedSequence, SequenceDetokenizer
from megatron.serve.admission import HttpError, invalid_field
from megatron.serve.api_request import ApiRequest, ServedModel, StrictJson, build_sampling, new_seed, valid_text
from megatron.serve.scheduler import SequenceLogprobs

MAX_LOGPROBS = 5
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100.0
"""Beyond, logits overflow."""
FINISH_REASONS: dict[FinishReason, str] = {"eod": "stop", "stop": "stop", "length": "length", "positions": "length",
                                           "dropped": "length", "not finite": "error"}


@dataclass
class StreamedText:
    """What a client has got of an answer."""

    text: str = ""
    num_logprobs: int = 0
    is_finished: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class OpenAICompletion(ApiRequest):
    echo: bool
    with_logprobs: bool
    with_usage: bool
    """The stream ends with a chunk that has token counts."""
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _sent: dict[int, StreamedText] = field(default_factory=dict)

    @cached_property
    def _detokenizer(self) -> SequenceDetokenizer:
        return SequenceDetokenizer(self.model.tokenizer)

    def full_response(self, sequences: Sequence[GeneratedSequence],
                      logprobs: Mapping[int, SequenceLogprobs]) -> dict[str, Any]:
        choices = [self._choice(place, text) for place, text in enumerate(sequences)]
        for choice, text in zip(choices, sequences, strict=True):
            if text.request.number in logprobs:
                choice["logprobs"] = self._format_logprobs(text, logprobs[text.request.number], len(choice["text"]))
        return {**self._frame(), "choices": choices, "usage": self._usage(sequences)}

    def new_chunks(self, sequences: Sequence[GeneratedSequence]) -> list[dict[str, Any]]:
        choices = [self._choice(place, text) for place, text in enumerate(sequences)
                   if place not in self._sent or not self._sent[place].is_finished]
        chunks = [{**self._frame(), "choices": [choice]} for choice in choices
                  if choice["text"] or choice["finish_reason"] is not None]
        if self.with_usage and all(text.finish_reason is not None for text in sequences):
            chunks.append({**self._frame(), "choices": [], "usage": self._usage(sequences)})
        return chunks

    def _frame(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model.name,
                "seed": self.seed}

    def _usage(self, sequences: Sequence[GeneratedSequence]) -> dict[str, int]:
        made = sum(len(text.tokens) for text in sequences)
        return {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": made,
                "total_tokens": self.num_prompt_tokens + made}

    def _choice(self, place: int, sequence: GeneratedSequence) -> dict[str, Any]:
        """The new text since the last call."""
        sent, prompt = self._sent.setdefault(place, StreamedText()), self.shown_prompts[place // self.num_samples]
        text = prompt + self._detokenizer.stable_text(sequence)
        new_text, sent.text, sent.is_finished = text[len(sent.text):], text, sequence.finish_reason is not None
        logprobs = None
        if self.with_logprobs and self.top_logprobs is None:
            logprobs = self._new_logprobs(sent, sequence, len(prompt))
        return {"index": place, "text": new_text, "logprobs": logprobs,
                "finish_reason": FINISH_REASONS[sequence.finish_reason] if sequence.finish_reason else None}

    def _format_logprobs(self, sequence: GeneratedSequence, logprobs: SequenceLogprobs, length: int) -> dict[str, Any]:
        """Of all tokens in the first `length` characters of the answer."""
        decode, skipped = self.model.tokenizer.decode, 0 if self.echo else len(sequence.request.prompt)
        ids = sequence.ids[skipped:]
        starts = Detokenizer(decode, ids).offsets
        kept = sum(start < length for start in starts) if sequence.finish_reason == "stop" else len(ids)
        likeliest = [None, *({decode([token]): value for token, value in reversed(place)}
                             for place in logprobs.top_logprobs)][skipped:] if self.top_logprobs else None
        return {"tokens": [decode([token]) for token in ids[:kept]],
                "token_logprobs": [None, *logprobs.logprobs][skipped:][:kept],
                "top_logprobs": None if likeliest is None else likeliest[:kept], "text_offset": starts[:kept]}

    def _new_logprobs(self, sent: StreamedText, sequence: GeneratedSequence, begin: int) -> dict[str, Any]:
        """Of the new tokens within the text that was sent; `begin`: where the first token of all is in it."""
        starts, length = self._detokenizer.token_offsets(sequence), len(sent.text) - begin
        first = end = sent.num_logprobs
        while end < len(sequence.tokens) and (starts[end] < length or starts[end] == length and sent.is_finished):
            end += 1
        sent.num_logprobs = end
        return {"tokens": [self.model.tokenizer.decode([token]) for token in sequence.tokens[first:end]],
                "token_logprobs": sequence.logprobs[first:end], "top_logprobs": None,
                "text_offset": [begin + start for start in starts[first:end]]}


def parse_completion(body: dict[str, Any], model: ServedModel) -> OpenAICompletion:
    fields = StrictJson(body)
    name = fields.take("model")
    if name is not None and valid_text(name, "model") != model.name:
        raise HttpError(404, f"model: here is {model.name!r}, and no other", param="model", code="model_not_found")
    prompts, texts = _parse_prompts(fields.take("prompt"), model)
    samples = fields.take_number("n", 1, 1, model.limits.max_texts)
    model.check_num_sequences(len(prompts) * samples, "n")
    _reject_unsupported(fields, samples)
    echo, is_streaming = fields.take_bool("echo"), fields.take_bool("stream")
    top = fields.take_number("logprobs", -1, 0, MAX_LOGPROBS)  # -1: not given
    scores_all_tokens = top > 0 or top == 0 and echo
    if scores_all_tokens and is_streaming:
        raise invalid_field("stream",
                            "is not possible with the log-probabilities of other tokens, nor with those of a prompt")
    temperature = fields.take_number("temperature", 1.0, 0.0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise invalid_field("temperature", f"expected 0 (the likeliest token) or a number from {MIN_TEMPERATURE} to "
                            f"{MAX_TEMPERATURE:g}")
    top_k, top_p = fields.take_number("top_k", 0, 0, 1 << 31), fields.take_number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise invalid_field("top_p", "expected more than 0; a temperature of 0 takes the likeliest token")
    sampling = build_sampling(temperature, top_k=top_k, top_p=top_p, min_p=fields.take_number("min_p", 0.0, 0.0, 1.0),
                              repetition_penalty=fields.take_number("repetition_penalty", 1.0, 0.01, 100.0))
    request = OpenAICompletion(
        model=model, prompts=prompts, shown_prompts=texts if echo else ("",) * len(prompts), num_samples=samples,
        max_new_tokens=fields.take_number("max_tokens", min(16, model.max_new_tokens), 0 if scores_all_tokens else 1,
                                          model.max_new_tokens),
        sampling=sampling, seed=fields.take_number("seed", new_seed(), -(1 << 63), 1 << 63),
        stops=_parse_stops(fields.take("stop")), top_logprobs=top if scores_all_tokens else None, echo=echo,
        with_logprobs=top >= 0, is_streaming=is_streaming, with_usage=_parse_stream_options(fields, is_streaming))
    fields.reject_unknown()
    return request


def _parse_prompts(given: Any, model: ServedModel) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """(token ids, texts) of a string, a list of strings, a list of ids or a list of lists of ids."""
    if not isinstance(given, list):
        given = ["" if given is None else given]
    elif given and all(isinstance(token, int) for token in given):
        given = [given]
    if not given:
        raise invalid_field("prompt", "is empty")
    model.check_num_sequences(len(given), "prompt")
    prompts, texts, size = list[tuple[int, ...]](), list[str](), model.tokenizer.vocab_size
    for one in given:
        if isinstance(one, list):
            if not one or not all(type(token) is int and 0 <= token < size for token in one):
                raise invalid_field("prompt", f"expected texts, or lists of tokens from 0 to {size - 1}")
            ids, text = tuple(one), model.tokenizer.decode(one)
        else:
            text = valid_text(one, "prompt")
            ids = model.encode(text)
        prompts.append(model.check_prompt(ids, "prompt"))
        texts.append(text)
    return tuple(prompts), tuple(texts)


def _parse_stops(given: Any) -> tuple[str, ...]:
    texts = [] if given is None else given if isinstance(given, list) else [given]
    found = tuple(valid_text(text, "stop") for text in texts[: MAX_STOPS + 1])
    if len(found) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in found):
        raise invalid_field("stop", f"expected at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return found


def _parse_stream_options(fields: StrictJson, is_streaming: bool) -> bool:
    given = fields.take("stream_options")
    if given is None:
        return False
    if not is_streaming or not isinstance(given, dict):
        raise invalid_field("stream_options", "expected an object, with stream: true")
    options = StrictJson(given)
    found = options.take_bool("include_usage")
    options.reject_unknown()
    return found


def _reject_unsupported(fields: StrictJson, samples: int) -> None:
    """Accepts unsupported keys with values that change nothing."""
    for name in ("frequency_penalty", "presence_penalty"):
        fields.require_neutral(name, (0, 0.0), "is not done here; repetition_penalty is")
    fields.require_neutral("best_of", (samples,), "is not done here, only n")
    fields.require_neutral("suffix", ("",), "is not done here: the model goes on from a prompt")
    fields.require_neutral("logit_bias", ({},), "is not done here")
    if (user := fields.take("user")) is not None:
        valid_text(user, "user")
