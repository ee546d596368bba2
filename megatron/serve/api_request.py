"""What both APIs share: the request for texts that they are translated to, and a strict reader of JSON bodies.

Each key of a body is read once with its type and range; keys that are left over are refused by name.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from data.strict_json import decode_utf8, parse_json
from data.tokenizer import Tokenizer
from megatron.inference.generation import GeneratedSequence
from megatron.inference.request import Request, Sampling
from megatron.serve.admission import HttpError, ServerLimits, invalid_field
from megatron.serve.scheduler import SequenceLogprobs

MAX_QUOTED_CHARACTERS = 60
"""Of an unknown key in an error message."""
Number = TypeVar("Number", int, float)


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json(decode_utf8(body))
    except ValueError as error:
        raise HttpError(400, f"the body is {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise HttpError(400, "expected a JSON object")
    return found


@final
class StrictJson:
    def __init__(self, values: dict[str, Any]) -> None:
        self._remaining = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._remaining.pop(name, None)

    def take_bool(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid_field(name, "expected true or false")
        return bool(value)

    def take_number(self, name: str, default: Number, low: float, high: float) -> Number:
        """A whole number where the default is one."""
        value = self.take(name)
        if value is None:
            return default
        is_whole = isinstance(default, int)
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise invalid_field(name, f"expected a whole number from {low} to {high}" if is_whole
                                else f"expected a number from {low:g} to {high:g}")
        return type(default)(value)

    def require_neutral(self, name: str, accepted: Collection[Any], why: str) -> None:
        """For a key that is supported only with values that change nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            raise invalid_field(name, why)

    def reject_unknown(self) -> None:
        if self._remaining:
            first, *others = sorted(self._remaining)
            more = f" and {len(others)} more keys are" if others else " is"
            raise HttpError(400, f"{first[:MAX_QUOTED_CHARACTERS]!r}{more} not known here",
                            param=ascii(first[:MAX_QUOTED_CHARACTERS])[1:-1])


def valid_text(value: Any, name: str) -> str:
    """Refuses lone surrogates."""
    if not isinstance(value, str):
        raise invalid_field(name, "expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid_field(name, "expected Unicode text; half of a surrogate pair is none") from None
    return value


@final
@dataclass(frozen=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    positions: int
    eod: int | None
    limits: ServerLimits
    created: int

    @property
    def max_new_tokens(self) -> int:
        return min(self.limits.max_new_tokens or self.positions, self.positions)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(int(token) for token in self.tokenizer.encode(text))

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

    def check_num_sequences(self, count: int, name: str) -> None:
        if count > self.limits.max_texts:
            raise invalid_field(name, f"{count} texts in one request, and at most {self.limits.max_texts} are taken")


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """What a client asks for; a subclass for each API formats the answer."""

    model: ServedModel
    prompts: tuple[tuple[int, ...], ...]
    shown_prompts: tuple[str, ...]
    """Texts that the answers to each prompt begin with."""
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...] = ()
    num_samples: int = 1
    top_logprobs: int | None = None
    """With log-probabilities of all tokens, also of the prompt, and of this many likeliest ones; None: without."""
    is_streaming: bool = False

    def generation_requests(self) -> list[Request]:
        """In the order of the prompts, each with its own random numbers."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.num_samples)]
        return [Request(place, prompt, self.max_new_tokens, self.sampling, f"{self.seed}/{place}", self.stops,
                        self.top_logprobs) for place, prompt in enumerate(prompts)]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def full_response(self, sequences: Sequence[GeneratedSequence],
                      logprobs: Mapping[int, SequenceLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def new_chunks(self, sequences: Sequence[GeneratedSequence]) -> list[dict[str, Any]]:
        """Of a streamed answer: the new text since the last call, and what follows the text once all have ended."""
        raise NotImplementedError


def build_sampling(temperature: float, *, top_k: int, top_p: float, min_p: float = 0.0,
                   repetition_penalty: float = 1.0) -> Sampling:
    if temperature == 0:
        return Sampling(greedy=True, repetition_penalty=repetition_penalty)
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                    repetition_penalty=repetition_penalty)


def new_seed() -> int:
    return secrets.randbelow(1 << 31)
