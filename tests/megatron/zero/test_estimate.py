"""DeepSpeed's estimates, against the table its documentation publishes for a model of 2.851 B parameters on 8 GPUs."""

from __future__ import annotations

import pytest
from torch import nn

from megatron.zero.api.estimate import (count_parameters, estimate_zero2_model_states_mem_needs_all_cold,
                                        estimate_zero2_model_states_mem_needs_all_live,
                                        estimate_zero3_model_states_mem_needs_all_cold,
                                        estimate_zero3_model_states_mem_needs_all_live)

TOTAL, LARGEST = 2_851_000_000, 32_899_072


def in_gb(count: int) -> float:
    return round(count / 2**30, 2)


def test_stage_2_gives_the_published_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = estimate_zero2_model_states_mem_needs_all_cold(TOTAL, num_gpus_per_node=8, num_nodes=1)
    # 0.1 GB: the published total is rounded to a million parameters.
    assert [(row.offload_optimizer, in_gb(row.gpu)) for row in rows] == [(True, 5.31), (False, 15.93)]
    assert [in_gb(row.host) for row in rows] == pytest.approx([127.5, 127.5], abs=0.1)
    assert "offload_optimizer=1" in capsys.readouterr().out


def test_stage_3_gives_the_published_numbers() -> None:
    rows = estimate_zero3_model_states_mem_needs_all_cold(TOTAL, LARGEST, num_gpus_per_node=8, num_nodes=1)
    choices = [(row.offload_optimizer, row.offload_param, row.zero_init) for row in rows]
    assert choices == [(True, True, True), (True, True, False), (True, False, True), (True, False, False),
                       (False, False, True), (False, False, False)]
    assert [in_gb(row.gpu) for row in rows] == [0.12, 0.12, 0.79, 0.79, 6.1, 6.1]
    assert [in_gb(row.host) for row in rows] == pytest.approx([71.7, 127.5, 63.7, 127.5, 1.47, 127.5], abs=0.1)


def test_a_shared_parameter_counts_once_and_the_largest_layer_is_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 8))
    model[2].weight = model[0].weight
    assert count_parameters(model) == (32 + 8 + 32 + 8, 40)
    assert estimate_zero2_model_states_mem_needs_all_live(model, 2, 2)[1].gpu == 4 * 80 + 16 * 80 // 4
    assert estimate_zero3_model_states_mem_needs_all_live(model, 2, 2)[-1].gpu == 4 * 40 + 18 * 80 // 4
