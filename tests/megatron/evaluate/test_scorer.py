"""A score is the whole model's, token by token, whatever is scored beside it and on however many ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from data.storage import DataError
from megatron.errors import NumericsError
from megatron.evaluate import scoring
from megatron.evaluate.scoring import Scorer
from megatron.evaluate.tasks import ScoringRequest, TargetScore, document_requests, overlapping_windows
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.groups import Groups
from mpu.cross_entropy import VocabShard
from tests.distributed import RankError, run_ranks
from tests.megatron.counting import Launches
from tests.megatron.evaluate.models import LENGTH, SHAPE, WIKITEXT, logprob, outcome, write_lines

TOLERANCE = 2e-5
"""Of a logarithm: logits are fp32 products of 48 numbers, in another order where other pieces run beside."""


def some_pieces() -> list[ScoringRequest]:
    """Of all lengths; 1 to all targets."""
    rng = np.random.default_rng(3)
    return [ScoringRequest(rng.integers(0, 257, size), int(first)) for size in range(2, LENGTH + 2)
            for first in {1, rng.integers(1, size), size - 1}]


def by_hand(model: GPT2, piece: ScoringRequest) -> float:
    ids = piece.tokens.tolist()
    return sum(logprob(model, ids[:place], ids[place]) for place in range(piece.first_target, len(ids)))


def assert_scores_close(found: Sequence[TargetScore], expected: Sequence[TargetScore]) -> None:
    assert [score.is_greedy for score in found] == [score.is_greedy for score in expected]
    for score, other in zip(found, expected, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=TOLERANCE * LENGTH)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_score_is_the_sum_over_tokens_whatever_runs_beside_it(size: int) -> None:
    model, pieces = GPT2(SHAPE), some_pieces()
    for piece, score in zip(pieces, Scorer(model, Groups(), size)(pieces), strict=True):
        assert score.logprob == pytest.approx(by_hand(model, piece), abs=TOLERANCE * LENGTH)


def test_logits_are_made_a_bounded_number_of_rows_at_a_time() -> None:
    model, pieces, rows = GPT2(SHAPE), some_pieces(), list[int]()
    whole = Scorer(model, Groups(), 100)(pieces)
    made = model.local_logits

    def logits(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return made(x)

    with patch.object(model, "local_logits", logits), patch.object(scoring, "CPU_LOGITS_BYTES", 4 * 257 * 5):
        assert_scores_close(Scorer(model, Groups(), 100)(pieces), whole)
    assert max(rows) == 5 and sum(rows) == sum(len(piece.tokens) - piece.first_target for piece in pieces)


def test_a_probability_that_is_no_number_is_an_error() -> None:
    model = GPT2(SHAPE)
    with torch.no_grad():
        model.wpe.weight[3] = torch.nan
    with pytest.raises(NumericsError, match="--dtype"):
        Scorer(model, Groups(), 4)(some_pieces())


def figures(rank: int, world: int, tp: int, folder: str) -> list[dict[str, Any]]:
    """Of every task, and of one example."""
    groups = mpu_groups.build(tp)
    model, place = GPT2(SHAPE, groups.tp), Path(folder)
    one = outcome(model, groups, task="lambada", protocol="megatron", data=place / "one.jsonl")
    return [{name: value for name, value in vars(found).items() if name != "accuracies"} for found in (one, *(
        outcome(model, groups, task=task, protocol=protocol, data=place / data) for task, protocol, data in (
            ("wikitext", "megatron", "wiki.txt"), ("wikitext", "lm-eval", "wiki.txt"),
            ("lambada", "lm-eval", "lambada.jsonl"), ("perplexity", "megatron", "lambada.jsonl"))))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    (made / "wiki.txt").write_text(WIKITEXT)
    lambada = [{"text": f"number {n} is after {'one ' * n}"} for n in range(7)]
    write_lines(made / "lambada.jsonl", lambada)
    write_lines(made / "one.jsonl", lambada[:1])
    return made


def test_results_are_the_same_bits_on_any_number_of_ranks(folder: Path) -> None:
    alone = run_ranks(figures, 1, 1, str(folder))[0]
    for world in (2, 3):
        assert run_ranks(figures, world, 1, str(folder)) == [alone] * world


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_the_same_where_the_model_is_split(world: int, folder: Path) -> None:
    alone = figures(0, 1, 1, str(folder))
    found = run_ranks(figures, world, 2, str(folder))
    assert found == [found[0]] * world
    for one, other in zip(found[0], alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4)  # of a perplexity: its logarithm is within TOLERANCE


def other_data(rank: int, world: int) -> None:
    Scorer(GPT2(SHAPE), mpu_groups.build(1), 4)([ScoringRequest(np.array([1, rank]), 1)])


def test_ranks_with_other_data_are_told_so() -> None:
    with pytest.raises(RankError, match="rank 1 has other data than rank 0") as caught:
        run_ranks(other_data, 2)
    assert isinstance(caught.value.error, DataError)


# ---- windows ----------------------------------------------------------------------------------------------------


def contexts(requests: Iterable[ScoringRequest], length: int) -> list[tuple[int, int]]:
    """(token, first token that is read before it), in the order in which they are scored."""
    requests = list(requests)
    assert all(2 <= len(one.tokens) <= length + 1 for one in requests)
    return [(int(token), int(one.tokens[0])) for one in requests for token in one.tokens[one.first_target:]]


def test_windows_score_each_token_once_from_the_context_of_their_protocol() -> None:
    """Overlapping ones from the first that reaches a token; the last rolling one reads as much as any."""
    for tokens, length in product((0, 1, 2, 3, 7, 8, 9, 16, 17, 40), (1, 2, 3, 8)):
        for stride in range(1, length + 1):
            expected = [(token, 0 if token <= length else math.ceil((token - length) / stride) * stride)
                        for token in range(1, tokens)]
            assert contexts(overlapping_windows(np.arange(tokens), length, stride), length) == expected
        rolling = [*document_requests(np.arange(1, tokens), length, eod=0)]  # token 0 is the end of a document
        assert [token for token, _ in contexts(rolling, length)] == list(range(1, tokens))
        for one in rolling:
            assert len(one.tokens) - 1 == min(length, tokens - 1) or one is rolling[0]


# ---- a vocabulary that is split over ranks ----------------------------------------------------------------------

TOKENS = 257
"""Of 512 columns over four ranks the last one's are all padding."""


