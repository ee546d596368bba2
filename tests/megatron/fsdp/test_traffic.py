"""What the FSDP face sends, by a formula, and how much is whole at a time.

For K blocks and a root, a step of one backward gathers and scatters P elements of each block

    reshard_after_forward=True    twice and once: 3 P; the root is gathered once
    reshard_after_forward=False   once and once: 2 P, as ZeRO-2
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron.fsdp import MixedPrecisionPolicy, fully_shard
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import adamw, around, batch
from tests.megatron.zero.models import Net
from tests.megatron.zero.test_traffic import Traffic, traffic
from tests.wires import accelerator_side, counted

BLOCK = 512
"""Elements: two matrices of 6 x 7, two biases, each padded to 128."""
ROOT = 512
BLOCKS = 3


def sent(rank: int, world: int, way: str, given: dict[str, Any]) -> Traffic:
    with accelerator_side():
        model = around(Net(), way, **given)
        optimizer = adamw(model)
        for number in range(2):
            with counted() as operations:
                model(batch(rank, number)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return traffic(operations)


@pytest.mark.parametrize("way", ["nested", "torch"])
@pytest.mark.parametrize("reshards", [True, False])
def test_bytes_on_the_wire_are_those_of_the_formula(way: str, reshards: bool) -> None:
    gathers = (2 if reshards else 1) * BLOCKS
    expected = Counter({("all_gather", BLOCK, "float32"): gathers, ("reduce_scatter", BLOCK, "float32"): BLOCKS})
    expected["all_gather", ROOT, "float32"] += 1
    expected["reduce_scatter", ROOT, "float32"] += 1
    for found in run_ranks(sent, 2, way, {"reshard_after_forward": reshards}):
        assert found == dict(expected)


def sent_by_some(rank: int, world: int) -> Traffic:
    """The last block stays, the others leave: each module has its own setting."""
    with accelerator_side():
        model = Net()
        for number, block in enumerate(model.blocks):
            fully_shard(block, reshard_after_forward=number < 2)
        fully_shard(model)
        optimizer = adamw(model)
        for number in range(2):
            with counted() as operations:
                model(batch(rank, number)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return traffic(operations)


def test_each_module_has_a_setting_of_its_own() -> None:
    for found in run_ranks(sent_by_some, 2):
        assert found["all_gather", BLOCK, "float32"] == 2 + 2 + 1 + 1  # the root is as large


def no_sync_traffic(rank: int, world: int) -> tuple[Traffic, Traffic]:
    with accelerator_side():
        model = around(Net(), "nested")
        with counted() as inside, model.no_sync():
            model(batch(rank, 0)).backward()
        with counted() as outside:
            model(batch(rank, 1)).backward()
    return traffic(inside), traffic(outside)


def test_no_sync_sends_no_gradients() -> None:
    for inside, outside in run_ranks(no_sync_traffic, 2):
        assert not any(kind == "reduce_scatter" for kind, _, _ in inside)
        assert outside["reduce_scatter", BLOCK, "float32"] >= BLOCKS


@pytest.mark.parametrize("asked, summed", [(None, "float32"), (torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_a_reduction_is_in_the_precision_that_was_asked_for(asked: torch.dtype | None, summed: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=asked)
    for found in run_ranks(sent, 2, "torch", {"mp_policy": policy}):
        assert {dtype for kind, _, dtype in found if kind == "reduce_scatter"} == {summed}
        assert {dtype for kind, _, dtype in found if kind == "all_gather"} == {"bfloat16"}


def among_neighbours(rank: int, world: int) -> tuple[Traffic, bool]:
    """Two and two of four ranks keep the blocks between forward and backward."""
    with accelerator_side():
        model = around(Net(), "torch", reshard_after_forward=2)
        optimizer = adamw(model)
        plain = around(Net(), "torch")
        other = adamw(plain)
        for number in range(3):
            losses = []
            for one, stepped in ((model, optimizer), (plain, other)):
                with counted() as operations:
                    loss = one(batch(rank, number))
                    loss.backward()
                    stepped.step()
                    stepped.zero_grad()
                losses.append(float(loss.detach()))
                if one is model:
                    found = traffic(operations)
    from tests.megatron.fsdp.loops import whole
    same = losses[0] == losses[1] and all(map(torch.equal, whole(model).values(), whole(plain).values()))
    return found, same


@pytest.mark.slow
def test_a_number_reshards_among_neighbours() -> None:
    for found, same in run_ranks(among_neighbours, 4):
        assert same
        assert found["all_gather", BLOCK, "float32"] == 2 * BLOCKS + 1
