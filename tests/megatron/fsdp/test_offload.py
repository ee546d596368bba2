"""What lasts on the host of an accelerator: no bit is another one, and copies may end as late as they like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.fsdp import CPUOffloadPolicy
from tests.distributed import run_ranks
from tests.late_copy_streams import late_copy_streams
from tests.megatron.fsdp.loops import by_shards, mixed
from tests.megatron.fsdp.test_equal import MODELS
from tests.wires import accelerator_side

STEPS = 4
CELLS = [("odd sizes", "torch", None), ("tied", "nested", None), ("frozen", "torch", torch.bfloat16),
         ("odd sizes", "nested", torch.bfloat16), ("tied", "torch", torch.float16),
         ("root ends in a block", "twice nested", None)]


def outcome(name: str, way: str, rank: int, **given: Any) -> tuple[list[float], dict[str, list[float]]]:
    losses, weights = by_shards(MODELS[name], way, rank, STEPS, **given)
    return losses, {key: bits(tensor) for key, tensor in weights.items()}


def bits(tensor: Tensor) -> list[float]:
    return tensor.detach().double().flatten().tolist()  # type: ignore[no-any-return]


def differing(rank: int, world: int, name: str, way: str, dtype: torch.dtype | None) -> bool:
    given = mixed(way, dtype) if dtype else {}
    with accelerator_side():
        expected = outcome(name, way, rank, **given)
        with late_copy_streams() as ferry:
            given |= {"offload_policy": CPUOffloadPolicy()} if way == "torch" else {"cpu_offload": True}
            found = outcome(name, way, rank, **given)
        lanes: list[Any] = [ferry.to_device, ferry.to_host]
        assert all(lane.copied for lane in lanes)
        return found != expected


@pytest.mark.few(5)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name, way, dtype", CELLS, ids=str)
def test_a_home_on_the_host_changes_no_bit(name: str, way: str, dtype: torch.dtype | None, world: int) -> None:
    assert run_ranks(differing, world, name, way, dtype) == [False] * world
