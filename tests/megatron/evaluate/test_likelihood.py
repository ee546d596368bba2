"""Cut over ranks, targets are as likely as among all columns at once, and little travels."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint.int8_weights import quantise_matrix
from megatron.evaluate import scoring
from megatron.evaluate.scoring import Scorer, ScoringRequest, combine_target_stats, local_target_stats
from megatron.inference.int8 import Int8
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.cross_entropy import VocabShard
from mpu.groups import SOLO
from tests.distributed import run_ranks
from tests.megatron.counting import Launches
from tests.megatron.evaluate.models import LENGTH, SHAPE

TOKENS = 257
"""Of 512 columns over four ranks the last one's are all padding."""


def whole_logits(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """[64, 512], padding larger than all that counts, and targets; in the first rows the likeliest two are equal, in
    columns of one rank or of two."""
    made = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 512, generator=made).mul(4).to(dtype)
    logits[:, TOKENS:] = 100
    targets = torch.randint(TOKENS, (64,), generator=made)
    for row, (low, high) in enumerate([(3, 9), (3, 200), (120, 256), (130, 255)]):
        logits[row, low] = logits[row, high] = logits[row + 4, low] = logits[row + 4, high] = 30
        targets[row], targets[row + 4] = low, high
    targets[8:40] = logits[8:40, :TOKENS].argmax(1)
    return logits, targets


def by_hand(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    real = logits[:, :TOKENS].float()
    logprobs = real.gather(1, targets[:, None])[:, 0] - real.logsumexp(1)
    return logprobs.double(), real.argmax(1) == targets


def test_on_one_rank_it_is_the_plain_formula_to_the_bit() -> None:
    logits, targets = whole_logits()
    found = combine_target_stats(local_target_stats(logits, targets, SOLO, TOKENS), SOLO)
    for one, other in zip(found, by_hand(logits, targets), strict=True):
        assert torch.equal(one, other)
    assert found[1].tolist()[:8] == [True] * 4 + [False] * 4


def cut(rank: int, world: int) -> tuple[Tensor, Tensor]:
    tp, (logits, targets) = mpu_groups.build(world).tp, whole_logits()
    return combine_target_stats(local_target_stats(logits.chunk(world, 1)[rank], targets, tp, TOKENS), tp)


@pytest.mark.parametrize("world", [2, 4])
def test_cut_over_ranks_it_is_the_same(world: int) -> None:
    logprobs, greedy = by_hand(*whole_logits())
    for found in run_ranks(cut, world):
        torch.testing.assert_close(found[0], logprobs, atol=1e-5, rtol=0)  # fp32 near 30, summed in another order
        assert torch.equal(found[1], greedy)


def pieces() -> list[ScoringRequest]:
    rng = np.random.default_rng(3)
    return [ScoringRequest(rng.integers(0, TOKENS, size), int(rng.integers(1, size))) for size in range(2, LENGTH + 2)]


def quantise(model: GPT2) -> None:
    """The token table, by the maxima of whole rows: it is cut between rows."""
    weight = model.wte.weight.detach()
    levels, scale = quantise_matrix(lambda start, out: out.copy_(weight.view(-1)[start:start + len(out)]), weight.shape,
                                    "wte.weight")
    model.wte.weight = nn.Parameter(Int8(levels, scale), requires_grad=False)


def scored(rank: int, world: int, int8: bool) -> tuple[list[float], dict[str, int]]:
    """Padding's rows of the table are as wrong as can be."""
    groups = mpu_groups.build(world)
    model = GPT2(SHAPE, groups.tp)
    with torch.no_grad():
        model.wte.weight[VocabShard.of(len(model.wte.weight), groups.tp, TOKENS).num_columns:] = 100
    if int8:
        quantise(model)
    with patch.object(scoring, "CPU_LOGITS_BYTES", 4 * TOKENS * 3), Launches() as counted:
        scores = Scorer(model, groups, 5)(pieces())
    return [score.logprob for score in scores], dict(counted.by_name)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_ask_each_other_once_a_batch(world: int, int8: bool) -> None:
    alone, _ = scored(0, 1, int8)
    for found, counted in run_ranks(scored, world, int8):
        assert found == pytest.approx(alone, abs=2e-5 * LENGTH)  # fp32 products of 48 numbers, a token at a time
        gathers = {name: count for name, count in counted.items() if "gather" in name and name != "gather"}
        # a word before the first batch says that all have the same data: its length, and itself
        assert gathers == {"all_gather_into_tensor": -(-len(pieces()) // 5), "_allgather_base_": 2}
