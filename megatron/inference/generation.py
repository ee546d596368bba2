"""Continuous batching: one decoder row per sequence; a finished sequence frees its row.

    generator.start(requests)       prefill the prompts and sample the first token of each
    generator.step()                one more token of every running sequence
    generator.generate(requests)    both, until all sequences have finished

All tensor parallel ranks call it with the same requests in the same order. Sampling applies the repetition penalty,
the temperature, top-k, top-p and min-p, in this order, then takes the largest log-probability plus Gumbel noise.
The noise of a token depends only on the key of its sequence and on the token id, so the other sequences of a batch
and the number of ranks do not change a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from mpu.collectives import broadcast_into


def sample_tokens(logits: Tensor, settings: Sampling, keys: Tensor, seen: Sequence[Collection[int]]) -> Tensor:
    """[b, V] logits of texts with these settings, a 64-bit key for each -> [b] tokens. Nothing waits for the device."""
    if settings.greedy:
        return apply_repetition_penalty(logits, settings, seen).argmax(-1)
    found, tokens = candidate_probabilities(logits, settings, seen)
    return tokens.gather(-1, (found.log() + gumbel_noise(keys[:, None], tokens)).argmax(-1, keepdim=True))[:, 0]


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel's, of each token under a key: the largest sum of it and a logarithm is drawn as its probability says."""
    x = tokens * -7046029254386353131 + keys  # splitmix64: multiplications wrap, shifts fill with zeros
    x = (x ^ _logical_right_shift(x, 30)) * -4658895280553007687
    x = (x ^ _logical_right_shift(x, 27)) * -7723592293110705685
    x = _logical_right_shift(x ^ _logical_right_shift(x, 31), 11)
    return -(-((x.double() + 0.5) * 2.0 ** -53).log()).log()


def _logical_right_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def candidate_probabilities(logits: Tensor, settings: Sampling,
                            seen: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """[b, V] -> probabilities in fp64, and the tokens they are for. What a limit leaves out is not among them, or has
    probability 0."""
    scores = apply_repetition_penalty(logits, settings, seen).double() / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        scores, tokens = scores.topk(settings.top_k)
    elif settings.top_p < 1:
        scores, tokens = scores.sort(descending=True, stable=True)
    else:
        tokens = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    found = scores.softmax(-1)
    if settings.top_p < 1:
        before = found.cumsum(-1) - found  # of likelier ones
        found = found.where(before < settings.top_p, 0.0)
    if settings.min_p > 0:
        found = found.where(found >= settings.min_p * found.amax(-1, keepdim=True), 0.0)
    return found / found.sum(-1, keepdim=True), tokens


def apply_repetition_penalty(logits: Tensor, settings: Sampling, seen: Sequence[Collection[int]]) -> Tensor:
    if settings.repetition_penalty == 1:
        return logits
    scores = logits.double()
    for row, tokens in zip(scores, seen, strict=True):
        token_ids = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=scores.device)
        found = row[token_ids]
        row[token_ids] = torch.where(found > 0, found / settings.repetition_penalty,
                                     found * settings.repetition_penalty)
    return scores


PREFILL_TOKENS = 8192
"""Tokens of prompts that are read together."""

FinishReason = Literal["eod", "stop", "length", "positions", "dropped", "not finite"]
"""The last one: the model gave a logit that is no number, or infinite."""


