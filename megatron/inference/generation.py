"""Continuous batching: one decoder row per sequence; a finished sequence frees its row.

    generator.start(requests)       prefill the prompts and sample the first token of each
    generator.step()                one more token of every running sequence
    generator.generate(requests)    both, until all sequences have finished

All tensor parallel ranks call it with the same requests in the same order. Sampling applies the repetition penalty,
the temperature, top-k, top-p and min-p, in this order, then takes the largest log-probability plus Gumbel noise.
The noise of a token depends only on the key of its sequence and on the token id, so the other sequences of a batch
and the number of ranks do not change a text. `SequenceDetokenizer` decodes the sequences as they grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Literal, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from data.tokenizer import REPLACEMENT_CHARACTER, Tokenizer
from megatron.inference.request import Request, Sampling
from mpu.collectives import broadcast_into

if TYPE_CHECKING:
    from megatron.inference.decoder import Decoder
    from megatron.inference.live import EngineDecoder


def sample_tokens(logits: Tensor, settings: Sampling, keys: Tensor, seen: Sequence[Collection[int]]) -> Tensor:
    """[b, V] logits, [b] 64-bit keys -> [b] tokens. Does not wait for the device."""
    if settings.greedy:
        return apply_repetition_penalty(logits, settings, seen).argmax(-1)
    probs, tokens = candidate_probabilities(logits, settings, seen)
    return tokens.gather(-1, (probs.log() + gumbel_noise(keys[:, None], tokens)).argmax(-1, keepdim=True))[:, 0]


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise of each token under a key: the argmax of log-probability plus noise is a sample."""
    x = tokens * -7046029254386353131 + keys  # splitmix64: multiplications wrap, shifts fill with zeros
    x = (x ^ _logical_right_shift(x, 30)) * -4658895280553007687
    x = (x ^ _logical_right_shift(x, 27)) * -7723592293110705685
    x = _logical_right_shift(x ^ _logical_right_shift(x, 31), 11)
    return -(-((x.double() + 0.5) * 2.0 ** -53).log()).log()


