"""Answers to prompts: tokens in, text out, in the order of the prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import IO, final

from data.tokenizer_base import Tokenizer
from megatron.config.tree import require
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator, Text
from megatron.inference.loading import Loaded
from megatron.inference.request import Request, Wish
from megatron.inference.wording import Wording
from mpu.collectives import broadcast_json
from mpu.groups import Groups


@final
class Answers:
    def __init__(self, loaded: Loaded, groups: Groups, wish: Wish, rows: int) -> None:
        """`rows` texts at a time. Every rank of the model has the same."""
        self._tokenizer, self._groups, self._wish = loaded.tokenizer, groups, wish
        self._decoder = Decoder(loaded.model, rows)
        self._wording = Wording(loaded.tokenizer)
        self._generator = generator_of(loaded, self._decoder, self._wording, wish.slides)
        self._tokens, self._seconds = 0, 0.0

    def write(self, prompts: Iterable[str], out: IO[str] | None, *, jsonl: bool) -> None:
        """`prompts` and `out` are rank 0's. Answers that are ready before earlier ones wait for them; the one whose
        turn it is is printed as it comes."""
        begin, page = time.monotonic(), _Page(self._wording, out, jsonl)
        for text in self._generator.run(self._requests(prompts, page), page.show):
            self._tokens += len(text.tokens)
        self._seconds += time.monotonic() - begin

    def _requests(self, prompts: Iterable[str], page: _Page) -> Iterator[Request]:
        """The same on every rank."""
        world, mine, number = self._groups.world, iter(prompts), 0
        while (prompt := broadcast_json(next(mine, None) if world.rank == 0 else None, world, 0)) is not None:
            ids = ids_of(self._tokenizer, prompt)
            refusal = self._wish.refusal(ids, self._decoder.length)
            require(not refusal, refusal)
            for request in self._wish.requests(ids, number):
                page.expect(number, prompt)
                number += 1
                yield request

    def speed(self) -> str:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return f"{self._tokens} tokens in {self._seconds:.1f} s, {rate:.1f} a second"


def ids_of(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Of nothing, a text goes on from the end of the document before it."""
    return tuple(int(token) for token in tokenizer.encode(prompt)) or (tokenizer.eod,)


def generator_of(loaded: Loaded, decoder: Decoder, wording: Wording, slides: bool) -> Generator:
    tokenizer, model = loaded.tokenizer, loaded.model
    return Generator(decoder, vocabulary=tokenizer.vocab_size, slides=slides, stops=wording.is_over,
                     eod=tokenizer.eod if tokenizer.eod < model.config.tokens else None)


@final
class _Page:
    """What is printed: answer after answer, as a line of JSON or as plain text behind its prompt."""

    def __init__(self, wording: Wording, out: IO[str] | None, jsonl: bool) -> None:
        self._wording, self._out, self._jsonl = wording, out, jsonl
        self._prompts: dict[int, str] = {}
        self._ready: dict[int, Text] = {}
        self._turn, self._printed = 0, ""

    def expect(self, number: int, prompt: str) -> None:
        if self._out is not None:
            self._prompts[number] = prompt

    def show(self, text: Text) -> None:
        """A text has a token more, or has ended."""
        if self._out is None:
            return
        self._ready[text.request.number] = text
        while (text_now := self._ready.get(self._turn)) is not None:
            self._print(text_now, self._out)
            if text_now.ended is None:
                break
            del self._ready[self._turn], self._prompts[self._turn]
            self._turn += 1
        self._out.flush()

    def _print(self, text: Text, out: IO[str]) -> None:
        prompt = self._prompts[self._turn]
        if self._jsonl:
            if text.ended is not None:
                out.write(self._line(prompt, text) + "\n")
            return
        found = prompt + self._wording.settled(text)
        out.write(found[len(self._printed):])
        self._printed = found
        if text.ended is not None:
            out.write("\n")
            self._printed = ""

    def _line(self, prompt: str, text: Text) -> str:
        return json.dumps({"prompt": prompt, "text": self._wording.of(text), "tokens": text.tokens,
                           "logprobs": [round(value, 6) for value in text.logprobs], "ended": text.ended},
                          ensure_ascii=False)
