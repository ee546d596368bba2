"""What a token is drawn from, against the slow obvious way; and that it is drawn from that."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest
import torch

from megatron.errors import ConfigError
from megatron.inference.request import Sampling
from megatron.inference.sampling import Sampler, choices

LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2

SETTINGS = [
    Sampling(), Sampling(temperature=0.5), Sampling(temperature=3.0, top_k=7), Sampling(top_k=1), Sampling(top_k=40),
    Sampling(top_p=0.6), Sampling(top_p=0.01), Sampling(min_p=0.2), Sampling(repetition_penalty=1.7),
    Sampling(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=0.6)]


def probabilities(logits: torch.Tensor, settings: Sampling, seen: Collection[int] = ()) -> torch.Tensor:
    found, tokens = choices(logits, settings, seen)
    assert tokens.tolist() == sorted(tokens.tolist())
    return torch.zeros(len(logits), dtype=torch.float64).scatter(0, tokens, found)


def slowly(settings: Sampling, seen: set[int]) -> list[float]:
    scores = {token: float(score) for token, score in enumerate(LOGITS.double())}
    for token in seen:
        penalty = settings.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    weights = {token: math.exp(score / settings.temperature) for token, score in scores.items()}
    order = sorted(weights, key=lambda token: -weights[token])
    if settings.top_k:
        order = order[: settings.top_k]
    total, kept, so_far = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if so_far / total < settings.top_p:
            kept.append(token)
        so_far += weights[token]
    kept = [token for token in kept if weights[token] >= settings.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(LOGITS))]


@pytest.mark.parametrize("seen", [set(), {0, 3, 39}], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_are_those_of_the_slow_way(settings: Sampling, seen: set[int]) -> None:
    before = LOGITS.clone()
    found = probabilities(LOGITS, settings, seen)
    assert found.tolist() == pytest.approx(slowly(settings, seen), abs=1e-12) and torch.equal(LOGITS, before)


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(settings: Sampling) -> None:
    draws, expected = 20_000, probabilities(LOGITS, settings)
    sampler, counts = Sampler(settings, "5/0"), torch.zeros(len(LOGITS), dtype=torch.float64)
    for _ in range(draws):
        counts[sampler(LOGITS, ())] += 1
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    chi = ((counts - expected * draws).square() / (expected * draws))[likely].sum().item()
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom), "more than four deviations away"


def test_the_ends_of_the_line_that_is_drawn_from_are_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(Sampling(top_k=3), "1/0")
    possible = probabilities(LOGITS, Sampling(top_k=3)).nonzero().flatten().tolist()
    for number, token in ((0.0, min(possible)), (1 - 2 ** -53, max(possible))):
        monkeypatch.setattr(random.Random, "random", lambda stream, number=number: number)
        assert sampler(LOGITS, ()) == token


def test_streams_of_texts_and_seeds_differ() -> None:
    found = [[int(Sampler(Sampling(), f"{seed}/{number}")(LOGITS, ())) for number in range(30)] for seed in (1, 2)]
    assert found[0] != found[1] and len(set(found[0])) > 5


@pytest.mark.parametrize("wrong", [
    {"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0},
    {"repetition_penalty": 0.0}], ids=str)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong)).replace('_', '-')} is"):
        Sampling(**wrong)
