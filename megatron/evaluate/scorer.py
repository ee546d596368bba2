"""Log-probabilities of pieces of text, many at a time.

Batches are made from all pieces, long ones first, and dealt to the data parallel ranks: what runs together does not
depend on their number, and neither does a result. Logits are made for the targets alone, a bounded number of rows at a
time; tensor parallel ranks make those of their own columns and ask each other once a batch: no rank sees the logits of
another. Of each row a rank finds four numbers among its own columns, and what all columns say follows from those of all
ranks:

    log-sum-exp, largest logit, whether the target is the first of the largest, the target's logit

They are fp32, as the logits are. Columns that are padding are left out. Shapes: b pieces, s positions, h hidden,
n targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from data.storage import DataError
from megatron.errors import NumericsError
from megatron.evaluate.pieces import ScoringRequest, TargetScore, requests_digest
from megatron.model.gpt2 import GPT2
from mpu.collectives import all_gather, all_gather_json, all_reduce
from mpu.device import on_accelerator
from mpu.groups import Group, Groups
from mpu.vocab_share import VocabShard


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
    def __call__(self,
                 requests: Sequence[ScoringRequest],
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
            torch.cat([
                local_target_stats(self._model.local_logits(x), target, tp, tokens)
                for x, target in zip(hidden.split(rows), targets.split(rows), strict=True)
            ]), tp)


def batch_by_length(requests: Sequence[ScoringRequest], size: int) -> list[list[int]]:
    """Numbers of pieces that run together: of about equal length, the longest first."""
    order = sorted(range(len(requests)), key=lambda number: (-len(requests[number].tokens), number))
    return [order[at : at + size] for at in range(0, len(order), size)]
