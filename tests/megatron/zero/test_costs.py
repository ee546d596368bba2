"""What a step costs, counted: what a rank holds between backward and step is what the ZeRO paper says, in bytes of the
tensors themselves; launches and waits of the host; DeepSpeed's estimates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.model import count_parameters as count_model_parameters
from megatron.optim import adam
from megatron.optim.rule import UpdateSegment
from megatron.zero.engine import ZeroEngine
from megatron.zero.estimate import (count_parameters, estimate_zero2_model_states_mem_needs_all_cold,
                                    estimate_zero2_model_states_mem_needs_all_live,
                                    estimate_zero3_model_states_mem_needs_all_cold,
                                    estimate_zero3_model_states_mem_needs_all_live)
from mpu import grads, groups
from mpu.groups import Groups
from tests.covering import pairs
from tests.distributed import on_ranks, run_ranks
from tests.megatron.counting import Calls, Launches
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, master
from tests.wires import accelerator_side

# Bytes per parameter with 16-bit weights and gradients, fp32 master and two moments; n data parallel ranks.
PAPER = {0: lambda n: 16.0, 1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n, 3: lambda n: 16 / n}


def live_bytes(engine: ZeroEngine) -> int:
    """Every storage of the engine's state, once; without the buffers of blocks that wait for their turn."""
    storages = {}
    for bucket in engine.buckets:
        whole = bucket.grads._full_buffer
        held = [
            bucket.gathered_params, bucket.device_param_shard, None if whole is None else whole.flat,
            bucket.grads._shard, *map(bucket.master_state.view, bucket.master_state.kinds)
        ]
        for tensor in held:
            if tensor is not None and tensor.untyped_storage().nbytes():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def check_live_state(rank: int, world: int) -> None:
    grid, rows = groups.build(1), torch.randint(0, 1024, (1, 33))
    for stage, bytes_of in PAPER.items():
        config = configure_gpt2(num_layers=4, hidden_size=128, max_position_embeddings=128, vocab_size=1024, bf16=True,
                                zero_stage=stage)
        engine = gpt2_engine(config, grid)
        for _ in range(2):
            engine.backward(engine(rows[:, :-1], rows[:, 1:]))
            held = live_bytes(engine) / count_model_parameters(config.model)[0]
            engine.step()
            engine.wait_for_param_gathers()
        assert held == pytest.approx(bytes_of(world), rel=0.02)  # slots and shards are padded to 128 elements


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_live_state_is_what_the_paper_says(world: int) -> None:
    run_ranks(check_live_state, world)


BLOCKS = 6


