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
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from data.tokenizer import REPLACEMENT_CHARACTER
from megatron.inference.request import Request, Sampling
from mpu.collectives import broadcast_into

if TYPE_CHECKING:
    from megatron.inference.decoder import Decoder
    from megatron.inference.live import EngineDecoder


def sample_tokens(logits: Tensor, settings: Sampling, keys: Tensor, seen: Sequence[Collection[int]]) -> Tensor:
    """[b, V] logits, [b] 64-bit keys -> [b] tokens. Does not wait for the device."""
    if settings.repetition_penalty != 1:
        logits = apply_repetition_penalty(logits, settings.repetition_penalty, seen)
    if settings.greedy:
        return logits.argmax(-1)
    probs, tokens = candidate_probabilities(logits, settings)
    return tokens.gather(-1, (probs.log() + gumbel_noise(keys[:, None], tokens)).argmax(-1, keepdim=True))[:, 0]


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise of each token under a key: the argmax of log-probability plus noise is a sample."""
    # splitmix64: multiplications wrap; after a shift the mask clears the copies of the sign
    x = tokens * -7046029254386353131 + keys
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    x = (x ^ (x >> 31 & (1 << 33) - 1)) >> 11 & (1 << 53) - 1
    return -(-((x.double() + 0.5) * 2.0 ** -53).log()).log()


def candidate_probabilities(logits: Tensor, settings: Sampling) -> tuple[Tensor, Tensor]:
    """[b, V] -> fp64 probabilities and their tokens. Tokens outside top-k, top-p or min-p are missing or have
    probability 0."""
    scores = logits.double() / settings.temperature
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


def apply_repetition_penalty(logits: Tensor, penalty: float, seen: Sequence[Collection[int]]) -> Tensor:
    scores = logits.double()
    for row, tokens in zip(scores, seen, strict=True):
        token_ids = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=scores.device)
        score = row[token_ids]
        row[token_ids] = torch.where(score > 0, score / penalty, score * penalty)
    return scores


# ---- sequences and their text ------------------------------------------------------------------------------------

DecodeFn = Callable[[Iterable[int]], str]

DECODE_WINDOW = 16  # tokens that are decoded again with those that follow them
# Characters at the beginning of a window that may differ from the full text: it may begin within a character of up to 4
# bytes, and SentencePiece leaves out a space at the beginning of a text.
UNSTABLE_CHARACTERS = 4


@dataclass(eq=False)
class Detokenizer:
    """The text of a growing list of tokens. Each token is decoded with its neighbours only, so the work is linear: a
    token changes at most the character before it, and UTF-8 can be read from any character on."""

    _decode: DecodeFn
    text: str = ""
    # Length of the text before each token, where U+FFFD stands for a part of a character.
    offsets: list[int] = field(default_factory=list)
    _window: list[int] = field(default_factory=list)
    _stable_characters: int = 0  # characters of the text that stay
    _overlap_characters: int = 0  # characters of the window's text that are among those

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


# dropped: cancelled; not finite: the model produced a non-finite logit.
FinishReason = Literal["eod", "stop", "length", "positions", "dropped", "not finite"]


class TokenScores(NamedTuple):
    """Log-probabilities of the tokens of a text, without the first, which has no context."""

    logprobs: list[float]
    # At each position: (token, log-probability), the likeliest first.
    top_logprobs: list[tuple[tuple[int, float], ...]]


@dataclass(eq=False)
class GeneratedSequence:
    request: Request
    detokenizer: Detokenizer | None = None  # None: without text
    tokens: list[int] = field(default_factory=list)  # new tokens, without the end-of-document token
    # Of each new token, under the model without sampling settings.
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    scores: TokenScores | None = None  # once the text has ended, if the request has `top_logprobs`
    num_shown: int = 0  # characters that `new_text` has returned
    # Of the generator that samples: seeded by the request, so that other sequences do not change the text.
    rng: Random = field(init=False, repr=False)

    @property
    def ids(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]

    def detokenized(self) -> Detokenizer:
        """The text of all new tokens, with the stop string that ended it."""
        assert self.detokenizer is not None
        self.detokenizer.extend(self.tokens[len(self.detokenizer.offsets):])
        return self.detokenizer

    def answer(self) -> str:
        """The text before the first stop string."""
        text = self.detokenized().text
        ends = [place for stop in self.request.stops if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def new_text(self) -> str:
        """What has become stable since the last call: later tokens cannot change it. While a text runs, its last bytes
        may begin a character, and its last characters a stop string."""
        text = self.answer()
        if self.finish_reason is None:
            held_back = max(map(len, self.request.stops), default=1) - 1
            text = text[: max(0, len(text) - held_back)].rstrip(REPLACEMENT_CHARACTER)
        start, self.num_shown = self.num_shown, max(self.num_shown, len(text))
        return text[start:]


# ---- continuous batching -----------------------------------------------------------------------------------------

PREFILL_TOKENS = 8192  # prompt tokens of one prefill
LOGITS_CHUNK_BYTES = 64 << 20  # logits of a chunk of positions that are scored


class Generator:
    def __init__(self, decoder: Decoder | EngineDecoder, *, vocabulary: int, eod: int | None,
                 sliding_window: bool = False, decode: DecodeFn | None = None) -> None:
        """Token ids from `vocabulary` on are padding and never sampled. At the end of the position table a text ends
        or, with `sliding_window`, continues from its last tokens, with a new prefill for each token. `decode`: the
        tokenizer's, for stop strings and the text of the sequences."""
        self._decoder, self._vocabulary, self._eod, self._sliding_window = decoder, vocabulary, eod, sliding_window
        self._decode = decode
        self._rows: list[GeneratedSequence] = []
        self._to_score = deque[GeneratedSequence]()

    @property
    def free_slots(self) -> int:
        return self._decoder.rows - len(self._rows)

    @property
    def is_idle(self) -> bool:
        return not (self._rows or self._to_score)

    def start(self, requests: Iterable[Request]) -> list[GeneratedSequence]:
        """The new sequences with their first tokens; some may have ended already. A request for no token is only
        scored."""
        sequences, begin = list[GeneratedSequence](), len(self._rows)
        for request in requests:
            sequence = GeneratedSequence(request, None if self._decode is None else Detokenizer(self._decode))
            sequence.rng = Random(request.random_stream)
            sequences.append(sequence)
            if request.max_new_tokens:
                self._rows.append(sequence)
            else:
                sequence.finish_reason = "length"
                self._to_score.append(sequence)
        assert self.free_slots >= 0, "no row is free"
        # batches of at most PREFILL_TOKENS tokens, or of one prompt
        while begin < len(self._rows):
            sizes = accumulate(len(sequence.request.prompt) for sequence in self._rows[begin:])
            end = begin + max(1, sum(1 for _ in takewhile(lambda size: size <= PREFILL_TOKENS, sizes)))
            prompts = [sequence.request.prompt[-self._decoder.max_positions:] for sequence in self._rows[begin:end]]
            self._sample(self._rows[begin:end], self._decoder.prefill(range(begin, end), prompts))
            begin = end
        self._remove_finished()
        return sequences

    def step(self) -> list[GeneratedSequence]:
        """One token for every running sequence, and the scores of one that has ended; returns these sequences."""
        sequences = [*self._rows]
        if sequences:
            # sequences past the position table are read again from their last tokens, after the decode step of the
            # others
            length = self._decoder.max_positions
            past = [row for row, sequence in enumerate(sequences)
                    if len(sequence.request.prompt) + len(sequence.tokens) > length]
            last_tokens = [sequences[row].ids[-length:] for row in past]
            if len(past) == len(sequences):
                logits = self._decoder.prefill(past, last_tokens)  # [b, V]
            else:
                if past:  # the decode step appends to all rows: make room for a token whose logits are not used
                    self._decoder.prefill(past, [ids[-1:] for ids in last_tokens])
                logits = self._decoder.decode_step([sequence.tokens[-1] for sequence in sequences])
                if past:
                    logits = logits.index_copy(0, torch.tensor(past, device=logits.device),
                                               self._decoder.prefill(past, last_tokens))
            self._sample(sequences, logits)
            self._remove_finished()
        if self._to_score:  # one a step: the running sequences wait for it
            sequences.append(self._to_score.popleft())
            sequences[-1].scores = self._score(sequences[-1])
        return sequences

    def cancel(self, number: int) -> None:
        """Ends a sequence that runs or is to be scored; does nothing for one that has ended."""
        self._to_score = deque(sequence for sequence in self._to_score if sequence.request.number != number)
        for sequence in self._rows:
            if sequence.request.number == number:
                sequence.finish_reason = "dropped"
        self._remove_finished()

    def generate(self, requests: Iterable[Request]) -> Iterator[GeneratedSequence]:
        """Sequences in the order in which they end."""
        waiting = iter(requests)
        while (starting := list(islice(waiting, self.free_slots))) or self._rows:
            sequences = self.start(starting) if starting else self.step()
            yield from [sequence for sequence in sequences if sequence.finish_reason is not None]

    def _sample(self, sequences: Sequence[GeneratedSequence], logits: Tensor) -> None:
        """Appends the next token to each sequence. logits: [b, V]."""
        allowed = logits = logits[:, : self._vocabulary].float()
        banned = [(row, token) for row, sequence in enumerate(sequences)
                  if len(sequence.tokens) < sequence.request.min_new_tokens for token in sequence.request.end_tokens
                  if 0 <= token < logits.shape[1]]
        if banned:
            rows, ids = torch.tensor(banned, device=logits.device).unbind(1)
            allowed = logits.index_put((rows, ids), logits.new_tensor(-math.inf))
        rows_by_settings: dict[Sampling, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows_by_settings.setdefault(sequence.request.sampling, []).append(row)
        tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        for settings, group in rows_by_settings.items():  # sequences with equal settings are sampled together
            keys = torch.tensor([sequences[row].rng.getrandbits(64) - (1 << 63) for row in group])
            if logits.is_cuda:
                keys = keys.pin_memory().to(logits.device, non_blocking=True)
            seen = [sequences[row].ids for row in group] if settings.repetition_penalty != 1 else ()
            if len(group) == len(sequences):
                tokens = sample_tokens(allowed, settings, keys, seen)
            else:
                index = torch.tensor(group, device=logits.device)
                tokens.index_copy_(0, index, sample_tokens(allowed[index], settings, keys, seen))
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        sampled = torch.stack([tokens.double(), logprobs.double()])  # one tensor: one wait for the device
        broadcast_into(sampled, 0, self._decoder.model.tp).wait()  # logits of the ranks may differ in their last bits
        for sequence, token, logprob in zip(sequences, *sampled.tolist(), strict=True):
            if not math.isfinite(logprob) or token == self._eod:
                sequence.finish_reason = "eod" if math.isfinite(logprob) else "not finite"
                continue
            request, length = sequence.request, self._decoder.max_positions
            sequence.tokens.append(int(token))
            sequence.logprobs.append(logprob)
            if token in request.end_tokens or request.stops and any(
                    stop in sequence.detokenized().text for stop in request.stops):
                sequence.finish_reason = "stop"
            elif len(sequence.tokens) >= request.max_new_tokens:
                sequence.finish_reason = "length"
            elif len(request.prompt) + len(sequence.tokens) > length and not self._sliding_window:
                sequence.finish_reason = "positions"

    def _remove_finished(self) -> None:
        """Frees the rows of sequences that have ended; the last row moves into each."""
        for row in reversed(range(len(self._rows))):
            sequence = self._rows[row]
            if sequence.finish_reason is None:
                continue
            if sequence.finish_reason == "not finite":
                self._decoder.clear_row(row)
            elif sequence.request.top_logprobs is not None and sequence.finish_reason != "dropped":
                self._to_score.append(sequence)
            last = self._rows.pop()
            if row < len(self._rows):
                self._rows[row] = last
                self._decoder.move_row(len(self._rows), row)

    @torch.inference_mode()
    def _score(self, sequence: GeneratedSequence) -> TokenScores:
        """Scores every token of a sequence, and the likeliest tokens there, in another forward over the sequence."""
        model, scores = self._decoder.model, TokenScores([], [])
        tokens, most = torch.tensor(sequence.ids, device=model.device), sequence.request.top_logprobs or 0
        if len(tokens) > 1:
            hidden = model.hidden_states(tokens[None, :-1])[0]  # [s - 1, h]
            chunk = max(1, LOGITS_CHUNK_BYTES // (4 * self._vocabulary))
            for rows, targets in zip(hidden.split(chunk), tokens[1:].split(chunk), strict=True):
                found = model.logits(rows)[:, : self._vocabulary].float().log_softmax(-1)  # [n, V]
                values, places = found.topk(min(most, self._vocabulary))
                scores.logprobs.extend(found.gather(1, targets[:, None])[:, 0].tolist())
                scores.top_logprobs.extend(tuple(zip(*pair, strict=True)) for pair in zip(
                    places.tolist(), values.tolist(), strict=True))
        return scores


def texts_of(generator: Generator, prompts: Iterable[Sequence[int]], max_new_tokens: int, sampling: Sampling,
             seed: int, end_tokens: tuple[int, ...] = (), min_new_tokens: int = 0) -> list[GeneratedSequence]:
    """One sequence for each prompt, in order, each with its own random numbers."""
    requests = (Request(number, tuple(prompt), max_new_tokens, sampling, f"{seed}/{number}", end_tokens=end_tokens,
                        min_new_tokens=min_new_tokens) for number, prompt in enumerate(prompts))
    return sorted(generator.generate(requests), key=lambda sequence: sequence.request.number)
