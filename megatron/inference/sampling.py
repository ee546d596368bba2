"""The next token of one text, from its logits.

In this order: tokens that the text has are made less likely (`repetition_penalty`), the temperature, then all but the
`top_k` likeliest go, all but the smallest set of likeliest ones that has `top_p` of the probability, all that have less
than `min_p` of the likeliest one's. What is left is drawn from by one number between 0 and 1, of a stream that belongs
to the text: neither the texts beside it nor the number of ranks change it.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import final

import torch
from torch import Tensor

from megatron.inference.request import Sampling


def choices(logits: Tensor, settings: Sampling, seen: Collection[int] = ()) -> tuple[Tensor, Tensor]:
    """[V] -> probabilities in fp64, and the tokens they are for, in the order of their ids: two that are nearly alike
    then change places nowhere. What a limit leaves out is not among them, or has probability 0."""
    scores = penalised(logits, settings, seen) / settings.temperature
    tokens = torch.arange(len(scores), device=scores.device)
    if 0 < settings.top_k < len(scores):
        scores, tokens = scores.topk(settings.top_k)
    elif settings.top_p < 1:
        scores, tokens = scores.sort(descending=True, stable=True)
    found = scores.softmax(-1)
    if settings.top_p < 1:
        before = found.cumsum(-1) - found  # of likelier ones
        found = found.where(before < settings.top_p, 0.0)
    if settings.min_p > 0:
        found = found.where(found >= settings.min_p * found.max(), 0.0)
    order = tokens.argsort() if settings.top_k or settings.top_p < 1 else slice(None)
    return (found / found.sum())[order], tokens[order]


def penalised(logits: Tensor, settings: Sampling, seen: Collection[int]) -> Tensor:
    scores = logits.double()
    if settings.repetition_penalty != 1 and seen:
        places = torch.tensor(sorted(set(seen)), device=scores.device)
        found = scores[places]
        scores[places] = torch.where(found > 0, found / settings.repetition_penalty,
                                     found * settings.repetition_penalty)
    return scores


@final
class Sampler:
    """Of one text, with a stream of random numbers that `stream` names."""

    def __init__(self, settings: Sampling, stream: str) -> None:
        self._settings, self._random = settings, random.Random(stream)

    def __call__(self, logits: Tensor, seen: Collection[int]) -> Tensor:
        """[V] -> one token, where the logits are: nothing waits for it."""
        settings = self._settings
        if settings.greedy:
            penalty = settings.repetition_penalty != 1
            return (penalised(logits, settings, seen) if penalty else logits).argmax()
        found, tokens = choices(logits, settings, seen)
        steps = found.cumsum(-1)
        place = (steps <= self._random.random() * steps[-1]).sum()  # the first that is larger
        return tokens[place.clamp(max=len(steps) - 1)]