def _logical_right_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def candidate_probabilities(logits: Tensor, settings: Sampling,
                            seen: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """[b, V] -> fp64 probabilities and their tokens. Tokens outside top-k, top-p or min-p are missing or have
    probability 0."""
    scores = apply_repetition_penalty(logits, settings, seen).double() / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        scores, tokens = scores.topk(settings.top_k)
    elif settings.top_p < 1:
        scores, tokens = scores.sort(descending=True, stable=True)
    else:
        tokens = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    probs = scores.softmax(-1)
    if settings.top_p < 1:
        before = probs.cumsum(-1) - probs  # of likelier tokens
        probs = probs.where(before < settings.top_p, 0.0)
    if settings.min_p > 0:
        probs = probs.where(probs >= settings.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs / probs.sum(-1, keepdim=True), tokens


def apply_repetition_penalty(logits: Tensor, settings: Sampling, seen: Sequence[Collection[int]]) -> Tensor:
    if settings.repetition_penalty == 1:
        return logits
    scores = logits.double()
    for row, tokens in zip(scores, seen, strict=True):
        token_ids = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=scores.device)
        score, penalty = row[token_ids], settings.repetition_penalty
        row[token_ids] = torch.where(score > 0, score / penalty, score * penalty)
    return scores


PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill."""

FinishReason = Literal["eod", "stop", "length", "positions", "dropped", "not finite"]
"""dropped: cancelled; not finite: the model produced a non-finite logit."""


@dataclass(eq=False)
class GeneratedSequence:
    request: Request
    tokens: list[int] = field(default_factory=list)
    """New tokens, without the end-of-document token."""
    logprobs: list[float] = field(default_factory=list)
    """Of each new token, under the model without sampling settings."""
    finish_reason: FinishReason | None = None
    rng: Random = field(init=False, repr=False)
    """Seeded by the request, so that other sequences do not change the text."""

    def __post_init__(self) -> None:
        self.rng = Random(self.request.random_stream)

    @property
    def ids(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]


StopCondition = Callable[[GeneratedSequence], bool]
"""Whether a text ends after its newest token."""

BannedTokens = Callable[[GeneratedSequence], Sequence[int]]
"""Tokens that a text may not have next."""


@final
class Generator:
    def __init__(self, decoder: Decoder | EngineDecoder, *, vocabulary: int, eod: int | None,
                 sliding_window: bool = False, should_stop: StopCondition = lambda text: False,
                 banned_tokens: BannedTokens = lambda text: ()) -> None:
        """Token ids from `vocabulary` on are padding and never sampled. At the end of the position table a text ends
        or, with `sliding_window`, continues from its last tokens, with a new prefill for each token."""
        self._decoder, self._vocabulary, self._eod, self._sliding_window = decoder, vocabulary, eod, sliding_window
        self._should_stop, self._banned_tokens = should_stop, banned_tokens
        self._rows: list[GeneratedSequence] = []

    @property
    def free_slots(self) -> int:
        return self._decoder.rows - len(self._rows)

    @property
    def num_running(self) -> int:
        return len(self._rows)

    def start(self, requests: Sequence[Request]) -> list[GeneratedSequence]:
        """The new texts with their first tokens; some may have ended already."""
        assert len(requests) <= self.free_slots, "no row is free"
        first, texts = len(self._rows), [GeneratedSequence(request) for request in requests]
        self._rows += texts
        for rows in self._prefill_batches(range(first, len(self._rows))):
            self._sample(self._rows[rows.start : rows.stop], self._prefill(rows))
        self._remove_finished()
        return texts

    def _prefill_batches(self, rows: range) -> Iterator[range]:
        """Splits rows so that the prompts of a batch have at most PREFILL_TOKENS tokens, or are one prompt."""
        start, tokens = rows.start, 0
        for row in rows:
            tokens += len(self._rows[row].request.prompt)
            if tokens > PREFILL_TOKENS and row > start:
                yield range(start, row)
                start, tokens = row, len(self._rows[row].request.prompt)
        if start < rows.stop:
            yield range(start, rows.stop)

    def step(self) -> list[GeneratedSequence]:
        """One token for every running text; returns these texts."""
        texts = [*self._rows]
        if texts:
            self._sample(texts, self._decode())
            self._remove_finished()
        return texts

    def cancel(self, number: int) -> None:
        """Ends a running text; does nothing for one that has ended."""
        for text in self._rows:
            if text.request.number == number:
                text.finish_reason = "dropped"
        self._remove_finished()

    def generate(self, requests: Iterable[Request]) -> Iterator[GeneratedSequence]:
        """Texts in the order in which they end."""
        waiting = iter(requests)
        while (starting := list(islice(waiting, self.free_slots))) or self._rows:
            texts = self.start(starting) if starting else self.step()
            yield from [text for text in texts if text.finish_reason is not None]

    def _prefill(self, rows: Sequence[int]) -> Tensor:
        """-> [b, V]; a text longer than the position table is read from its last tokens."""
        return self._decoder.prefill(rows, [self._rows[row].ids[-self._decoder.max_positions:] for row in rows])

    def _decode(self) -> Tensor:
        """-> [b, V]. Rows past the position table are prefilled again after the decode step of the others."""
        texts, length = self._rows, self._decoder.max_positions
        past = [row for row, text in enumerate(texts) if len(text.ids) > length]
        if len(past) == len(texts):
            return self._prefill(past)
        if past:  # the decode step appends to all rows: make room for a token whose logits are not used
            self._decoder.prefill(past, [texts[row].ids[-1:] for row in past])
        logits = self._decoder.decode_step([text.tokens[-1] for text in texts])
        return logits.index_copy(0, torch.tensor(past, device=logits.device), self._prefill(past)) if past else logits

    def _sample(self, sequences: Sequence[GeneratedSequence], logits: Tensor) -> None:
        """Appends the next token to each sequence. logits: [b, V]."""
        logits = logits[:, : self._vocabulary].float()
        banned = [(row, token) for row, text in enumerate(sequences) for token in self._banned_tokens(text)
                  if 0 <= token < logits.shape[1]]
        allowed = logits
        if banned:
            rows, ids = torch.tensor(banned, device=logits.device).unbind(1)
            allowed = logits.index_put((rows, ids), logits.new_tensor(-math.inf))
        tokens = _sample_by_settings(sequences, allowed)
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        sampled = torch.stack([tokens.double(), logprobs.double()])  # one tensor: one wait for the device
        broadcast_into(sampled, 0, self._decoder.model.tp).wait()  # logits of the ranks may differ in their last bits
        for text, token, logprob in zip(sequences, *sampled.tolist(), strict=True):
            self._append_token(text, int(token), logprob)

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
        """Frees the rows of texts that have ended; the last row moves into each."""
        for row in reversed(range(len(self._rows))):
            if self._rows[row].finish_reason is not None:
                if self._rows[row].finish_reason == "not finite":
                    self._decoder.clear_row(row)
                last = self._rows.pop()
                if row < len(self._rows):
                    self._rows[row] = last
                    self._decoder.move_row(len(self._rows), row)


def _sample_by_settings(sequences: Sequence[GeneratedSequence], logits: Tensor) -> Tensor:
    """[b, V] -> [b] tokens; sequences with equal settings are sampled together."""
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
    """One text for each prompt, in order, each with its own random numbers."""
    requests = (Request(number, tuple(prompt), max_new_tokens, sampling, f"{seed}/{number}")
                for number, prompt in enumerate(prompts))
    return sorted(generator.generate(requests), key=lambda text: text.request.number)


# ---- text of growing sequences -----------------------------------------------------------------------------------

DecodeFn = Callable[[Iterable[int]], str]

DECODE_WINDOW = 16
"""Tokens that are decoded again with those that follow them."""
UNSTABLE_CHARACTERS = 4
"""Characters at the beginning of a window that may differ from the full text: it may begin within a character of up to
4 bytes, and SentencePiece leaves out a space at the beginning of a text."""


@final
class Detokenizer:
    """The text of a growing list of tokens. Each token is decoded with its neighbours only, so the work is linear: a
    token changes at most the character before it, and UTF-8 can be read from any character on."""

    def __init__(self, decode: DecodeFn, ids: Iterable[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._stable_characters = 0  # characters of the text that stay
        self._overlap_characters = 0  # characters of the window's text that are among those
        self.text = ""
        self.num_shown = 0
        """Characters that `new_text` has returned."""
        self.offsets: list[int] = []
        """Length of the text before each token, where U+FFFD stands for a part of a character."""
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        for token in ids:
            self.offsets.append(len(self.text))
            if len(self._window) == 2 * DECODE_WINDOW:
                self._window = self._window[-DECODE_WINDOW:]
                length = len(self._decode(self._window))
                self._overlap_characters = min(UNSTABLE_CHARACTERS, length)
                self._stable_characters = len(self.text) - length + self._overlap_characters
            self._window.append(token)
            self.text = self.text[: self._stable_characters] + self._decode(self._window)[self._overlap_characters:]


@final
class SequenceDetokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizers: WeakKeyDictionary[GeneratedSequence, Detokenizer] = WeakKeyDictionary()

    def _detokenizer_of(self, sequence: GeneratedSequence) -> Detokenizer:
        detokenizer = self._detokenizers.setdefault(sequence, Detokenizer(self._tokenizer.decode))
        detokenizer.extend(sequence.tokens[len(detokenizer.offsets):])
        return detokenizer

    def has_stop_string(self, sequence: GeneratedSequence) -> bool:
        stops = sequence.request.stops
        return bool(stops) and any(stop in self._detokenizer_of(sequence).text for stop in stops)

    def decode(self, sequence: GeneratedSequence) -> str:
        """The text before the first stop string."""
        text = self._detokenizer_of(sequence).text
        ends = [place for stop in sequence.request.stops if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def token_offsets(self, sequence: GeneratedSequence) -> Sequence[int]:
        return self._detokenizer_of(sequence).offsets

    def stable_text(self, sequence: GeneratedSequence) -> str:
        """The prefix that later tokens cannot change: while a text runs, its last bytes may begin a character, and its
        last characters a stop string."""
        text = self.decode(sequence)
        if sequence.finish_reason is not None:
            return text
        held_back = max(map(len, sequence.request.stops), default=1) - 1
        return text[: max(0, len(text) - held_back)].rstrip(REPLACEMENT_CHARACTER)

    def new_text(self, sequence: GeneratedSequence) -> str:
        """What has become stable since the last call."""
        detokenizer, text = self._detokenizer_of(sequence), self.stable_text(sequence)
        start, detokenizer.num_shown = detokenizer.num_shown, max(detokenizer.num_shown, len(text))
        return text[start:]
