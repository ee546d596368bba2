"""Many texts at a time: a row of the decoder for each, and one that ends makes room for the next.

    generator.begin(requests)    reads prompts and takes the first token of each
    generator.step()             takes a token more of every text
    generator.run(requests)      both, until all have ended

Every tensor parallel rank does the same in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from megatron.inference.request import Request, Sampling
from megatron.inference.sampling import draw
from megatron.model.gpt2 import GPT2
from mpu.collectives import broadcast_into

READ = 8192
"""Tokens of prompts that are read together."""

End = Literal["eod", "stop", "length", "positions", "dropped", "not finite"]
"""The last one: the model gave a logit that is no number, or infinite."""


@dataclass(eq=False)
class Text:
    """What became of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """New ones; the end of the document is none."""
    logprobs: list[float] = field(default_factory=list)
    """Of each, under the model itself."""
    ended: End | None = None
    random: Random = field(init=False, repr=False)
    """Its own, whatever runs beside it."""

    def __post_init__(self) -> None:
        self.random = Random(self.request.stream)

    @property
    def ids(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]


Stops = Callable[[Text], bool]
"""Whether a text is over with the token it just got."""

Bars = Callable[[Text], Sequence[int]]
"""Tokens that a text may not have next."""


class Reader(Protocol):
    """Rows of texts, each read once and followed by a token at a time: what a Decoder is."""

    model: GPT2
    rows: int
    length: int

    def read(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor: ...

    def follow(self, tokens: Sequence[int]) -> Tensor: ...

    def move(self, source: int, target: int) -> None: ...

    def clear(self, row: int) -> None: ...


@final
class Generator:
    def __init__(self, decoder: Reader, *, vocabulary: int, eod: int | None, slides: bool = False,
                 stops: Stops = lambda text: False, bars: Bars = lambda text: ()) -> None:
        """Tokens from `vocabulary` on are never taken. Past the end of the position table a text ends or, with
        `slides`, goes on from its last tokens, which are read anew for each."""
        self._decoder, self._vocabulary, self._eod, self._slides = decoder, vocabulary, eod, slides
        self._stops, self._bars = stops, bars
        self._rows: list[Text] = []

    @property
    def room(self) -> int:
        """Texts that may begin now."""
        return self._decoder.rows - len(self._rows)

    @property
    def runs(self) -> int:
        """Texts that have begun and not ended."""
        return len(self._rows)

    def begin(self, requests: Sequence[Request]) -> list[Text]:
        """With their first tokens; a text may be over with that."""
        assert len(requests) <= self.room, "no row is free"
        first, texts = len(self._rows), [Text(request) for request in requests]
        self._rows += texts
        for rows in self._at_a_time(range(first, len(self._rows))):
            self._take(self._rows[rows.start : rows.stop], self._read(rows))
        self._clear()
        return texts

    def _at_a_time(self, rows: range) -> Iterator[range]:
        """Those whose prompts are read together: as many as have READ tokens, at least one."""
        start, tokens = rows.start, 0
        for row in rows:
            tokens += len(self._rows[row].request.prompt)
            if tokens > READ and row > start:
                yield range(start, row)
                start, tokens = row, len(self._rows[row].request.prompt)
        if start < rows.stop:
            yield range(start, rows.stop)

    def step(self) -> list[Text]:
        """The texts that got a token, or ended for want of one."""
        texts = [*self._rows]
        if texts:
            self._take(texts, self._follow())
            self._clear()
        return texts

    def drop(self, number: int) -> None:
        """A text that nobody waits for any longer; one that has ended already is none."""
        for text in self._rows:
            if text.request.number == number:
                text.ended = "dropped"
        self._clear()

    def run(self, requests: Iterable[Request], on_token: Callable[[Text], None] = lambda text: None) -> Iterator[Text]:
        """Texts in the order in which they end."""
        waiting = iter(requests)
        while True:
            while self.room and (requests := list(islice(waiting, self.room))):
                yield from self._told(self.begin(requests), on_token)
            if not self._rows:
                return
            yield from self._told(self.step(), on_token)

    @staticmethod
    def _told(texts: Iterable[Text], on_token: Callable[[Text], None]) -> list[Text]:
        """Those that have ended."""
        ended = []
        for text in texts:
            on_token(text)
            if text.ended is not None:
                ended.append(text)
        return ended

    def _read(self, rows: Sequence[int]) -> Tensor:
        """[b, V], of their last tokens where the table has room for no more."""
        return self._decoder.read(rows, [self._rows[row].ids[-self._decoder.length:] for row in rows])

    def _follow(self) -> Tensor:
        """[b, V]. Where a text is past the table, its row is read anew after all others have been followed."""
        texts, length = self._rows, self._decoder.length
        past = [row for row, text in enumerate(texts) if len(text.ids) > length]
        if len(past) == len(texts):
            return self._read(past)
        if past:  # a place for the token that is not used
            self._decoder.read(past, [texts[row].ids[-1:] for row in past])
        logits = self._decoder.follow([text.tokens[-1] for text in texts])
        return logits.index_copy(0, torch.tensor(past, device=logits.device), self._read(past)) if past else logits

    def _take(self, texts: Sequence[Text], logits: Tensor) -> None:
        """The next token of each."""
        logits = logits[:, : self._vocabulary].float()
        tokens = _drawn(texts, self._allowed(texts, logits))
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        found = torch.stack([tokens.double(), logprobs.double()])
        broadcast_into(found, 0, self._decoder.model.tp).wait()  # logits may differ in their last bits
        for text, token, logprob in zip(texts, *found.tolist(), strict=True):  # one wait for both
            self._append(text, int(token), logprob)

    def _allowed(self, texts: Sequence[Text], logits: Tensor) -> Tensor:
        barred = [(row, token) for row, text in enumerate(texts) for token in self._bars(text)
                  if 0 <= token < logits.shape[1]]
        if not barred:
            return logits
        rows, tokens = torch.tensor(barred, device=logits.device).unbind(1)
        return logits.index_put((rows, tokens), logits.new_tensor(-math.inf))

    def _append(self, text: Text, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            text.ended = "not finite"
            return
        if token == self._eod:
            text.ended = "eod"
            return
        text.tokens.append(token)
        text.logprobs.append(logprob)
        if self._stops(text):
            text.ended = "stop"
        elif len(text.tokens) >= text.request.most:
            text.ended = "length"
        elif len(text.ids) > self._decoder.length and not self._slides:
            text.ended = "positions"

    def _clear(self) -> None:
        """The last row takes the place of each that has ended."""
        for row in reversed(range(len(self._rows))):
            if self._rows[row].ended is not None:
                if self._rows[row].ended == "not finite":
                    self._decoder.clear(row)
                last = self._rows.pop()
                if row < len(self._rows):
                    self._rows[row] = last
                    self._decoder.move(len(self._rows), row)


def _drawn(texts: Sequence[Text], logits: Tensor) -> Tensor:
    """[b, V] -> [b], those with the same settings together."""
    keys = torch.tensor([text.random.getrandbits(64) - (1 << 63) for text in texts])
    if logits.is_cuda:
        keys = keys.pin_memory().to(logits.device, non_blocking=True)
    alike: dict[Sampling, list[int]] = {}
    for place, text in enumerate(texts):
        alike.setdefault(text.request.sampling, []).append(place)
    tokens = torch.empty(len(texts), dtype=torch.int64, device=logits.device)
    for settings, places in alike.items():
        seen = [texts[place].ids for place in places]
        if len(alike) == 1:
            return draw(logits, settings, keys, seen)
        index = torch.tensor(places, device=logits.device)
        tokens.index_copy_(0, index, draw(logits[index], settings, keys[index], seen))
    return tokens


def texts_of(generator: Generator, prompts: Iterable[Sequence[int]], most: int, sampling: Sampling,
             seed: int) -> list[Text]:
    """A text of each prompt, in order, each with a stream of its own."""
    requests = (Request(number, tuple(prompt), most, sampling, f"{seed}/{number}")
                for number, prompt in enumerate(prompts))
    return sorted(generator.run(requests), key=lambda text: text.request.number)
