"""How likely targets are, where the vocabulary is cut over tensor parallel ranks: no rank sees the logits of another.

Of each row a rank finds four numbers among its own columns, and what all columns say follows from those of all ranks:

    log-sum-exp, largest logit, whether the target is the first of the largest, the target's logit

They are fp32, as the logits are. A column that is padding is not looked at. Shapes: n targets, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpu.collectives import all_gather
from mpu.groups import Group
from mpu.vocab_share import Share


def found_here(logits: Tensor, targets: Tensor, tp: Group, tokens: int) -> Tensor:
    """[n, V / tp], ids [n] -> [n, 4] of this rank's columns; `tokens` of all are real."""
    share = Share.of(logits.shape[1], tp, tokens)
    if not share.columns:
        return torch.tensor([-torch.inf, -torch.inf, 0, -torch.inf], device=logits.device).expand(len(logits), 4)
    real = logits[:, : share.columns].float()
    mine, column = share.locate(targets)
    likeliest = real.argmax(1, keepdim=True)
    return torch.stack([real.logsumexp(1), real.gather(1, likeliest)[:, 0],
                        (mine & (likeliest[:, 0] == column)).float(),
                        real.gather(1, column[:, None])[:, 0].masked_fill(~mine, -torch.inf)], dim=1)


def of_all(found: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """[n, 4] of every rank -> fp64 log-probabilities [n], and whether each target is the likeliest [n]. Of equal
    logits the first one is. Collective."""
    total, largest, greedy, at_target = all_gather(found[None], tp, 0).unbind(-1)  # each [tp, n]
    first = largest.argmax(0, keepdim=True)
    return (at_target.amax(0) - total.logsumexp(0)).double(), greedy.gather(0, first)[0].bool()
