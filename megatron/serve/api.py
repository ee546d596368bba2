"""The two APIs: OpenAI's `POST /v1/completions` and Megatron-LM's `PUT /api`. Each has a function that parses a body,
and a class that holds the request with its growing sequences and formats the answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, final

from data.cli import suggest_spelling
from data.strict_json import decode_utf8, parse_json
from megatron.inference.generation import Detokenizer, FinishReason, GeneratedSequence
from megatron.inference.load import LoadedModel
from megatron.inference.request import Sampling
from megatron.serve.cli import ServerLimits

MAX_QUOTED_CHARACTERS = 60  # characters of an unknown key in an error message


@final
class HttpError(Exception):
    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: tuple[tuple[str, str], ...] = ()) -> None:
        """`param`: the key that is wrong; `code`: OpenAI's error code; `headers`: of the response."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def invalid_field(name: str, message: str) -> HttpError:
    return HttpError(400, f"{name}: {message}", param=name)


class NumberKey(NamedTuple):
    """A whole number where the default is one."""

    default: float
    low: float
    high: float


class NeutralKey(NamedTuple):
    """A key that is supported only with values that change nothing."""

    accepted: Collection[Any]
    why: str


# bool: absent is false; str: valid Unicode; object: any value, which the API checks.
KeyKind = type[bool] | type[str] | type[object] | NumberKey | NeutralKey


def read_keys(given: bytes | dict[str, Any], kinds: Mapping[str, KeyKind]) -> dict[str, Any]:
    """The value of each known key of a body or an object in it, checked; None: not given. Other keys are refused by
    name."""
    if isinstance(given, bytes):
        try:
            given = parse_json(decode_utf8(given))
        except ValueError as error:
            raise HttpError(400, f"the body is {str(error)[:200]}") from None
    if not isinstance(given, dict):
        raise HttpError(400, "expected a JSON object")
    found = {}
    for name, kind in kinds.items():
        value = found[name] = given.get(name)
        if isinstance(kind, NumberKey):
            default, low, high = kind
            is_whole = isinstance(default, int)
            if value is None:
                found[name] = default
            elif isinstance(value, bool) or not isinstance(value, int if is_whole else int | float) \
                    or not low <= value <= high:
                raise invalid_field(name, f"expected a whole number from {low} to {high}" if is_whole
                                    else f"expected a number from {low:g} to {high:g}")
            else:
                found[name] = type(default)(value)
        elif isinstance(kind, NeutralKey):
            if value is not None and not any(type(value) is type(one) and value == one for one in kind.accepted):
                raise invalid_field(name, kind.why)
        elif kind is bool:
            if value is not None and not isinstance(value, bool):
                raise invalid_field(name, "expected true or false")
            found[name] = bool(value)
        elif kind is str and value is not None:
            check_text(value, name)
    if unknown := sorted(name for name, value in given.items() if name not in kinds and value is not None):
        first = unknown[0][:MAX_QUOTED_CHARACTERS]
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        hint = suggest_spelling(first, kinds) or "docs/serve.md lists the keys"
        raise HttpError(400, f"unknown key {first!r}{more}: {hint}", param=ascii(first)[1:-1])
    return found


def check_text(value: Any, name: str) -> str:
    """Refuses lone surrogates."""
    if not isinstance(value, str):
        raise invalid_field(name, "expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid_field(name, "expected Unicode text; half of a surrogate pair is none") from None
    return value


@final
class ServedModel:
    def __init__(self, loaded: LoadedModel, name: str, limits: ServerLimits) -> None:
        self.name, self.tokenizer, self.eod, self.limits = name, loaded.tokenizer, loaded.eod, limits
        self.created, self.positions = int(time.time()), loaded.model.config.max_position_embeddings
        self.max_new_tokens = min(limits.max_new_tokens or self.positions, self.positions)

    def check_prompt(self, ids: tuple[int, ...], name: str) -> tuple[int, ...]:
        """An empty prompt becomes the end-of-document token."""
        if not ids and self.eod is not None:
            ids = (self.eod,)
        longest = min(self.limits.max_prompt_tokens or self.positions, self.positions)
        if not ids:
            raise invalid_field(name, "is empty, and this model has no token that begins a document")
        if len(ids) > longest:
            raise HttpError(400, f"{name}: {len(ids)} tokens, and at most {longest} can be read", param=name,
                            code="context_length_exceeded")
        return ids

    def check_num_texts(self, count: int, name: str) -> None:
        if count > self.limits.max_texts:
            raise invalid_field(name, f"{count} texts in one request, and at most {self.limits.max_texts} are taken")


@dataclass(eq=False)
class ApiRequest:
    """What a client asks for, and its sequences: `RequestQueue` makes them and lets them grow. A subclass for each API
    formats the answer. Used by one thread at a time: the clients', or for a while the one that parses and formats."""

    model: ServedModel
    _: KW_ONLY
    prompts: tuple[tuple[int, ...], ...]
    shown_prompts: tuple[str, ...]  # texts that the answers to each prompt begin with
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...] = ()
    num_samples: int = 1
    # With log-probabilities of all tokens, also of the prompt, and of this many likeliest ones; None: without.
    top_logprobs: int | None = None
    is_streaming: bool = False
    sequences: list[GeneratedSequence] = field(init=False)
    # Sequences that have not ended, or that are not scored although they should be.
    num_open: int = field(init=False)
    # Set when all sequences have ended or `error` is set, and of a stream for each token.
    changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    error: Exception | None = field(init=False, default=None)  # ConnectionResetError: cancelled

    def usage(self) -> dict[str, int]:
        read, made = sum(map(len, self.prompts)), sum(len(sequence.tokens) for sequence in self.sequences)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def full_response(self) -> dict[str, Any]:
        raise NotImplementedError

    def new_chunks(self) -> list[dict[str, Any]]:
        """Of a streamed answer: the new text since the last call, and what follows it once all have ended."""
        raise NotImplementedError