def greedy_pieces() -> list[ScoringRequest]:
    """Of three, the first and the last have targets that are all the likeliest."""
    model, found = GPT2(SHAPE), list[ScoringRequest]()
    for start in range(5):
        ids = [start, 7 * start]
        for _ in range(4):
            with torch.no_grad():
                ids.append(int(model.eval()(torch.tensor([ids]))[0].argmax()))
        wrong = [*ids[:-2], (ids[-2] + 1) % TOKENS, ids[-1]]
        found += [ScoringRequest(np.array(ids), 2), ScoringRequest(np.array(wrong), 2),
                  ScoringRequest(np.array(ids), 5)]
    return found


def scored(rank: int, world: int, requests: list[ScoringRequest]) -> tuple[list[TargetScore], dict[str, int]]:
    """Padding's rows of the table are as wrong as can be."""
    groups = mpu_groups.build(world)
    model = GPT2(SHAPE, groups.tp)
    with torch.no_grad():
        model.wte.weight[VocabShard.of(len(model.wte.weight), groups.tp, TOKENS).num_columns:] = 100
    with patch.object(scoring, "CPU_LOGITS_BYTES", 4 * TOKENS * 3), Launches() as counted:
        scores = Scorer(model, groups, 5)(requests)
    return scores, dict(counted.by_name)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_greedy_is_said_where_every_target_is_the_likeliest_and_ranks_ask_each_other_once_a_batch(world: int) -> None:
    requests = [*greedy_pieces(), *some_pieces()]
    alone, _ = scored(0, 1, requests)
    assert [score.is_greedy for score in alone[:15]] == [True, False, True] * 5
    for found, counted in run_ranks(scored, world, requests):
        assert_scores_close(found, alone)
        gathers = {name: count for name, count in counted.items() if "gather" in name and name != "gather"}
        # a word before the first batch says that all have the same data: its length, and itself
        assert gathers == {"all_gather_into_tensor": -(-len(requests) // 5), "_allgather_base_": 2}
