"""Many texts at a time: a row of the decoder for each, and one that ends makes room for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from megatron.inference.decoder import Decoder
from megatron.inference.sampling import Sampler, Sampling
from mpu.collectives import broadcast_into

End = Literal["eod", "stop", "length", "positions"]


@dataclass(frozen=True)
class Request:
    number: int
    """Its own stream of random numbers."""
    prompt: tuple[int, ...]
    most: int
    """New tokens; at least one."""


@dataclass
class Text:
    """What became of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """New ones; the end of the document is none."""
    logprobs: list[float] = field(default_factory=list)
    """Of each, under the model itself."""
    ended: End | None = None

    @property
    def ids(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]


Stops = Callable[[Text], bool]
"""Whether a text is over with the token it just got."""


@final
class Generator:
    def __init__(self, decoder: Decoder, settings: Sampling, *, seed: int, vocabulary: int, eod: int | None,
                 slides: bool = False, stops: Stops = lambda text: False) -> None:
        """Tokens from `vocabulary` on are never taken. Past the end of the position table a text ends or, with
        `slides`, goes on from its last tokens, which are read anew for each."""
        self._decoder, self._settings, self._seed = decoder, settings, seed
        self._vocabulary, self._eod, self._slides, self._stops = vocabulary, eod, slides, stops

    def run(self, requests: Iterable[Request], on_token: Callable[[Text], None] = lambda text: None) -> Iterator[Text]:
        """Texts in the order in which they end. Every tensor parallel rank runs all of them."""
        waiting, rows, samplers = iter(requests), list[Text](), list[Sampler]()
        while True:
            while len(rows) < self._decoder.rows and (request := next(waiting, None)) is not None:
                rows.append(Text(request))
                samplers.append(Sampler(self._settings, self._seed, request.number))
                self._take(rows[-1:], samplers[-1:], self._read(len(rows) - 1, rows[-1].ids)[None], on_token)
                yield from self._ended(rows, samplers)
            if not rows:
                return
            self._take(rows, samplers, self._follow(rows), on_token)
            yield from self._ended(rows, samplers)

    def _read(self, row: int, ids: Sequence[int]) -> Tensor:
        return self._decoder.read(row, ids[-self._decoder.length:])

    def _follow(self, rows: Sequence[Text]) -> Tensor:
        """[b, V]. Where a text is past the table, its row is read anew after all others have been followed."""
        length = self._decoder.length
        past = [row for row, text in enumerate(rows) if len(text.ids) > length]
        if len(past) == len(rows):
            return torch.stack([self._read(row, rows[row].ids) for row in past])
        if not past:
            return self._decoder.follow([text.tokens[-1] for text in rows])
        for row in past:  # a place for the token that is not used
            self._decoder.read(row, rows[row].ids[-1:])
        logits = self._decoder.follow([text.tokens[-1] for text in rows])
        for row in past:
            logits[row] = self._read(row, rows[row].ids)
        return logits

    def _take(self, rows: Sequence[Text], samplers: Sequence[Sampler], logits: Tensor,
              on_token: Callable[[Text], None]) -> None:
        """The next token of each row."""
        logits = logits[:, : self._vocabulary].float()
        tokens = torch.tensor([sampler(one, text.ids) for sampler, one, text in zip(samplers, logits, rows)])
        logprobs = logits.log_softmax(-1).cpu().gather(1, tokens[:, None])[:, 0]
        tokens = tokens.to(logits.device)
        broadcast_into(tokens, 0, self._decoder.model.tp).wait()  # logits may differ in their last bits
        for text, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if token == self._eod:
                text.ended = "eod"
                continue
            text.tokens.append(token)
            text.logprobs.append(logprob)
            on_token(text)
            text.ended = self._end_of(text)

    def _end_of(self, text: Text) -> End | None:
        if self._stops(text):
            return "stop"
        if len(text.tokens) >= text.request.most:
            return "length"
        return "positions" if len(text.ids) > self._decoder.length and not self._slides else None

    def _ended(self, rows: list[Text], samplers: list[Sampler]) -> Iterator[Text]:
        """Those that have; the last row takes the place of each."""
        for row in reversed(range(len(rows))):
            if rows[row].ended is not None:
                yield rows[row]
                last, sampler = rows.pop(), samplers.pop()
                if row < len(rows):
                    rows[row], samplers[row] = last, sampler
                    self._decoder.move(len(rows), row)
