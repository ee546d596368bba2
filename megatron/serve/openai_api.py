"""OpenAI's completions API: parses `POST /v1/completions` and builds its responses."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, final

from megatron.inference.generation import Detokenizer, FinishReason, GeneratedSequence, TokenScores
from megatron.inference.request import Sampling
from megatron.serve.admission import HttpError, invalid_field
from megatron.serve.api_request import (ApiRequest, NeutralKey, NumberKey, ServedModel, check_text, read_json,
                                        read_keys)

MAX_LOGPROBS = 5
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100.0  # beyond, logits overflow
FINISH_REASONS: dict[FinishReason, str] = {"eod": "stop", "stop": "stop", "length": "length", "positions": "length",
                                           "dropped": "length", "not finite": "error"}


@dataclass
class StreamedText:
    """What a client has got of an answer."""

    has_prompt: bool = False
    num_logprobs: int = 0
    is_finished: bool = False


@final
@dataclass(eq=False, kw_only=True)
class OpenAICompletion(ApiRequest):
    echo: bool
    with_logprobs: bool
    with_usage: bool  # the stream ends with a chunk that has token counts

    def __post_init__(self) -> None:
        super().__post_init__()
        self._frame = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                       "model": self.model.name, "seed": self.seed}
        self._sent = [StreamedText() for _ in self.texts]

    def full_response(self) -> dict[str, Any]:
        choices = [self._choice(place, text) for place, text in enumerate(self.texts)]
        for choice, text in zip(choices, self.texts, strict=True):
            if text.scores is not None:
                choice["logprobs"] = self._format_scores(text, text.scores, len(choice["text"]))
        return {**self._frame, "choices": choices, "usage": self._usage()}

    def new_chunks(self) -> list[dict[str, Any]]:
        choices = [self._choice(place, text) for place, text in enumerate(self.texts)
                   if not self._sent[place].is_finished]
        chunks = [{**self._frame, "choices": [choice]} for choice in choices
                  if choice["text"] or choice["finish_reason"] is not None]
        if self.with_usage and not self.num_open:
            chunks.append({**self._frame, "choices": [], "usage": self._usage()})
        return chunks

    def _usage(self) -> dict[str, int]:
        read, made = self.count_tokens()
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _choice(self, place: int, sequence: GeneratedSequence) -> dict[str, Any]:
        """The new text since the last call, with the log-probabilities of the new tokens within it."""
        sent, prompt, reason = self._sent[place], self.shown_prompts[place // self.num_samples], sequence.finish_reason
        text = ("" if sent.has_prompt else prompt) + sequence.new_text()
        sent.has_prompt, sent.is_finished = True, reason is not None
        logprobs = None
        if self.with_logprobs and self.top_logprobs is None:
            starts, shown = sequence.detokenized().offsets, sequence.num_shown
            first = end = sent.num_logprobs
            while end < len(starts) and (starts[end] < shown or starts[end] == shown and sent.is_finished):
                end += 1
            sent.num_logprobs = end
            logprobs = {"tokens": [self.model.tokenizer.decode([token]) for token in sequence.tokens[first:end]],
                        "token_logprobs": sequence.logprobs[first:end], "top_logprobs": None,
                        "text_offset": [len(prompt) + start for start in starts[first:end]]}
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason and FINISH_REASONS[reason]}

    def _format_scores(self, sequence: GeneratedSequence, scores: TokenScores, length: int) -> dict[str, Any]:
        """Of all tokens in the first `length` characters of the answer."""
        decode, skipped = self.model.tokenizer.decode, 0 if self.echo else len(sequence.request.prompt)
        ids = sequence.ids[skipped:]
        (detokenizer := Detokenizer(decode)).extend(ids)
        starts = detokenizer.offsets
        kept = sum(start < length for start in starts) if sequence.finish_reason == "stop" else len(ids)
        likeliest = [None, *({decode([token]): value for token, value in reversed(place)}
                             for place in scores.top_logprobs)][skipped:][:kept] if self.top_logprobs else None
        return {"tokens": [decode([token]) for token in ids[:kept]], "text_offset": starts[:kept],
                "token_logprobs": [None, *scores.logprobs][skipped:][:kept], "top_logprobs": likeliest}


def parse_completion(body: bytes, model: ServedModel) -> OpenAICompletion:
    given, most = read_json(body), model.max_new_tokens
    samples = given.get("n") if isinstance(given, dict) else None
    penalty = NeutralKey((0, 0.0), "is not done here; repetition_penalty is")
    asked = read_keys(given, {
        "prompt": object, "model": object, "user": str, "echo": bool, "stream": bool, "stream_options": object,
        "stop": object, "n": NumberKey(1, 1, model.limits.max_texts), "max_tokens": NumberKey(min(16, most), 0, most),
        "seed": NumberKey(secrets.randbelow(1 << 31), -(1 << 63), 1 << 63),
        "logprobs": NumberKey(-1, 0, MAX_LOGPROBS),  # -1: not given
        "temperature": NumberKey(1.0, 0.0, MAX_TEMPERATURE), "top_k": NumberKey(0, 0, 1 << 31),
        "top_p": NumberKey(1.0, 0.0, 1.0), "min_p": NumberKey(0.0, 0.0, 1.0),
        "repetition_penalty": NumberKey(1.0, 0.01, 100.0), "frequency_penalty": penalty, "presence_penalty": penalty,
        "best_of": NeutralKey((1 if samples is None else samples,), "is not done here, only n"),
        "suffix": NeutralKey(("",), "is not done here: the model goes on from a prompt"),
        "logit_bias": NeutralKey(({},), "is not done here")})
    if asked["model"] is not None and check_text(asked["model"], "model") != model.name:
        raise HttpError(404, f"model: here is {model.name!r}, and no other", param="model", code="model_not_found")
    prompts, texts = _read_prompts(asked["prompt"], model)
    model.check_num_texts(len(prompts) * asked["n"], "n")
    scores_all_tokens = asked["logprobs"] > 0 or asked["logprobs"] == 0 and asked["echo"]
    if scores_all_tokens and asked["stream"]:
        raise invalid_field("stream",
                            "is not possible with the log-probabilities of other tokens, nor with those of a prompt")
    if not asked["max_tokens"] and not scores_all_tokens:
        raise invalid_field("max_tokens", f"expected a whole number from 1 to {most}")
    if 0 < asked["temperature"] < MIN_TEMPERATURE:
        raise invalid_field("temperature", f"expected 0 (the likeliest token) or a number from {MIN_TEMPERATURE} to "
                            f"{MAX_TEMPERATURE:g}")
    if asked["top_p"] == 0:
        raise invalid_field("top_p", "expected more than 0; a temperature of 0 takes the likeliest token")
    given_stops = asked["stop"]
    stops = [] if given_stops is None else given_stops if isinstance(given_stops, list) else [given_stops]
    if len(stops) > MAX_STOPS or not all(0 < len(check_text(stop, "stop")) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid_field("stop", f"expected at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    options = asked["stream_options"]
    if options is not None and not (asked["stream"] and isinstance(options, dict)):
        raise invalid_field("stream_options", "expected an object, with stream: true")
    sampling = Sampling(greedy=True, repetition_penalty=asked["repetition_penalty"]) if not asked["temperature"] else (
        Sampling(**{name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}))
    return OpenAICompletion(
        model=model, prompts=prompts, shown_prompts=texts if asked["echo"] else ("",) * len(prompts),
        num_samples=asked["n"], max_new_tokens=asked["max_tokens"], sampling=sampling, seed=asked["seed"],
        stops=tuple(stops), top_logprobs=asked["logprobs"] if scores_all_tokens else None, echo=asked["echo"],
        with_logprobs=asked["logprobs"] >= 0, is_streaming=asked["stream"],
        with_usage=read_keys(options or {}, {"include_usage": bool})["include_usage"])


def _read_prompts(given: Any, model: ServedModel) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """(token ids, texts) of a string, a list of strings, a list of ids or a list of lists of ids."""
    if not isinstance(given, list):
        given = ["" if given is None else given]
    elif given and all(isinstance(token, int) for token in given):
        given = [given]
    if not given:
        raise invalid_field("prompt", "is empty")
    model.check_num_texts(len(given), "prompt")
    prompts, texts, size = list[tuple[int, ...]](), list[str](), model.tokenizer.vocab_size
    for one in given:
        if isinstance(one, list):
            if not one or not all(type(token) is int and 0 <= token < size for token in one):
                raise invalid_field("prompt", f"expected texts, or lists of tokens from 0 to {size - 1}")
            ids, text = tuple(one), model.tokenizer.decode(one)
        else:
            text = check_text(one, "prompt")
            ids = tuple(model.tokenizer.encode(text))
        prompts.append(model.check_prompt(ids, "prompt"))
        texts.append(text)
    return tuple(prompts), tuple(texts)