def most_live(recompute: bool, settings: dict[str, int]) -> dict[str, int]:
    """The most elements, and units, of a stage 3 run that were whole at the same time, counted from the buffers at
    every gather; and how often anything was gathered in a step."""
    engine = gpt2_engine(configure_gpt2(num_layers=BLOCKS, zero_stage=3, checkpoint_activations=recompute,
                                        checkpoint_num_layers=3, **settings), groups.build(1))
    counts = []
    for bucket in engine.buckets:
        def start(start=bucket._launch_gather) -> None:  # type: ignore[no-untyped-def]
            start()
            whole = [other.gathered_params.untyped_storage().nbytes() // 4 for other in engine.buckets]
            counts.append((sum(whole), sum(map(bool, whole))))

        bucket._launch_gather = start  # type: ignore[method-assign]
    rows = torch.randint(0, 61, (2, 17))
    for _ in range(2):
        counts.clear()
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        assert not any(bucket.is_unsharded for bucket in engine.buckets), "something stays whole between passes"
        engine.step()
    in_a_step = list(counts)
    with torch.no_grad():
        engine(rows[:, :-1])
        assert not any(bucket.is_unsharded for bucket in engine.buckets), "something stays whole after an evaluation"
    root, block = engine.buckets[0].layout.numel, engine.buckets[1].layout.numel
    return {"elements": max(live for live, _ in counts), "units": max(units for _, units in counts),
            "gathers": len(in_a_step), "root": root, "block": block}


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_stage_3_gathers_a_block_at_a_time_and_one_ahead(rank: int, world: int, recompute: bool) -> None:
    # The root (embeddings, final norm) stays for the whole pass. A recomputed chunk of three blocks stays for its
    # backward, as long as there is room.
    assert most_live(recompute, {"stage3_prefetch_bucket_size": 0})["units"] == (4 if recompute else 2)
    found = most_live(recompute, {})
    assert found["units"] == (4 if recompute else 3), "the next chunk is begun when the last has gone"
    assert found["gathers"] == 1 + 2 * BLOCKS - 1, "the last block stays from its forward to its backward"


@pytest.mark.parametrize("recompute, least", [pytest.param(False, 1, marks=pytest.mark.slow), (True, 2)])
@on_ranks(2)
def test_never_more_than_the_limit_is_gathered(rank: int, world: int, recompute: bool, least: int) -> None:
    """The least is the root and the block in use; where a chunk is recomputed for its last block, also that one."""
    sizes = most_live(False, {})
    reuse = {"stage3_max_reuse_distance": 10**9}  # whatever there is room for stays
    for blocks in range(least, BLOCKS + 1):
        limit = sizes["root"] + blocks * sizes["block"]
        assert most_live(recompute, {"stage3_max_live_parameters": limit, **reuse})["elements"] == limit
    needed = sizes["root"] + least * sizes["block"]
    with pytest.raises(ConfigError, match=f"raise it to {needed}"):
        most_live(recompute, {"stage3_max_live_parameters": needed - 1, **reuse})


@on_ranks(2)
def test_blocks_stay_for_their_backward_within_the_reuse_distance(rank: int, world: int) -> None:
    block = most_live(False, {})["block"]
    for kept in (1, 3, BLOCKS):
        # Between the forward of block i and its backward, each later block is used twice.
        found = most_live(False, {"stage3_max_reuse_distance": 2 * (kept - 1) * block})
        assert found["gathers"] == 1 + 2 * BLOCKS - kept


@on_ranks(2)
def test_gradients_are_reduced_while_backward_still_runs(rank: int, world: int) -> None:
    grid = groups.build(1)
    for stage in (0, 2, 3):
        engine = gpt2_engine(configure_gpt2(num_layers=3, zero_stage=stage), grid)
        during_backward: dict[str, bool] = {}
        for bucket in engine.buckets:
            def reduce(bucket=bucket, launch=bucket.grads.start_reduction) -> None:  # type: ignore[no-untyped-def]
                during_backward[bucket.name] = engine.pass_coordinator.in_backward
                launch()

            bucket.grads.start_reduction = reduce  # type: ignore[method-assign]
        rows = torch.randint(0, 61, (2, 17))
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        assert all(during_backward[f"blocks.{number}"] for number in range(3))


# ---- what DeepSpeed 0.19 prints for a model of 2.851 B parameters on 8 GPUs ------------------------------------------


TOTAL, LARGEST = 2_851_000_000, 32_899_072


def in_gb(count: int) -> float:
    return round(count / 2**30, 2)


def test_stage_2_gives_the_numbers_of_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = estimate_zero2_model_states_mem_needs_all_cold(TOTAL, num_gpus_per_node=8, num_nodes=1)
    # 0.1 GB: the published total is rounded to a million parameters.
    assert [(row.offload_optimizer, in_gb(row.gpu)) for row in rows] == [(True, 5.31), (False, 11.28)]
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
    assert estimate_zero2_model_states_mem_needs_all_live(model, 2, 2)[1].gpu == 2 * 80 + 18 * 80 // 4
    assert estimate_zero3_model_states_mem_needs_all_live(model, 2, 2)[-1].gpu == 4 * 40 + 18 * 80 // 4


# ---- launches and waits of the host, on an accelerator ---------------------------------------------------------------

TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture
def accelerator() -> Iterator[None]:
    with accelerator_side():
        yield


def made(layers: int = 2, precision: str = "fp32", stage: int = 0, optimizer: str = "adam") -> ZeroEngine:
    chosen = {} if precision == "fp32" else {precision: True}
    config = configure_gpt2(num_layers=layers, zero_stage=stage, optimizer=optimizer, lr=1e-3, lr_warmup_iters=0,
                            **chosen)
    return gpt2_engine(config, Groups())


def backward(engine: ZeroEngine) -> None:
    engine.backward(engine(TOKENS, TOKENS.clone(), grad_scale=engine.backward_scale))


def counted_step(engine: ZeroEngine, steps: int) -> Launches:
    """The last of so many steps."""
    for step in range(steps):
        backward(engine)
        with Launches() as counted:
            engine.step()
    return counted


@contextmanager
def the_kernel_of_norms() -> Iterator[list[Tensor]]:
    """Plays mpu/kernels.py, which needs Triton, with one launch; tests/mpu/kernel_cases.py has what it computes.
    The rows that it was asked for."""
    asked: list[Tensor] = []

    def norms_into(out: Tensor, rows: Tensor) -> None:
        asked.append(rows)
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=out)

    kernel = SimpleNamespace(serves=lambda rows: True, norms_into=norms_into)
    with patch.object(grads, "load_kernels", lambda *which: kernel):
        yield asked


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("precision, stage", pairs(["fp32", "bf16", "fp16"], [0, 1, 2, 3], each=1))
def test_a_step_is_a_launch_for_each_bucket_and_a_few_for_all_of_them(precision: str, stage: int) -> None:
    """At 24 layers there are 25 or 26 buckets, and 290 parameters."""
    engine = made(24, precision, stage)
    with the_kernel_of_norms() as asked:
        counted = counted_step(engine, 3)
    assert len(asked) == 3 * len(engine.buckets)
    assert sum(counted.kernels.values()) == len(engine.buckets) + {"fp32": 31, "bf16": 34, "fp16": 24}[precision] < 100
    assert counted.kernels["_fused_adamw_"] == 2, "one call for each hyper-parameter group"
    assert counted.waits <= 1


