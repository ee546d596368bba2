"""Log-likelihood scoring: token windows with targets, scored in batches over data and tensor parallel ranks.

A window reads tokens [start, stop - 1) and scores tokens [first, stop). Token 0 has no context and is never scored;
every other token is scored once. Batches are formed by length before they are dealt to data parallel ranks, so
results do not depend on the number of ranks. Logits are computed for targets only, in chunks; each tensor parallel
rank reduces its vocabulary columns to 4 numbers per target: log-sum-exp, largest logit, whether the target is the
argmax, target logit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.storage import DataError
from megatron.errors import NumericsError
from megatron.model.gpt2 import GPT2
from mpu.chunked_loss import VocabShard
from mpu.collectives import all_gather, all_gather_json, all_reduce
from mpu.device import on_accelerator
from mpu.groups import Group, Groups


@dataclass(frozen=True)
class TokenWindow:
    start: int
    first: int
    stop: int


def overlapping_windows(tokens: int, length: int, stride: int) -> Iterator[TokenWindow]:
    """Megatron's: a window begins every `stride` tokens. The first scores all it can, each later one its last `stride`
    tokens, so that a token has at least `length - stride` tokens before it. With `stride` = `length` none overlap."""
    assert 1 <= stride <= length
    start, first = 0, 1
    while first < tokens:
        stop = min(start + length + 1, tokens)
        yield TokenWindow(start, first, stop)
        start, first = start + stride, stop


def rolling_windows(tokens: int, length: int) -> Iterator[TokenWindow]:
    """lm-eval's: each window scores `length` tokens; the last one, which has fewer, reads `length` all the same."""
    first = 1
    while first < tokens:
        stop = min(first + length, tokens)
        yield TokenWindow(max(0, stop - 1 - length), first, stop)
        first = stop


TokenIds = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class ScoringRequest:
    tokens: TokenIds
    first_target: int
    """Tokens from here on are targets; the model reads all tokens but the last."""
    is_truncated: bool = False
    """The beginning of what is before the targets is not read: there is no room for it."""


@dataclass(frozen=True)
class TargetScore:
    logprob: float
    """Of all targets together."""
    is_greedy: bool
    """Each target is the likeliest token."""


def window_requests(tokens: TokenIds, windows: Iterable[TokenWindow]) -> list[ScoringRequest]:
    """Views of one sequence."""
    return [ScoringRequest(tokens[window.start : window.stop], window.first - window.start) for window in windows]


def continuation_request(context: Sequence[int], targets: Sequence[int], length: int, location: str) -> ScoringRequest:
    """The targets after as much of the end of the context as a model of `length` positions reads."""
    if not 0 < len(targets) <= length:
        found = "no token" if not targets else f"{len(targets)} tokens"
        raise DataError(f"{location}: {found} to score, and the model has {length} positions: expected 1 to {length}")
    whole = np.array([*context, *targets])
    tokens = whole[-(length + 1):]
    return ScoringRequest(tokens, len(tokens) - len(targets), is_truncated=len(tokens) < len(whole))


def requests_digest(requests: Sequence[ScoringRequest]) -> int:
    """Equal on two ranks that will score the same."""
    found = len(requests)
    for request in requests:
        found = zlib.crc32(request.tokens.tobytes(), found + request.first_target)
    return found


def local_target_stats(logits: Tensor, targets: Tensor, tp: Group, tokens: int) -> Tensor:
    """[n, V / tp], ids [n] -> [n, 4] of this rank's columns; `tokens` of all are real."""
    share = VocabShard.of(logits.shape[1], tp, tokens)
    if not share.num_columns:
        return torch.tensor([-torch.inf, -torch.inf, 0, -torch.inf], device=logits.device).expand(len(logits), 4)
    real = logits[:, : share.num_columns].float()
    mine, column = share.locate(targets)
    likeliest = real.argmax(1, keepdim=True)
    return torch.stack([real.logsumexp(1), real.gather(1, likeliest)[:, 0],
                        (mine & (likeliest[:, 0] == column)).float(),
                        real.gather(1, column[:, None])[:, 0].masked_fill(~mine, -torch.inf)], dim=1)


