"""The next token of each text, from its logits.

In this order: tokens that the text has are made less likely (`repetition_penalty`), the temperature, then all but the
`top_k` likeliest go, all but the smallest set of likeliest ones that has `top_p` of the probability, all that have less
than `min_p` of the likeliest one's. What is left is drawn from by one number between 0 and 1, of a stream that belongs
to the text: neither the texts beside it nor the number of ranks change it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.inference.request import Sampling


def draw(logits: Tensor, settings: Sampling, numbers: Tensor, seen: Sequence[Collection[int]]) -> Tensor:
    """[b, V] logits of texts with these settings, a number between 0 and 1 for each -> [b] tokens. Nothing waits for
    the device."""
    if settings.greedy:
        return penalised(logits, settings, seen).argmax(-1)
    found, tokens = choices(logits, settings, seen)
    steps = found.cumsum(-1)
    places = (steps <= numbers[:, None] * steps[:, -1:]).sum(-1, keepdim=True)  # the first that is larger
    return tokens.gather(-1, places.clamp(max=steps.shape[-1] - 1))[:, 0]


def choices(logits: Tensor, settings: Sampling, seen: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """[b, V] -> probabilities in fp64, and the tokens they are for, in the order of their ids: two that are nearly
    alike then change places nowhere. What a limit leaves out is not among them, or has probability 0."""
    scores = penalised(logits, settings, seen).double() / settings.temperature
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
    found = found / found.sum(-1, keepdim=True)
    if settings.top_k or settings.top_p < 1:
        order = tokens.argsort()
        return found.gather(-1, order), tokens.gather(-1, order)
    return found, tokens


def penalised(logits: Tensor, settings: Sampling, seen: Sequence[Collection[int]]) -> Tensor:
    if settings.repetition_penalty == 1:
        return logits
    scores = logits.double()
    for row, tokens in zip(scores, seen, strict=True):
        places = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=scores.device)
        found = row[places]
        row[places] = torch.where(found > 0, found / settings.repetition_penalty, found * settings.repetition_penalty)
    return scores
