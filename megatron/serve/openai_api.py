"""OpenAI's completions API: parses `POST /v1/completions` and builds its responses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from megatron.inference.detokenizer import Detokenizer, SequenceDetokenizer
from megatron.inference.generation import FinishReason, GeneratedSequence
from megatron.serve.admission import HttpError, invalid_field
from megatron.serve.api_request import (MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TEMPERATURE, MIN_TEMPERATURE,
                                        GenerationRequest, ServedModel, StrictJson, build_sampling, new_seed,
                                        valid_text)
from megatron.serve.scheduler import SequenceLogprobs

MAX_LOGPROBS = 5
FINISH_REASONS: dict[FinishReason, str] = {"eod": "stop", "stop": "stop", "length": "length", "positions": "length",
                                           "dropped": "length", "not finite": "error"}


@final
@dataclass
class OpenAICompletion:
    model: ServedModel
    id: str
    generation: GenerationRequest
    echoed_prompts: tuple[str, ...]
    """With `echo` the text of each prompt, otherwise empty."""
    echo: bool
    with_logprobs: bool
    is_streaming: bool
    with_usage: bool
    """The stream ends with a chunk that has token counts."""
    created: int = field(default_factory=lambda: int(time.time()))
    _sent_text: dict[int, str] = field(default_factory=dict)
    _detokenizer: SequenceDetokenizer = field(init=False)
    _num_sent_tokens: dict[int, int] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._detokenizer = SequenceDetokenizer(self.model.tokenizer)

    def full_response(self, sequences: Sequence[GeneratedSequence],
                      logprobs: Mapping[int, SequenceLogprobs]) -> dict[str, Any]:
        choices = [self._choice(place, text) for place, text in enumerate(sequences)]
        for choice, text in zip(choices, sequences, strict=True):
            if text.request.number in logprobs:
                choice["logprobs"] = self._format_logprobs(text, logprobs[text.request.number], len(choice["text"]))
        return {**self._frame(), "choices": choices, "usage": self._usage(sequences)}

    def new_chunks(self, sequences: Sequence[GeneratedSequence]) -> list[dict[str, Any]]:
        choices = [self._choice(place, text) for place, text in enumerate(sequences) if place not in self._finished]
        return [{**self._frame(), "choices": [choice]} for choice in choices
                if choice["text"] or choice["finish_reason"] is not None]

    def final_chunks(self, sequences: Sequence[GeneratedSequence]) -> list[dict[str, Any]]:
        return [{**self._frame(), "choices": [], "usage": self._usage(sequences)}] if self.with_usage else []

    def _frame(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model.name,
                "seed": self.generation.seed}

    def _usage(self, sequences: Sequence[GeneratedSequence]) -> dict[str, int]:
        made = sum(len(text.tokens) for text in sequences)
        return {"prompt_tokens": self.generation.num_prompt_tokens, "completion_tokens": made,
                "total_tokens": self.generation.num_prompt_tokens + made}

    def _choice(self, place: int, sequence: GeneratedSequence) -> dict[str, Any]:
        """The new text since the last call."""
        found, sent = (self.echoed_prompts[place // self.generation.num_samples]
                       + self._detokenizer.stable_text(sequence), self._sent_text.get(place, ""))
        self._sent_text[place] = found
        if sequence.finish_reason is not None:
            self._finished.add(place)
        return {"index": place, "text": found[len(sent):], "logprobs": self._new_logprobs(place, sequence, found),
                "finish_reason": FINISH_REASONS[sequence.finish_reason] if sequence.finish_reason else None}

    def _format_logprobs(self, sequence: GeneratedSequence, logprobs: SequenceLogprobs, length: int) -> dict[str, Any]:
        """Of all tokens in the first `length` characters of the answer."""
        decode, skipped = self.model.tokenizer.decode, 0 if self.echo else len(sequence.request.prompt)
        ids = sequence.ids[skipped:]
        starts = Detokenizer(decode, ids).offsets
        kept = sum(start < length for start in starts) if sequence.finish_reason == "stop" else len(ids)
        likeliest = [None, *({decode([token]): value for token, value in reversed(place)}
                             for place in logprobs.top_logprobs)][skipped:] if self.generation.top_logprobs else None
        return {"tokens": [decode([token]) for token in ids[:kept]],
                "token_logprobs": [None, *logprobs.logprobs][skipped:][:kept],
                "top_logprobs": None if likeliest is None else likeliest[:kept], "text_offset": starts[:kept]}

    def _new_logprobs(self, place: int, sequence: GeneratedSequence, found: str) -> dict[str, Any] | None:
        """Of the new tokens within the text `found`."""
        if not self.with_logprobs or self.generation.top_logprobs is not None:
            return None
        decode, begun = self.model.tokenizer.decode, len(self.echoed_prompts[place // self.generation.num_samples])
        tokens, first, starts = (
            sequence.tokens, self._num_sent_tokens.get(place, 0), self._detokenizer.token_offsets(sequence))
        names, values, offsets = [], [], []
        for number in range(first, len(tokens)):
            start = begun + starts[number]
            if start >= len(found) and (start > len(found) or sequence.finish_reason is None):
                break
            names.append(decode(tokens[number : number + 1]))
            values.append(sequence.logprobs[number])
            offsets.append(start)
        self._num_sent_tokens[place] = first + len(names)
        return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def parse_completion(body: dict[str, Any], served_model: ServedModel, identity: str) -> OpenAICompletion:
    fields = StrictJson(body)
    model = fields.take_str("model")
    if model not in (None, served_model.name):
        raise HttpError(404, f"model: here is {served_model.name!r}, and no other", param="model",
                        code="model_not_found")
    prompts, texts = _parse_prompts(fields.take("prompt"), served_model)
    samples = fields.take_int("n", 1, 1, served_model.limits.max_texts)
    served_model.check_num_sequences(len(prompts), samples, "n")
    _reject_unsupported(fields, samples)
    echo, is_streaming = fields.take_bool("echo"), fields.take_bool("stream")
    top = fields.take_int("logprobs", -1, 0, MAX_LOGPROBS)  # -1: not given
    with_logprobs = top >= 0
    scores_all_tokens = with_logprobs and (echo or top > 0)
    if scores_all_tokens and is_streaming:
        raise invalid_field("stream",
                            "is not possible with the log-probabilities of other tokens, nor with those of a prompt")
    max_new_tokens = fields.take_int("max_tokens", min(16, served_model.max_new_tokens), 0 if scores_all_tokens else 1,
                                     served_model.max_new_tokens)
    temperature = fields.take_float("temperature", 1.0, 0.0, MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise invalid_field("temperature", f"expected 0 (the likeliest token) or a number from {MIN_TEMPERATURE} to "
                            f"{MAX_TEMPERATURE:g}")
    top_k, top_p = fields.take_int("top_k", 0, 0, 1 << 31), fields.take_float("top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise invalid_field("top_p", "expected more than 0; a temperature of 0 takes the likeliest token")
    generation = GenerationRequest(
        prompts=prompts, num_samples=samples, top_logprobs=top if scores_all_tokens else None,
        max_new_tokens=max_new_tokens,
        sampling=build_sampling(temperature, top_k=top_k, top_p=top_p, min_p=fields.take_float("min_p", 0.0, 0.0, 1.0),
                                repetition_penalty=fields.take_float("repetition_penalty", 1.0, 0.01, 100.0)),
        seed=fields.take_int("seed", new_seed(), -(1 << 63), 1 << 63), stops=_parse_stops(fields.take("stop")))
    shown = texts if echo else ("",) * len(prompts)
    with_usage = _parse_stream_options(fields, is_streaming)
    fields.reject_unknown()
    return OpenAICompletion(served_model, identity, generation, shown, echo, with_logprobs, is_streaming, with_usage)


def _parse_prompts(given: Any, model: ServedModel) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """(token ids, texts) of a string, a list of strings, a list of ids or a list of lists of ids."""
    if given is None:
        given = ""
    if not isinstance(given, list):
        given = [valid_text(given, "prompt")]
    elif given and all(isinstance(token, int) for token in given):
        given = [given]
    model.check_num_sequences(len(given), 1, "prompt")
    if not given:
        raise invalid_field("prompt", "is empty")
    prompts, size = list[tuple[int, ...]](), model.tokenizer.vocab_size
    for one in given:
        if not isinstance(one, list):
            prompts.append(model.encode_prompt(valid_text(one, "prompt"), "prompt"))
            continue
        if not one or not all(type(token) is int and 0 <= token < size for token in one):
            raise invalid_field("prompt", f"expected texts, or lists of tokens from 0 to {size - 1}")
        prompts.append(model.check_prompt(tuple(one), "prompt"))
    texts = [model.tokenizer.decode(one) if isinstance(one, list) else str(one) for one in given]
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
    fields.take_str("user")