@dataclass(eq=False)
class GeneratedSequence:
    """What became of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    """New ones; the end of the document is none."""
    logprobs: list[float] = field(default_factory=list)
    """Of each, under the model itself."""
    finish_reason: FinishReason | None = None
    rng: Random = field(init=False, repr=False)
    """Its own, whatever runs beside it."""

    def __post_init__(self) -> None:
        self.rng = Random(self.request.random_stream)

    @property
    def ids(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]


StopCondition = Callable[[GeneratedSequence], bool]
"""Whether a text is over with the token it just got."""

BannedTokens = Callable[[GeneratedSequence], Sequence[int]]
"""Tokens that a text may not have next."""


class SequenceDecoder(Protocol):
    """Rows of texts, each read once and followed by a token at a time: what a Decoder is."""

    model: GPT2
    rows: int
    max_positions: int

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor: ...

    def decode_step(self, tokens: Sequence[int]) -> Tensor: ...

    def move_row(self, source: int, target: int) -> None: ...

    def clear_row(self, row: int) -> None: ...


@final
class Generator:
    def __init__(self, decoder: SequenceDecoder, *, vocabulary: int, eod: int | None,
                 sliding_window: bool = False, should_stop: StopCondition = lambda text: False,
                 banned_tokens: BannedTokens = lambda text: ()) -> None:
        """Tokens from `vocabulary` on are never taken. Past the end of the position table a text ends or, with
        `sliding_window`, goes on from its last tokens, which are read anew for each."""
        self._decoder, self._vocabulary, self._eod, self._sliding_window = decoder, vocabulary, eod, sliding_window
        self._should_stop, self._banned_tokens = should_stop, banned_tokens
        self._rows: list[GeneratedSequence] = []

    @property
    def free_slots(self) -> int:
        """Texts that may begin now."""
        return self._decoder.rows - len(self._rows)

    @property
    def num_running(self) -> int:
        """Texts that have begun and not ended."""
        return len(self._rows)

    def start(self, requests: Sequence[Request]) -> list[GeneratedSequence]:
        """With their first tokens; a text may be over with that."""
        assert len(requests) <= self.free_slots, "no row is free"
        first, texts = len(self._rows), [GeneratedSequence(request) for request in requests]
        self._rows += texts
        for rows in self._prefill_batches(range(first, len(self._rows))):
            self._sample(self._rows[rows.start : rows.stop], self._prefill(rows))
        self._remove_finished()
        return texts

    def _prefill_batches(self, rows: range) -> Iterator[range]:
        """Those whose prompts are read together: as many as have READ tokens, at least one."""
        start, tokens = rows.start, 0
        for row in rows:
            tokens += len(self._rows[row].request.prompt)
            if tokens > PREFILL_TOKENS and row > start:
                yield range(start, row)
                start, tokens = row, len(self._rows[row].request.prompt)
        if start < rows.stop:
            yield range(start, rows.stop)

    def step(self) -> list[GeneratedSequence]:
        """The texts that got a token, or ended for want of one."""
        texts = [*self._rows]
        if texts:
            self._sample(texts, self._decode())
            self._remove_finished()
        return texts

    def cancel(self, number: int) -> None:
        """A text that nobody waits for any longer; one that has ended already is none."""
        for text in self._rows:
            if text.request.number == number:
                text.finish_reason = "dropped"
        self._remove_finished()

    def generate(self, requests: Iterable[Request],
                 on_token: Callable[[GeneratedSequence], None] = lambda text: None) -> Iterator[GeneratedSequence]:
        """Texts in the order in which they end."""
        waiting = iter(requests)
        while True:
            while self.free_slots and (requests := list(islice(waiting, self.free_slots))):
                yield from self._report_tokens(self.start(requests), on_token)
            if not self._rows:
                return
            yield from self._report_tokens(self.step(), on_token)

    @staticmethod
    def _report_tokens(sequences: Iterable[GeneratedSequence],
                       on_token: Callable[[GeneratedSequence], None]) -> list[GeneratedSequence]:
        """Those that have ended."""
        ended = []
        for text in sequences:
            on_token(text)
            if text.finish_reason is not None:
                ended.append(text)
        return ended

    def _prefill(self, rows: Sequence[int]) -> Tensor:
        """[b, V], of their last tokens where the table has room for no more."""
        return self._decoder.prefill(rows, [self._rows[row].ids[-self._decoder.max_positions:] for row in rows])

    def _decode(self) -> Tensor:
        """[b, V]. Where a text is past the table, its row is read anew after all others have been followed."""
        texts, length = self._rows, self._decoder.max_positions
        past = [row for row, text in enumerate(texts) if len(text.ids) > length]
        if len(past) == len(texts):
            return self._prefill(past)
        if past:  # a place for the token that is not used
            self._decoder.prefill(past, [texts[row].ids[-1:] for row in past])
        logits = self._decoder.decode_step([text.tokens[-1] for text in texts])
        return logits.index_copy(0, torch.tensor(past, device=logits.device), self._prefill(past)) if past else logits

    def _sample(self, sequences: Sequence[GeneratedSequence], logits: Tensor) -> None:
        """The next token of each."""
        logits = logits[:, : self._vocabulary].float()
        tokens = _sample_by_settings(sequences, self._mask_banned_tokens(sequences, logits))
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        found = torch.stack([tokens.double(), logprobs.double()])
        broadcast_into(found, 0, self._decoder.model.tp).wait()  # logits may differ in their last bits
        for text, token, logprob in zip(sequences, *found.tolist(), strict=True):  # one wait for both
            self._append_token(text, int(token), logprob)

    def _mask_banned_tokens(self, sequences: Sequence[GeneratedSequence], logits: Tensor) -> Tensor:
        banned = [(row, token) for row, text in enumerate(sequences) for token in self._banned_tokens(text)
                  if 0 <= token < logits.shape[1]]
        if not banned:
            return logits
        rows, tokens = torch.tensor(banned, device=logits.device).unbind(1)
        return logits.index_put((rows, tokens), logits.new_tensor(-math.inf))

    def _append_token(self, sequence: GeneratedSequence, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            sequence.finish_reason = "not finite"
            return
        if token == self._eod:
            sequence.finish_reason = "eod"
            return
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if self._should_stop(sequence):
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.request.max_new_tokens:
            sequence.finish_reason = "length"
        elif len(sequence.ids) > self._decoder.max_positions and not self._sliding_window:
            sequence.finish_reason = "positions"

    def _remove_finished(self) -> None:
        """The last row takes the place of each that has ended."""
        for row in reversed(range(len(self._rows))):
            if self._rows[row].finish_reason is not None:
                if self._rows[row].finish_reason == "not finite":
                    self._decoder.clear_row(row)
                last = self._rows.pop()
                if row < len(self._rows):
                    self._rows[row] = last
                    self._decoder.move_row(len(self._rows), row)


def _sample_by_settings(sequences: Sequence[GeneratedSequence], logits: Tensor) -> Tensor:
    """[b, V] -> [b], those with the same settings together."""
    keys = torch.tensor([text.rng.getrandbits(64) - (1 << 63) for text in sequences])
    if logits.is_cuda:
        keys = keys.pin_memory().to(logits.device, non_blocking=True)
    rows_by_settings: dict[Sampling, list[int]] = {}
    for place, text in enumerate(sequences):
        rows_by_settings.setdefault(text.request.sampling, []).append(place)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    for settings, rows in rows_by_settings.items():
        seen = [sequences[place].ids for place in rows]
        if len(rows_by_settings) == 1:
            return sample_tokens(logits, settings, keys, seen)
        index = torch.tensor(rows, device=logits.device)
        tokens.index_copy_(0, index, sample_tokens(logits[index], settings, keys[index], seen))
    return tokens


def texts_of(generator: Generator, prompts: Iterable[Sequence[int]], max_new_tokens: int, sampling: Sampling,
             seed: int) -> list[GeneratedSequence]:
    """A text of each prompt, in order, each with a stream of its own."""
    requests = (Request(number, tuple(prompt), max_new_tokens, sampling, f"{seed}/{number}")
                for number, prompt in enumerate(prompts))
    return sorted(generator.generate(requests), key=lambda text: text.request.number)
