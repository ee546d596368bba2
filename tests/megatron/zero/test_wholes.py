"""Whole parameters are brought together in their logical shape, wherever their numbers are; and everybody finds its
own again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.zero.engine import ZeroEngine
from megatron.zero.update import gather_full_params
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.kept import master
from tests.megatron.zero.run import configure_gpt2, gpt2_engine

VOCABULARY = 61
"""Padded to 64."""


def engine_of(stage: int, tp: int) -> ZeroEngine:
    """Weights do not depend on the layout."""
    grid = groups.build(tp)
    return gpt2_engine(configure_gpt2(zero_stage=stage, model_parallel_size=tp, num_layers=1, batch_size=1,
                                      global_batch_size=grid.dp.size), grid)


def _found(rank: int, world: int, stage: int, tp: int) -> dict[str, tuple[Tensor, int, bool]]:
    """Parameter -> its values, how many are joined, and whether this rank found its own part, as it is and doubled."""
    engine, found = engine_of(stage, tp), {}
    for bucket in engine.buckets:
        for group in range(2):
            start, stop = bucket.layout.group_range(bucket.shard_group.rank, group)
            own = master(bucket)[start:stop]
            for whole in gather_full_params(bucket, engine.groups.tp, group, own):
                values = whole.values.clone()
                is_own = torch.equal(whole.local_values(), own[whole.local_range])
                whole.values.mul_(2)
                found[whole.name] = values, whole.num_fused, is_own and torch.equal(whole.local_values(),
                                                                                    2 * own[whole.local_range])
    return found


def _whole(rank: int, world: int) -> dict[str, Tensor]:
    engine = engine_of(0, 1)
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize("ranks, stage, tp", [(1, 0, 1), (2, 0, 1), (3, 1, 1), (4, 3, 1), (2, 1, 2), (4, 3, 2)])
def test_they_are_those_of_a_model_that_nobody_cut(ranks: int, stage: int, tp: int) -> None:
    (wanted,), by_rank = run_ranks(_whole, 1), run_ranks(_found, ranks, stage, tp)
    assert set().union(*by_rank) == wanted.keys()
    for name, (values, joined, is_own) in (item for found in by_rank for item in found.items()):
        assert torch.equal(values, wanted[name][:VOCABULARY] if name == "wte.weight" else wanted[name]), name
        assert joined == (3 if "qkv" in name else 1) and is_own, name


def _kinds(rank: int, world: int) -> list[Any]:
    engine, found = engine_of(3, 1), []
    for bucket in engine.buckets:
        start, stop = bucket.layout.group_range(bucket.shard_group.rank, 0)
        for dtype in (torch.bfloat16, torch.float32):
            bring = partial(gather_full_params, bucket, engine.groups.tp, 0)
            found += [(whole.values.dtype, whole.local_values().dtype)
                      for whole in bring(torch.ones(stop - start, dtype=dtype))]
    return found


def test_numbers_keep_the_precision_they_are_given_in() -> None:
    for found in run_ranks(_kinds, 2):
        assert {*found} == {(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)}
