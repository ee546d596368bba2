"""Answers to prompts: tokens in, text out, in the order of the prompts."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import starmap
from typing import IO, final

from data.storage import escape_to_one_line
from data.tokenizer_base import Tokenizer
from megatron.checkpoint.agree import on_rank_0
from megatron.config.tree import require
from megatron.errors import NumericsError
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator, Text
from megatron.inference.loading import Loaded
from megatron.inference.prompts import Prompt, Prompts
from megatron.inference.request import Request, Wish
from megatron.inference.wording import Wording
from mpu.collectives import broadcast_json
from mpu.groups import Groups, set_timeout

BETWEEN = "-" * 15 + "\n"
"""Answers, each of any number of lines."""

PATIENCE = timedelta(days=365)
"""With who types, or writes into a pipe."""


@final
class Answers:
    def __init__(self, loaded: Loaded, groups: Groups, wish: Wish, rows: int) -> None:
        """`rows` texts at a time. Every rank of the model has the same."""
        self._tokenizer, self._groups, self._wish = loaded.tokenizer, groups, wish
        self._decoder = Decoder(loaded.model, rows)
        self._wording = Wording(loaded.tokenizer)
        self._generator = generator_of(loaded, self._decoder, self._wording, wish.slides)
        self._tokens, self._seconds = 0, 0.0

    def write(self, prompts: Prompts, out: IO[str] | None, *, jsonl: bool) -> None:
        """`prompts` and `out` are rank 0's. Answers that are ready before earlier ones wait for them; the one whose
        turn it is is printed as it comes."""
        on_rank_0(lambda: self._check(prompts.ahead), self._groups.world)
        begin, page = time.monotonic(), _Page(self._wording, out, jsonl)
        for text in self._texts(prompts, page):
            if text.ended == "not finite":
                raise NumericsError("the model gives logits that are no numbers, or infinite, after "
                                    f"{len(text.ids)} tokens: ask for --dtype fp32 or bf16")
            page.show(text)
            self._tokens += text.ended is not None and len(text.tokens)
        self._seconds += time.monotonic() - begin

    def _check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse now what could not be answered in hours."""
        for prompt in prompts:
            self._ids(prompt)

    def _texts(self, prompts: Prompts, page: _Page) -> Iterator[Text]:
        """Those that got a token or ended, after each step. The same on every rank."""
        generator, world = self._generator, self._groups.world
        waiting, more, number = deque[Request](), True, 0
        if broadcast_json(prompts.lasts if world.rank == 0 else None, world, 0):
            set_timeout(self._groups, PATIENCE)
        while more or waiting or generator.runs:
            if more and len(waiting) < generator.room:
                most, wait = generator.room - len(waiting), not (waiting or generator.runs)
                found = on_rank_0(lambda: prompts.take(most, wait), world)
                more = found is not None
                for prompt in starmap(Prompt, found or ()):
                    requests = self._wish.requests(self._ids(prompt), number)
                    page.expect(number, prompt.text, len(requests))
                    waiting.extend(requests)
                    number += len(requests)
            beginning = [waiting.popleft() for _ in range(min(generator.room, len(waiting)))]
            yield from generator.begin(beginning) if beginning else []
            yield from generator.step()

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        ids = ids_of(self._tokenizer, prompt.text)
        refusal = self._wish.refusal(ids, self._decoder.length)
        require(not refusal, f"{prompt.where}: {refusal}")
        return ids

    def speed(self) -> str:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return f"{self._tokens} tokens in {self._seconds:.1f} s, {rate:.1f} a second"


def ids_of(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Of nothing, a text goes on from the end of the document before it."""
    return tuple(int(token) for token in tokenizer.encode(prompt)) or (tokenizer.eod,)


def generator_of(loaded: Loaded, decoder: Decoder, wording: Wording, slides: bool) -> Generator:
    tokenizer, model = loaded.tokenizer, loaded.model
    return Generator(decoder, vocabulary=tokenizer.vocab_size, slides=slides, stops=wording.is_over,
                     eod=tokenizer.eod if tokenizer.eod < model.config.known_vocab_size else None)


@final
class _Page:
    """What is printed: answer after answer, as a line of JSON or as plain text behind its prompt, with a line
    between them."""

    def __init__(self, wording: Wording, out: IO[str] | None, jsonl: bool) -> None:
        self._wording, self._out, self._jsonl = wording, out, jsonl
        self._prompts: dict[int, str] = {}
        self._ready: dict[int, Text] = {}
        self._turn, self._begun, self._printed = 0, 0, ""

    def expect(self, first: int, prompt: str, answers: int) -> None:
        if self._out is not None:
            self._prompts.update(dict.fromkeys(range(first, first + answers), prompt))

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
                line = self._line(prompt, text)
                out.write((escape_to_one_line(line) if out.isatty() else line) + "\n")
            return
        if self._begun < self._turn:
            out.write(BETWEEN)
            self._begun = self._turn
        found = prompt + self._wording.settled(text)
        new = found[len(self._printed):]
        out.write(escape_to_one_line(new, allowed="\n") if out.isatty() else new)
        self._printed = found
        if text.ended is not None:
            out.write("\n")
            self._printed = ""

    def _line(self, prompt: str, text: Text) -> str:
        return json.dumps({"prompt": prompt, "text": self._wording.of(text), "tokens": text.tokens,
                           "logprobs": [round(value, 6) for value in text.logprobs], "ended": text.ended},
                          ensure_ascii=False)