def combine_target_stats(stats: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """[n, 4] of every rank -> fp64 log-probabilities [n], and whether each target is the likeliest [n]. Of equal
    logits the first one is. Collective."""
    total, largest, greedy, at_target = all_gather(stats[None], tp, 0).unbind(-1)  # each [tp, n]
    first = largest.argmax(0, keepdim=True)
    return (at_target.amax(0) - total.logsumexp(0)).double(), greedy.gather(0, first)[0].bool()


CPU_LOGITS_BYTES, GPU_LOGITS_BYTES = 64 << 20, 256 << 20
"""Of fp32 logits in a chunk, of this rank's columns."""

ProgressCallback = Callable[[int, int], None]
"""Batches done, and all of this rank's."""


@final
class Scorer:
    def __init__(self, model: GPT2, groups: Groups, batch_size: int) -> None:
        self._model, self._groups, self._batch_size = model.eval(), groups, batch_size
        self._device = model.wpe.weight.device

    @property
    def max_positions(self) -> int:
        """Positions of the model."""
        return self._model.config.max_position_embeddings

    @torch.no_grad()
    def __call__(self, requests: Sequence[ScoringRequest],
                 progress: ProgressCallback = lambda done, total: None) -> list[TargetScore]:
        """Of each piece, on every rank. Collective."""
        self._assert_same_requests(requests)
        if not requests:
            return []
        dp = self._groups.dp
        mine = batch_by_length(requests, self._batch_size)[dp.rank :: dp.size]
        found = torch.zeros(2, len(requests), dtype=torch.float64, device=self._device)  # every rank adds zero but one
        for done, batch in enumerate(mine, 1):
            found[:, batch] = self._score([requests[number] for number in batch])
            progress(done, len(mine))
        logprobs, greedy = all_reduce(found, dp).tolist()
        scores = [TargetScore(logprob, bool(flag)) for logprob, flag in zip(logprobs, greedy, strict=True)]
        if not all(np.isfinite(logprobs)):
            raise NumericsError("the model gives a token a probability that is not a number or zero: ask for --dtype "
                                "fp32 or bf16")
        return scores

    def _assert_same_requests(self, requests: Sequence[ScoringRequest]) -> None:
        found = all_gather_json(requests_digest(requests), self._groups.world)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise DataError(f"rank {rank} has other data than rank 0: give all ranks the same file")

    def _score(self, requests: Sequence[ScoringRequest]) -> Tensor:
        """[2, b]: log-probability, and 1 where each target is the likeliest token."""
        counts = [len(piece.tokens) - piece.first_target for piece in requests]
        tokens = np.zeros((len(requests), max(len(piece.tokens) for piece in requests)), np.int64)
        for row, request in zip(tokens, requests):
            row[: len(request.tokens)] = request.tokens  # what comes after a piece changes nothing before it
        inputs = torch.from_numpy(tokens).to(self._device)
        rows = torch.arange(len(requests)).repeat_interleave(torch.tensor(counts)).to(self._device)  # [n]
        target_positions = torch.cat([torch.arange(piece.first_target, len(piece.tokens))
                                      for piece in requests]).to(self._device)
        hidden = self._model.hidden_states(inputs[:, :-1])[rows, target_positions - 1]  # [b, s, h] -> [n, h]
        logprobs, greedy = self._score_targets(hidden, inputs[rows, target_positions])
        return torch.stack([torch.stack([part.sum() for part in logprobs.split(counts)]),
                            torch.stack([part.all() for part in greedy.split(counts)]).double()])

    def _score_targets(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[n, h], [n] -> fp64 log-probabilities [n], and whether each is the likeliest [n]."""
        tp, tokens = self._model.tp, self._model.config.known_vocab_size
        size = GPU_LOGITS_BYTES if on_accelerator(hidden) else CPU_LOGITS_BYTES
        rows = max(1, size * tp.size // (4 * tokens))
        return combine_target_stats(
            torch.cat([local_target_stats(self._model.local_logits(x), target, tp, tokens)
                       for x, target in zip(hidden.split(rows), targets.split(rows), strict=True)]), tp)


def batch_by_length(requests: Sequence[ScoringRequest], size: int) -> list[list[int]]:
    """Numbers of pieces that run together: of about equal length, the longest first."""
    order = sorted(range(len(requests)), key=lambda number: (-len(requests[number].tokens), number))
    return [order[at : at + size] for at in range(0, len(order), size)]
