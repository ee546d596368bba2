"""How likely the model finds each token of a text, and which it finds likeliest there: another reading of the whole
text, for clients that ask for more than the tokens that were taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from megatron.model.gpt2 import GPT2

CHUNK_BYTES = 64 << 20
"""Of logits that exist together."""


@dataclass(frozen=True)
class Verdict:
    """Of a text's tokens from the second on: the first has nothing before it."""

    number: int
    logprobs: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    """In each place: tokens with their log-probabilities, the likeliest first."""


@final
class Judge:
    def __init__(self, model: GPT2, vocabulary: int) -> None:
        """Tokens from `vocabulary` on are padding."""
        self._model, self._vocabulary = model, vocabulary
        self._rows = max(1, CHUNK_BYTES // (4 * vocabulary))

    @torch.inference_mode()
    def __call__(self, number: int, ids: tuple[int, ...], top: int) -> Verdict:
        """Collective."""
        tokens = torch.tensor(ids, device=self._model.wpe.weight.device)
        logprobs: list[float] = []
        likeliest: list[tuple[tuple[int, float], ...]] = []
        if len(ids) > 1:
            hidden = self._model.hidden_states(tokens[None, :-1])[0]  # [s - 1, h]
            for rows, targets in zip(hidden.split(self._rows), tokens[1:].split(self._rows), strict=True):
                found = self._model.logits(rows)[:, : self._vocabulary].float().log_softmax(-1)  # [n, V]
                logprobs += found.gather(1, targets[:, None])[:, 0].tolist()
                values, places = found.topk(min(top, self._vocabulary))
                likeliest += [tuple(zip(*pair)) for pair in zip(places.tolist(), values.tolist(), strict=True)]
        return Verdict(number, tuple(logprobs), tuple(likeliest))
