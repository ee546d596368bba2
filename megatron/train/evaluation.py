"""Loss on held-out text. Leaves no trace: no random numbers are drawn, and the training data position does not move.

Every evaluation reads the same first samples of its dataset, so figures of one run compare, and resuming needs no
state.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from megatron.train.batches import Batch, BatchRule, Samples
from megatron.zero.api.engine import Engine
from mpu.collectives import all_reduce


class SizedSamples(Samples, Protocol):
    """A dataset that knows how many different samples it has."""

    @property
    def distinct_samples(self) -> int | None: ...


@torch.no_grad()
def evaluate(
    engine: Engine, samples: SizedSamples, rule: BatchRule, global_batches: int, device: torch.device
) -> float:
    """Mean loss over `global_batches`, or over as many whole rounds of all ranks as the dataset has samples for."""
    round_size = rule.micro_batch * rule.dp_size
    rounds = global_batches * rule.accumulation
    if samples.distinct_samples is not None:
        rounds = max(1, min(rounds, samples.distinct_samples // round_size))
    engine.train(False)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index in range(rounds):
        first = index * round_size + rule.dp_rank * rule.micro_batch
        total += forward_loss(engine, rule.build(samples, range(first, first + rule.micro_batch)).to(device))
    engine.conclude()  # no rank has received another's blocks
    engine.train(True)
    return all_reduce(total, engine.groups.dp).item() / (rounds * rule.dp_size)


def forward_loss(engine: Engine, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = engine(batch.tokens, batch.targets, batch.loss_weight, batch.positions, batch.segments,
                                grad_scale=engine.backward_scale)
    return loss


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 20.0))  # nan stays nan