# ---- OpenAI's completions --------------------------------------------------------------------------------------------

MAX_LOGPROBS = 5
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.001, 100.0  # beyond, logits overflow
FINISH_REASONS: dict[FinishReason, str] = {"eod": "stop", "stop": "stop", "length": "length", "positions": "length",
                                           "dropped": "length", "not finite": "error"}


@final
@dataclass(eq=False, kw_only=True)
class OpenAICompletion(ApiRequest):
    echo: bool
    with_logprobs: bool
    with_usage: bool  # the stream ends with a chunk that has token counts
    frame: dict[str, Any]  # what the answer and each of its chunks begin with
    # Of each sequence whose text has begun: the tokens whose log-probabilities were sent.
    _num_sent: dict[int, int] = field(init=False, default_factory=dict)
    _finished: set[int] = field(init=False, default_factory=set)

    def full_response(self) -> dict[str, Any]:
        decode, choices = self.model.tokenizer.decode, list[dict[str, Any]]()
        for place, sequence in enumerate(self.sequences):
            choices.append(choice := self._choice(place, sequence))
            if (scores := sequence.scores) is None:
                continue
            skipped = 0 if self.echo else len(sequence.request.prompt)
            ids = sequence.ids[skipped:]
            (detokenizer := Detokenizer(decode)).extend(ids)
            starts, length = detokenizer.offsets, len(choice["text"])
            # a stop string ends the text within the tokens
            kept = sum(start < length for start in starts) if sequence.finish_reason == "stop" else len(ids)
            likeliest = [None, *({decode([token]): value for token, value in reversed(position)}
                                 for position in scores.top_logprobs)][skipped:][:kept] if self.top_logprobs else None
            choice["logprobs"] = {"tokens": [decode([token]) for token in ids[:kept]], "text_offset": starts[:kept],
                                  "token_logprobs": [None, *scores.logprobs][skipped:][:kept],
                                  "top_logprobs": likeliest}
        return {**self.frame, "choices": choices, "usage": self.usage()}

    def new_chunks(self) -> list[dict[str, Any]]:
        choices = [self._choice(place, sequence) for place, sequence in enumerate(self.sequences)
                   if place not in self._finished]
        chunks = [{**self.frame, "choices": [choice]} for choice in choices
                  if choice["text"] or choice["finish_reason"] is not None]
        if self.with_usage and not self.num_open:
            chunks.append({**self.frame, "choices": [], "usage": self.usage()})
        return chunks

    def _choice(self, place: int, sequence: GeneratedSequence) -> dict[str, Any]:
        """The new text since the last call, with the log-probabilities of the new tokens within it."""
        prompt, reason, logprobs = self.shown_prompts[place // self.num_samples], sequence.finish_reason, None
        text = ("" if place in self._num_sent else prompt) + sequence.new_text()
        first = end = self._num_sent.get(place, 0)
        if self.with_logprobs and self.top_logprobs is None:
            starts, shown = sequence.detokenized().offsets, sequence.num_shown
            while end < len(starts) and (starts[end] < shown or starts[end] == shown and reason is not None):
                end += 1
            logprobs = {"tokens": [self.model.tokenizer.decode([token]) for token in sequence.tokens[first:end]],
                        "token_logprobs": sequence.logprobs[first:end], "top_logprobs": None,
                        "text_offset": [len(prompt) + start for start in starts[first:end]]}
        self._num_sent[place] = end
        if reason is not None:
            self._finished.add(place)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason and FINISH_REASONS[reason]}


