"""Loss on held-out text. Leaves no trace: no random numbers are drawn, and the training data position does not move.

Every evaluation reads the same first samples of its dataset, so figures of one run compare, and resuming needs no
state.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from megatron.train.batches import Batch, BatchRule, Samples
from megatron.zero.api.engine import Engine
from mpu.collectives import all_reduce


class SizedSamples(Samples, Protocol):
    """A dataset that knows how many different samples it has."""

    @property
    def distinct_samples(self) -> int | None: ...


class Score(NamedTuple):
    loss: float
    """The mean of the micro-batches, in nats a token."""
    bits_per_byte: float | None = None
    """Of the text that the targets stand for; None where that is not known."""


@torch.no_grad()
def evaluate(
    engine: Engine, samples: SizedSamples, rule: BatchRule, global_batches: int, device: torch.device,
    token_bytes: torch.Tensor | None = None,
) -> Score:
    """Over `global_batches`, or over as many whole rounds of all ranks as the dataset has samples for. `token_bytes`:
    of each id, the bytes of the text that it stands for."""
    round_size = rule.micro_batch * rule.dp_size
    rounds = global_batches * rule.accumulation
    if samples.distinct_samples is not None:
        rounds = max(1, min(rounds, samples.distinct_samples // round_size))
    engine.train(False)
    total, nats = torch.zeros((2,), dtype=torch.float64, device=device)
    text = 0.0
    for index in range(rounds):
        first = index * round_size + rule.dp_rank * rule.micro_batch
        batch = rule.build(samples, range(first, first + rule.micro_batch))
        loss = forward_loss(engine, batch.to(device)).double()
        total += loss
        if token_bytes is not None:
            nats += loss * batch.counted
            text += batch.sum_counted(token_bytes)
    engine.conclude()  # no rank has received another's blocks
    engine.train(True)
    sums = all_reduce(torch.stack([total, nats, torch.full_like(total, text)]), engine.groups.dp).tolist()
    return Score(sums[0] / (rounds * rule.dp_size), sums[1] / (math.log(2) * sums[2]) if sums[2] else None)


def forward_loss(engine: Engine, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = engine(batch.tokens, batch.targets, batch.loss_weight, batch.positions, batch.segments,
                                grad_scale=engine.backward_scale)
    return loss


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 20.0))  # nan stays nan
