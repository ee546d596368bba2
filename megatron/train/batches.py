"""Samples -> micro-batches: which sample ids a step uses, and the tensors a forward takes.

A step with global batch B uses ids [consumed, consumed + B) for any number of ranks, and B follows from `consumed`, so
that `consumed` is the only data state. Micro-batch m of data-parallel rank r takes ids from (m * dp + r) * micro on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.gpt2_dataset import Dataset
from megatron.distributed.rank_status import READING, STATUS


class Batch(NamedTuple):
    """One micro-batch, as the arguments of GPT2.forward; each tensor is [b, s]. Optional ones are None for plain causal
    training."""

    tokens: Tensor
    targets: Tensor
    loss_weight: Tensor | None = None
    positions: Tensor | None = None
    segments: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        return Batch(*(None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)
                       for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MicroBatchSampler:
    """How samples become micro-batches on this rank."""

    micro_batch: int
    accumulation: int
    dp_rank: int
    dp_size: int
    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    ramp: tuple[int, int, int] | None = None  # (first global batch, increment, samples until it has its full size)

    def global_batch(self, consumed: int) -> int:
        """Samples of the step that comes after `consumed` samples."""
        full = self.micro_batch * self.accumulation * self.dp_size
        if self.ramp is None:
            return full
        start, increment, samples = self.ramp
        rises = (full - start) // increment  # each of these smaller sizes is in use for samples / rises samples
        return min(full, start + consumed * rises // samples * increment)

    def micro_batch_ids(self, first: int) -> list[range]:
        """The ids of each micro-batch of this rank, for the step whose first id is `first`."""
        count = self.global_batch(first) // (self.micro_batch * self.dp_size)
        starts = (first + (m * self.dp_size + self.dp_rank) * self.micro_batch for m in range(count))
        return [range(start, start + self.micro_batch) for start in starts]

    def load_batch(self, samples: Dataset, ids: range) -> Batch:
        rows = torch.from_numpy(np.stack([samples[i] for i in ids]))  # [b, s + 1]
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        segments = document_numbers(tokens, self.eod) if self.reset_position_ids or self.reset_attention_mask else None
        return Batch(
            tokens, targets, loss_weight=(tokens != self.eod).float() if self.eod_mask_loss else None,
            positions=positions_in_document(segments) if self.reset_position_ids and segments is not None else None,
            segments=segments if self.reset_attention_mask else None)


def document_numbers(tokens: Tensor, eod: int) -> Tensor:
    """[b, s] -> document number of each token within its row; an end-of-document token belongs to the document it ends.
    """
    ends = (tokens == eod).long()
    return ends.cumsum(1) - ends


def positions_in_document(segments: Tensor) -> Tensor:
    """[b, s] document numbers -> positions from the start of each document."""
    index = torch.arange(segments.shape[1]).expand_as(segments)
    starts = torch.where(segments.diff(dim=1, prepend=segments[:, :1] - 1) != 0, index, 0)
    return index - starts.cummax(1).values


def samples_digest(first: int, count: int) -> str:
    """sha256 of the ordered sample ids of a step, as little-endian int64."""
    return hashlib.sha256(np.arange(first, first + count, dtype="<i8").tobytes()).hexdigest()


def batch_stream(samples: Dataset, sampler: MicroBatchSampler, first: int, steps: int,
                 workers: int) -> Generator[list[Batch], None, None]:
    """The micro-batches of consecutive steps, prefetched by background threads; `close` ends these."""
    def load_step(first: int) -> list[Batch]:
        return [sampler.load_batch(samples, ids) for ids in sampler.micro_batch_ids(first)]

    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches") if workers else None
    first_ids = iter_first_ids(sampler, first, steps)
    loaded = map(load_step, first_ids) if pool is None else _prefetch(pool, load_step, first_ids)
    try:
        while True:
            with STATUS.in_activity(READING):
                batches = next(loaded, None)
            if batches is None:
                return
            yield batches
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def iter_first_ids(sampler: MicroBatchSampler, first: int, steps: int) -> Iterator[int]:
    for _ in range(steps):
        yield first
        first += sampler.global_batch(first)


def _prefetch(pool: ThreadPoolExecutor, load_step: Callable[[int], list[Batch]],
              first_ids: Iterator[int]) -> Iterator[list[Batch]]:
    pending = deque(pool.submit(load_step, first) for first in islice(first_ids, 3))
    while pending:
        yield pending.popleft().result()
        pending.extend(pool.submit(load_step, first) for first in islice(first_ids, 1))