def parse_completion(body: bytes, model: ServedModel) -> OpenAICompletion:
    most, penalty = model.max_new_tokens, NeutralKey((0, 0.0), "is not done here; repetition_penalty is")
    asked = read_keys(body, {
        "prompt": object, "model": object, "user": str, "echo": bool, "stream": bool, "stream_options": object,
        "stop": object, "n": NumberKey(1, 1, model.limits.max_texts), "max_tokens": NumberKey(min(16, most), 0, most),
        "seed": NumberKey(secrets.randbelow(1 << 31), -(1 << 63), 1 << 63),
        "logprobs": NumberKey(-1, 0, MAX_LOGPROBS),  # -1: not given
        "temperature": NumberKey(1.0, 0.0, MAX_TEMPERATURE), "top_k": NumberKey(0, 0, 1 << 31),
        "top_p": NumberKey(1.0, 0.0, 1.0), "min_p": NumberKey(0.0, 0.0, 1.0),
        "repetition_penalty": NumberKey(1.0, 0.01, 100.0), "frequency_penalty": penalty, "presence_penalty": penalty,
        "best_of": object, "suffix": NeutralKey(("",), "is not done here: the model goes on from a prompt"),
        "logit_bias": NeutralKey(({},), "is not done here")})
    if asked["best_of"] is not None and (type(asked["best_of"]) is not int or asked["best_of"] != asked["n"]):
        raise invalid_field("best_of", "is not done here, only n")
    if asked["model"] is not None and check_text(asked["model"], "model") != model.name:
        raise HttpError(404, f"model: expected {model.name!r}, or none", param="model", code="model_not_found")
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
        with_usage=read_keys(options or {}, {"include_usage": bool})["include_usage"],
        frame={"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
               "model": model.name, "seed": asked["seed"]})


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


# ---- Megatron-LM's text generation server ----------------------------------------------------------------------------

MAX_PROMPTS = 128
DEFAULT_TOKENS = 64
GPT2_EOD = 50256  # old clients send it with any tokenizer


@final
class MegatronGeneration(ApiRequest):
    def full_response(self) -> dict[str, Any]:
        """The texts include the prompt and the line end that stopped them, as in Megatron-LM."""
        decode = self.model.tokenizer.decode
        return {"text": [prompt + decode(sequence.tokens)
                         for prompt, sequence in zip(self.shown_prompts, self.sequences, strict=True)],
                "segments": [[decode([token]) for token in sequence.ids] for sequence in self.sequences],
                "logprobs": None if self.top_logprobs is None else [sequence.scores and sequence.scores.logprobs
                                                                    for sequence in self.sequences],
                "random_seed": self.seed}


def parse_generation(body: bytes, model: ServedModel) -> MegatronGeneration:
    most = model.max_new_tokens
    asked = read_keys(body, {
        "prompts": object, "add_BOS": bool, "logprobs": bool, "no_log": bool,
        "tokens_to_generate": NumberKey(min(DEFAULT_TOKENS, most), 0, most),
        "temperature": NumberKey(1.0, 0.001, 100.0), "top_k": NumberKey(0, 0, 1000), "top_p": NumberKey(0.0, 0.0, 1.0),
        "top_p_bound": NumberKey(0.0, 0.0, 1.0), "top_p_decay": NeutralKey((0, 0.0), "is not done here"),
        "random_seed": NumberKey(secrets.randbelow(1 << 31), 0, 1 << 63),
        "stop_on_eol": bool, "stop_on_double_eol": bool,
        "stop_token": NeutralKey((model.eod, GPT2_EOD), "a text ends with its document, or as stop_on_eol says"),
        "prevent_newline_after_colon": NeutralKey((False,), "is not done here"),
        "beam_width": NeutralKey((), "beam search is not done here"),
        "length_penalty": NeutralKey((1, 1.0), "belongs to beam search, which is not done here"),
        "max_len": NeutralKey((), "is no longer used; tokens_to_generate has taken its place"),
        "sentences": NeutralKey((), "is no longer used; prompts has taken its place")})
    texts, top_k, top_p = asked["prompts"], asked["top_k"], asked["top_p"]
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_PROMPTS:
        raise invalid_field("prompts", f"expected a list of 1 to {MAX_PROMPTS} texts")
    model.check_num_texts(len(texts), "prompts")
    for text in texts:
        check_text(text, "prompts")
    first: tuple[int, ...] = ()
    if asked["add_BOS"]:
        if model.eod is None:
            raise invalid_field("add_BOS", "this model has no token that begins a document")
        first = (model.eod,)
    elif "" in texts:
        raise invalid_field("prompts", "one is empty, which needs add_BOS")
    if not asked["tokens_to_generate"] and not asked["logprobs"]:
        raise invalid_field("tokens_to_generate", "0 needs logprobs: true")
    if top_k and top_p:
        raise invalid_field("top_p", "cannot be set together with top_k")
    if asked["top_p_bound"] > top_p:
        raise invalid_field("top_p_bound", "expected at most top_p")
    sampling = Sampling(greedy=True) if top_k == 1 else Sampling(temperature=asked["temperature"], top_k=top_k,
                                                                 top_p=top_p or 1.0)
    return MegatronGeneration(
        model, shown_prompts=tuple(texts), max_new_tokens=asked["tokens_to_generate"], sampling=sampling,
        prompts=tuple(model.check_prompt((*first, *model.tokenizer.encode(text)), "prompts") for text in texts),
        seed=asked["random_seed"], stops=("\n",) * asked["stop_on_eol"] + ("\n\n",) * asked["stop_on_double_eol"],
        top_logprobs=0 if asked["logprobs"] else None)
