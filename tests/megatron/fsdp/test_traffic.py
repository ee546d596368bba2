"""What the FSDP face sends, by a formula, and its memory: what the planner says of stage 3, and no whole model where
one is streamed.

For K blocks and a root, a step of one backward gathers and scatters P elements of each block

    reshard_after_forward=True    twice and once: 3 P; the root is gathered once
    reshard_after_forward=False   once and once: 2 P, as ZeRO-2
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megatron.config.tree import build_config
from megatron.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.fsdp.sharding import unwrap
from megatron.fsdp.state_dict import buckets_of, full_state_dict
from megatron.model import GPT2
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import all_phases
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import adamw, around, batch
from tests.megatron.live_bytes import LiveBytes
from tests.megatron.plan.test_memory_model import SHAPE, described
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


SETTINGS: dict[str, Any] = {**SHAPE, "num_layers": 6, "zero_stage": 3, "stage3_param_persistence_threshold": 0,
                            "stage3_max_reuse_distance": 0}


def peak_of_steps(rank: int, world: int, way: str) -> int:
    config = build_config(described({**SETTINGS, "world": world}))
    torch.manual_seed(0)
    model = around(GPT2(config.model), way)
    rows = torch.randint(0, config.model.known_vocab_size, (config.train.batch_size, config.seq_length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with LiveBytes() as live:
        for number in range(3):
            if number == 1:
                live.reset_peak()
            model(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def test_the_peak_is_what_the_planner_says_of_stage_3() -> None:
    run = PlannedRun(build_config(described({**SETTINGS, "world": 2})), 2, "cpu")
    predicted = max(moment.total for moment in list(all_phases(run))[1:])
    for way in ("nested", "torch"):
        # 5 %: torch's fused AdamW takes no tile of its own, ours does; the loss keeps its table's gradient otherwise.
        assert max(run_ranks(peak_of_steps, 2, way)) == pytest.approx(predicted, rel=0.05)


def test_the_peak_falls_with_the_number_of_wrapped_modules() -> None:
    peaks = [max(run_ranks(peak_of_steps, 2, way)) for way in ("whole", "nested", "twice nested")]
    config = build_config(described({**SETTINGS, "world": 2})).model
    block = 4 * 12 * config.hidden_size**2  # bytes of a block's matrices
    # Without wrappers inside, weights and gradients of all blocks are whole at once; with them those of two.
    assert peaks[0] - peaks[1] >= 2 * (config.num_layers - 2) * block * 0.9
    assert peaks[2] <= peaks[1]


def peak_of_a_full_state_dict(rank: int, world: int) -> tuple[int, int, int]:
    """Beside what is there before; the largest unit; the whole model."""
    config = build_config(described({**SETTINGS, "world": world}))
    model = around(GPT2(config.model), "torch")
    with LiveBytes() as live:
        for bucket in buckets_of(unwrap(model)):
            bucket.master_state.view("weight").add_(0)  # seen by the meter
        before = live.sample()
        state = full_state_dict(model, everywhere=False)
        peak = live.peak - before
    sizes = [bucket.layout.numel * 4 for bucket in buckets_of(unwrap(model))]
    assert (len(state) > 0) == (rank == 0)
    return peak, max(sizes), sum(sizes)


def test_a_streamed_full_state_dict_has_no_second_model() -> None:
    (first, unit, model), (other, *_) = run_ranks(peak_of_a_full_state_dict, 2)
    assert first <= model + 2 * unit and other <= 2 * unit < model
