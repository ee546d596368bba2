"""What both dialects ask for, without their words, and the model they ask it of.

The JSON object of a request is read key by key: each is taken once with its type and range, and what is left over is
refused by name. Nothing that a client asks for is ignored in silence.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

from data.tokenizer_base import Tokenizer
from megatron.inference.generation import Text
from megatron.inference.request import Request, Sampling
from megatron.serve.leader import Verdict
from megatron.serve.limits import Limits, Refusal, wrong

SHOWN = 60
"""Characters of a name that is quoted back."""


def parse(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object; none of Python's additions to JSON."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "expected a JSON object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


@final
class Fields:
    def __init__(self, values: dict[str, Any]) -> None:
        """What is null is not given."""
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        """Whatever it is; None where it is not given."""
        return self._left.pop(name, None)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, "expected true or false")
        return default if value is None else value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(name, f"expected a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise wrong(name, f"expected a number from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else plain(value, name)

    def only(self, name: str, accepted: Collection[Any], why: str) -> None:
        """A key that is known, but only with values that change nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            raise wrong(name, why)

    def finish(self) -> None:
        if self._left:
            first, *others = sorted(self._left)
            more = f" and {len(others)} more keys are" if others else " is"
            raise Refusal(400, f"{first[:SHOWN]!r}{more} not known here", name=ascii(first[:SHOWN])[1:-1])


def plain(value: Any, name: str) -> str:
    """A text of whole characters."""
    if not isinstance(value, str):
        raise wrong(name, "expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, "expected Unicode text; half of a surrogate pair is none") from None
    return value


COLDEST, HOTTEST = 0.001, 100.0
"""Temperatures; beyond, logits would leave what numbers can say."""
MOST_STOPS, LONGEST_STOP = 16, 256


@dataclass(frozen=True, kw_only=True)
class Asked:
    prompts: tuple[tuple[int, ...], ...]
    samples: int
    most: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...] = ()
    top: int | None = None
    """Asked for: how likely every token is, that of the prompt as well, and so many of the likeliest."""

    def requests(self) -> list[Request]:
        """Texts in the order of the prompts, each with a stream of random numbers of its own."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.samples)]
        return [Request(place, prompt, self.most, self.sampling, f"{self.seed}/{place}", self.stops)
                for place, prompt in enumerate(prompts)]

    @property
    def read(self) -> int:
        return sum(map(len, self.prompts))


class Job(Protocol):
    """A request in one of the dialects."""

    @property
    def asked(self) -> Asked: ...

    @property
    def streams(self) -> bool: ...

    def whole(self, texts: Sequence[Text], verdicts: Mapping[int, Verdict]) -> dict[str, Any]:
        """The answer."""

    def more(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """Of an answer that is sent in parts: what there is since the last call."""

    def last(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """What comes behind the parts."""


@final
@dataclass(frozen=True)
class Subject:
    """The model, as a client sees it."""

    name: str
    tokenizer: Tokenizer
    positions: int
    eod: int | None
    limits: Limits
    created: int

    @property
    def most(self) -> int:
        return min(self.limits.max_new_tokens or self.positions, self.positions)

    def prompt_of(self, text: str, name: str) -> tuple[int, ...]:
        return self.checked(tuple(int(token) for token in self.tokenizer.encode(text)), name)

    def checked(self, ids: tuple[int, ...], name: str) -> tuple[int, ...]:
        """One that is empty begins a document."""
        if not ids and self.eod is not None:
            ids = (self.eod,)
        longest = min(self.limits.max_prompt_tokens or self.positions, self.positions)
        if not ids:
            raise wrong(name, "is empty, and this model has no token that begins a document")
        if len(ids) > longest:
            raise Refusal(400, f"{name}: {len(ids)} tokens, and at most {longest} can be read", name=name,
                          code="context_length_exceeded")
        return ids

    def check_texts(self, prompts: int, samples: int, name: str) -> None:
        if prompts * samples > self.limits.max_texts:
            raise wrong(name, f"{prompts * samples} texts in one request, and at most {self.limits.max_texts} are "
                              "taken")


def temperature_of(fields: Fields) -> float:
    """0: always the likeliest token."""
    found = fields.number("temperature", 1.0, 0.0, HOTTEST)
    if 0 < found < COLDEST:
        raise wrong("temperature", f"expected 0 (the likeliest token) or a number from {COLDEST} to {HOTTEST:g}")
    return found


def sampling_of(temperature: float, *, top_k: int, top_p: float, min_p: float = 0.0,
                repetition_penalty: float = 1.0) -> Sampling:
    if temperature == 0:
        return Sampling(greedy=True, repetition_penalty=repetition_penalty)
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                    repetition_penalty=repetition_penalty)


def fresh_seed() -> int:
    return secrets.randbelow(1 << 31)
