"""The next token of one text, from its logits.

In this order: tokens that the text has are made less likely (`repetition_penalty`), the temperature, then all but the
`top_k` likeliest go, all but the smallest set of likeliest ones that has `top_p` of the probability, all that have less
than `min_p` of the likeliest one's. What is left is drawn from by one number between 0 and 1, of a stream that belongs
to the text: neither the texts beside it nor the number of ranks change it.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from megatron.config.problems import Problems


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    """Always the likeliest, once repetitions are."""

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require(self.temperature > 0, f"--temperature is {self.temperature:g}: expected more than 0; --greedy "
                         "takes the likeliest token")
        problems.require(self.top_k >= 0, f"--top-k is {self.top_k}: expected 0 (all) or more")
        problems.require(0 < self.top_p <= 1, f"--top-p is {self.top_p:g}: expected more than 0, at most 1")
        problems.require(0 <= self.min_p <= 1, f"--min-p is {self.min_p:g}: expected 0 to 1")
        problems.require(self.repetition_penalty > 0, f"--repetition-penalty is {self.repetition_penalty:g}: expected "
                         "more than 0; 1 changes nothing")
        problems.stop()


def probabilities(logits: Tensor, settings: Sampling, seen: Collection[int] = ()) -> Tensor:
    """[V] -> [V] in fp64, what a token is drawn from."""
    scores = penalised(logits, settings, seen) / settings.temperature
    if 0 < settings.top_k < len(scores):
        kept = scores.topk(settings.top_k).indices
        scores = torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept])
    found = scores.softmax(-1)
    if settings.top_p < 1:
        ordered, places = found.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # of likelier ones
        found[places[before >= settings.top_p]] = 0
    if settings.min_p > 0:
        found[found < settings.min_p * found.max()] = 0
    return found / found.sum()


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
    """Of one text: the `number`th of those that `seed` is for."""

    def __init__(self, settings: Sampling, seed: int, number: int) -> None:
        self._settings, self._random = settings, random.Random(f"{seed}/{number}")

    def __call__(self, logits: Tensor, seen: Collection[int]) -> int:
        if self._settings.greedy:
            return int(penalised(logits, self._settings, seen).argmax())
        steps = probabilities(logits, self._settings, seen).cumsum(-1)
        drawn = torch.tensor([self._random.random()], dtype=torch.float64, device=steps.device) * steps[-1]
        return int(torch.searchsorted(steps, drawn, right=True).clamp_(max=len(steps) - 1))