def calls_of_a_micro_batch(layers: int, stage: int) -> int:
    engine = made(layers, stage=stage)
    for _ in range(3):
        with Calls("megatron/zero") as counted:
            backward(engine)
        engine.step()
    return counted.count


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_does_as_much_for_each_layer_however_many_there_are(stage: int) -> None:
    few, more, many = (calls_of_a_micro_batch(layers, stage) for layers in (4, 8, 16))
    assert (many - more) == 2 * (more - few), "calls of the engine are linear in the number of layers"


# ---- the update that writes the 16-bit weights too ----------------------------------------------------------------


class Kernel:
    """Plays adam_kernel.py, which needs Triton; tests/megatron/optim/test_adam.py has what it computes."""

    SegmentTable = object
    groups: list[int] = []

    @staticmethod
    def update(spans: Sequence[UpdateSegment], places: object, hyper: object, at: object, **rule: bool) -> bool:
        if spans[0].group not in Kernel.groups:
            return False
        for span in spans:
            assert span.lp_out is not None and span.lp_out.dtype == torch.bfloat16
            span.master.add_(1)
            span.lp_out.copy_(span.master)
        return True


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("groups, copies", [([0, 1], 0), ([0], 2), ([1], 2), ([], 3)])
def test_weights_are_copied_where_the_rule_has_not_written_them(groups: list[int], copies: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16-bit gradients torch's kernel needs a copy of them for each group, and one of the weights for all."""
    monkeypatch.setattr(Kernel, "groups", groups)
    monkeypatch.setattr(adam, "load_kernels", lambda *which: Kernel)
    engine = made(24, "bf16")
    before = [master(bucket) for bucket in engine.buckets]
    kernels = counted_step(engine, 1).kernels
    assert (kernels["_fused_adamw_"], kernels["_foreach_copy_"]) == (2 - len(groups), copies)
    for bucket, old in zip(engine.buckets, before, strict=True):
        assert torch.equal(bucket.device_param_shard,
                           master(bucket).bfloat16()) and not torch.equal(master(bucket), old)
