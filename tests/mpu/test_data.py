"""broadcast_data: the batch of the first tensor-parallel rank arrives everywhere, or everyone hears why not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpu.groups import SOLO, build
from mpu.parallel_state import broadcast_data
from mpu.split import ParallelError
from tests.distributed import run_ranks


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"text": (2, 5), "mask": (1,), "deep": (2, 1, 3, 2), "empty": (0, 4), "other": (7,)}
    return {key: torch.randint(0, 99, shape, generator=generator) for key, shape in shapes.items()}


KEYS = ["text", "mask", "deep", "empty"]


def _receive(rank: int, world: int) -> dict[str, Tensor]:
    groups = build(2)
    data = _batch(groups.dp.rank) if groups.tp.rank == 0 else None
    return broadcast_data(KEYS, data, torch.int64, groups.tp)


def test_each_group_gets_the_batch_of_its_first_rank() -> None:
    for rank, received in enumerate(run_ranks(_receive, 4)):
        expected = _batch(rank // 2)
        assert list(received) == KEYS
        assert all(torch.equal(received[key], expected[key]) for key in KEYS)


def _wrong(rank: int, world: int, key: str, dtype: torch.dtype) -> str:
    with pytest.raises(ParallelError) as caught:
        broadcast_data([key], _batch(0) if rank == 0 else None, dtype, build(2).tp)
    return str(caught.value)


@pytest.mark.parametrize(("key", "dtype", "text"), [
    ("missing", torch.int64, "'missing' is not in the batch"),
    ("text", torch.float32, "'text' is torch.int64, expected torch.float32"),
])
def test_what_is_wrong_is_told_on_every_rank(key: str, dtype: torch.dtype, text: str) -> None:
    for message in run_ranks(_wrong, 2, key, dtype):
        assert text in message


def test_a_tensor_of_five_dimensions_is_refused() -> None:
    with pytest.raises(ParallelError, match="5 dimensions"):
        broadcast_data(["x"], {"x": torch.zeros(1, 1, 1, 1, 1)}, torch.float32, SOLO)
