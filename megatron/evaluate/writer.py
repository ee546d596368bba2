"""Texts that end where they are told to: what lm-eval's `generate_until` asks for, over the inference core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from data.tokenizer_base import Tokenizer
from megatron.config.tree import require
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from megatron.inference.request import Request, Sampling
from megatron.inference.wording import SequenceDetokenizer
from megatron.model.gpt2 import GPT2
from mpu.collectives import all_gather_json
from mpu.groups import Groups

SEED = 1234
DEFAULT_MAX_NEW_TOKENS = 256
"""New tokens, where a task does not say."""

MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN_KWARGS = frozenset({"do_sample", "temperature", "top_k", "top_p", "until", *MAX_TOKENS_KEYS})


@dataclass(frozen=True)
class GenerateUntilRequest:
    context: str
    until: tuple[str, ...]
    """A text ends before the first of these."""
    max_new_tokens: int
    sampling: Sampling

    @classmethod
    def from_kwargs(cls, context: str, kwargs: Mapping[str, Any]) -> GenerateUntilRequest:
        """As lm-eval's tasks say it in `generation_kwargs`: greedy, unless they give a temperature."""
        for name in kwargs:
            require(name in KNOWN_KWARGS,
                    f"generation_kwargs: {name} is not known here; known: {', '.join(sorted(KNOWN_KWARGS))}")
        until = kwargs.get("until") or []
        ends = tuple(end for end in ([until] if isinstance(until, str) else until) if end)
        most = next((kwargs[name] for name in MAX_TOKENS_KEYS if kwargs.get(name) is not None), DEFAULT_MAX_NEW_TOKENS)
        temperature = float(kwargs.get("temperature") or 0.0)
        sampling = Sampling(temperature=temperature, top_k=int(kwargs.get("top_k") or 0),
                            top_p=float(kwargs.get("top_p") or 1.0)
                            ) if kwargs.get("do_sample", True) and temperature > 0 else Sampling(greedy=True)
        return cls(context, ends, int(most), sampling)


@final
class TextCompleter:
    def __init__(self, model: GPT2, tokenizer: Tokenizer, groups: Groups, rows: int) -> None:
        self._tokenizer, self._groups, self._length = tokenizer, groups, model.config.max_position_embeddings
        self._detokenizer = SequenceDetokenizer(tokenizer)
        self._generator = Generator(Decoder(model, rows), vocabulary=tokenizer.vocab_size, eod=tokenizer.eod,
                                    should_stop=self._detokenizer.has_stop_string)

    def __call__(self, wanted_texts: Sequence[GenerateUntilRequest]) -> list[str]:
        """On every rank. Collective."""
        requests, dp = [self._request(number, one) for number, one in enumerate(wanted_texts)], self._groups.dp
        mine = self._generator.generate(requests[dp.rank :: dp.size])
        found = {str(text.request.number): self._detokenizer.decode(text) for text in mine}
        everywhere = {int(number): text for part in all_gather_json(found, dp) for number, text in part.items()}
        return [everywhere[number] for number in range(len(wanted_texts))]

    def _request(self, number: int, wanted: GenerateUntilRequest) -> Request:
        """With the end of the context, so that there is room for what comes."""
        room = self._length - wanted.max_new_tokens
        require(
            room > 0,
            f"{wanted.max_new_tokens} new tokens are asked for, and the model has {self._length} positions: a "
            "task's generation_kwargs say how many (max_gen_toks)")
        prompt = tuple(self._tokenizer.encode(wanted.context)[-room:]) or (self._tokenizer.eod,)
        return Request(number, prompt, wanted.max_new_tokens, wanted.sampling, f"{SEED}/{number}", wanted.until)
