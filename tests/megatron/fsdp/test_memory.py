"""The memory of the FSDP face: what the planner says of stage 3, and no whole model where one is streamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config.tree import build_config
from megatron.fsdp.sharding import unwrap
from megatron.fsdp.state_dict import buckets_of, full_state_dict
from megatron.model import GPT2
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import all_phases
from tests.distributed import run_ranks
from tests.megatron.fsdp.loops import around
from tests.megatron.live_bytes import LiveBytes
from tests.megatron.plan.test_memory_model import SHAPE, described

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
