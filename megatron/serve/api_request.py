"""What both APIs share: a request and its texts, which grow, and a strict reader of JSON bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, final

from data.strict_json import decode_utf8, parse_json
from data.tokenizer import Tokenizer
from megatron.inference.generation import Detokenizer, GeneratedSequence
from megatron.inference.request import Request, Sampling
from megatron.serve.admission import HttpError, ServerLimits, invalid_field

MAX_QUOTED_CHARACTERS = 60  # characters of an unknown key in an error message


class NumberKey(NamedTuple):
    """A whole number where the default is one."""

    default: float
    low: float
    high: float


class NeutralKey(NamedTuple):
    """A key that is supported only with values that change nothing."""

    accepted: Collection[Any]
    why: str


KeyKind = type[bool] | type[str] | type[object] | NumberKey | NeutralKey
"""bool: absent is false; str: valid Unicode; object: any value, which the API checks."""


def read_json(body: bytes) -> Any:
    try:
        return parse_json(decode_utf8(body))
    except ValueError as error:
        raise HttpError(400, f"the body is {str(error)[:200]}") from None


def read_keys(given: Any, kinds: Mapping[str, KeyKind]) -> dict[str, Any]:
    """The value of each known key, checked; None: not given. Other keys are refused by name."""
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
        raise HttpError(400, f"{first!r}" + (f" and {len(unknown) - 1} more keys are" if unknown[1:] else " is")
                        + " not known here", param=ascii(first)[1:-1])
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
@dataclass(frozen=True)
class ServedModel:
    name: str
    tokenizer: Tokenizer
    positions: int
    eod: int | None
    limits: ServerLimits
    created: int
    max_new_tokens: int

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
    """What a client asks for, and its texts: `RequestQueue` lets them grow. A subclass for each API formats the answer.
    Used by one thread at a time: the clients', or for a while the one that parses and formats."""

    model: ServedModel
    _: KW_ONLY
    prompts: tuple[tuple[int, ...], ...]
    shown_prompts: tuple[str, ...]  # texts that the answers to each prompt begin with
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...] = ()
    num_samples: int = 1
    top_logprobs: int | None = None
    """With log-probabilities of all tokens, also of the prompt, and of this many likeliest ones; None: without."""
    is_streaming: bool = False

    def __post_init__(self) -> None:
        prompts = [prompt for prompt in self.prompts for _ in range(self.num_samples)]
        self.texts = [GeneratedSequence(
            Request(place, prompt, self.max_new_tokens, self.sampling, f"{self.seed}/{place}", self.stops,
                    top_logprobs=self.top_logprobs), Detokenizer(self.model.tokenizer.decode))
            for place, prompt in enumerate(prompts)]
        """In the order of the prompts, each with its own random numbers."""
        self.num_open = len(self.texts)
        """Texts that have not ended, or that are not scored although they should be."""
        self.changed = asyncio.Event()
        """Set when all texts have ended or `error` is set, and of a stream for each token."""
        self.error: Exception | None = None  # ConnectionResetError: cancelled

    def count_tokens(self) -> tuple[int, int]:
        """(of the prompts, new)"""
        return sum(map(len, self.prompts)), sum(len(text.tokens) for text in self.texts)

    def full_response(self) -> dict[str, Any]:
        raise NotImplementedError

    def new_chunks(self) -> list[dict[str, Any]]:
        """Of a streamed answer: the new text since the last call, and what follows the text once all have ended."""
        raise NotImplementedError
