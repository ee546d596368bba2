"""What both dialects ask for, without their words, and the model they ask it of."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from data.tokenizer_base import Tokenizer
from megatron.inference.generation import Text
from megatron.inference.request import Request, Sampling
from megatron.serve.fields import Fields
from megatron.serve.judge import Verdict
from megatron.serve.limits import Limits
from megatron.serve.refusal import Refusal, wrong

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
