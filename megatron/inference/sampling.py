"""The next token of each text, from its logits.

In this order: tokens that the text has are made less likely (`repetition_penalty`), the temperature, then all but the
`top_k` likeliest go, all but the smallest set of likeliest ones that has `top_p` of the probability, all that have less
than `min_p` of the likeliest one's. Each token that is left gets a random number of its own, which a key of the text
and its id make, and the largest sum with its log-probability wins. So neither the texts beside it nor the number of
ranks change a text: another last digit, even of a token at the border of a limit, matters only to a token that would
have won.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.inference.request import Sampling


def sample_tokens(logits: Tensor, settings: Sampling, keys: Tensor, seen: Sequence[Collection[int]]) -> Tensor:
    """[b, V] logits of texts with these settings, a 64-bit key for each -> [b] tokens. Nothing waits for the device."""
    if settings.greedy:
        return apply_repetition_penalty(logits, settings, seen).argmax(-1)
    found, tokens = candidate_probabilities(logits, settings, seen)
    return tokens.gather(-1, (found.log() + gumbel_noise(keys[:, None], tokens)).argmax(-1, keepdim=True))[:, 0]


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel's, of each token under a key: the largest sum of it and a logarithm is drawn as its probability says."""
    x = tokens * -7046029254386353131 + keys  # splitmix64: multiplications wrap, shifts fill with zeros
    x = (x ^ _logical_right_shift(x, 30)) * -4658895280553007687
    x = (x ^ _logical_right_shift(x, 27)) * -7723592293110705685
    x = _logical_right_shift(x ^ _logical_right_shift(x, 31), 11)
    return -(-((x.double() + 0.5) * 2.0 ** -53).log()).log()


def _logical_right_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def candidate_probabilities(logits: Tensor, settings: Sampling,
                            seen: Sequence[Collection[int]]) -> tuple[Tensor, Tensor]:
    """[b, V] -> probabilities in fp64, and the tokens they are for. What a limit leaves out is not among them, or has
    probability 0."""
    scores = apply_repetition_penalty(logits, settings, seen).double() / settings.temperature
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
    return found / found.sum(-1, keepdim=True), tokens


def apply_repetition_penalty(logits: Tensor, settings: Sampling, seen: Sequence[Collection[int]]) -> Tensor:
    if settings.repetition_penalty == 1:
        return logits
    scores = logits.double()
    for row, tokens in zip(scores, seen, strict=True):
        token_ids = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=scores.device)
        found = row[token_ids]
        row[token_ids] = torch.where(found > 0, found / settings.repetition_penalty,
                                     found * settings.repetition_penalty)
    return scores
