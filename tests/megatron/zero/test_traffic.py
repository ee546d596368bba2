"""How numbers travel: every collective of a step and its size, by a formula; and every ZeRO setting does what its name
says, and changes no bits where it only changes how numbers travel.

A unit travels in one piece: for K units, each step sends at

    stage 0    K all-reduces                    at the accumulation boundary
    stage 1    K reduce-scatters there          and K all-gathers after the optimizer
    stage 2    K reduce-scatters a micro-batch  and K all-gathers after the optimizer
    stage 3    K reduce-scatters a micro-batch  and 2 K - 2 all-gathers: each block for its forward and its backward,
               but the last block once, and the root once
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from megatron import zero
from megatron.config.tree import ZeroConfig, build_config
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import Placeholder
from megatron.zero.stages import ineffective_on_gpu_notes
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.run import master
from tests.wires import Sent, accelerator_side, counted

WIDTH, BLOCKS = 24, 3


class Model(torch.nn.Module):
    """Blocks of a matrix of 576 elements and a bias of 24, and a head outside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def engine_of(stage: int, **values: Any) -> Engine:
    config = build_config({"zero_stage": stage, "lr": 1e-2, "lr_decay_style": "constant", "clip_grad": 0.5,
                           "stage3_param_persistence_threshold": 0, **values})
    return zero.initialize(model=Model(), config=config, mpu=groups.build(1))[0]


def steps(engine: Engine, count: int = 3) -> list[torch.Tensor]:
    """Train a little on data of this rank; every weight."""
    draw = torch.Generator().manual_seed(engine.groups.dp.rank)
    dtype = engine.core.buckets[0].device_param_shard.dtype
    for _ in range(count):
        engine.backward(engine(torch.randn(4, WIDTH, generator=draw).to(dtype)))
        engine.step()
    with zero.GatheredParameters(engine.module.parameters()):
        return [p.detach().clone() for p in engine.module.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


# ---- what a step sends ---------------------------------------------------------------------------------------------


UNITS = {"block": 768, "root": 256}
"""Elements, padded to 128 for each of two ranks: a matrix of 24 x 24 and a bias; a head of 24 and a bias of 1."""

Traffic = dict[tuple[str, int, str], int]  # (kind, elements, dtype) -> how often


def formula(stage: int, accumulation: int, work: str) -> Traffic:
    sums = "all_reduce" if stage == 0 else "reduce_scatter"
    rounds = accumulation if stage >= 2 else 1
    forward_and_backward = 2 * BLOCKS - 1
    found = {(sums, UNITS["block"], "float32"): rounds * BLOCKS, (sums, UNITS["root"], "float32"): rounds}
    if stage in (1, 2):
        found |= {("all_gather", UNITS["block"], work): BLOCKS, ("all_gather", UNITS["root"], work): 1}
    if stage == 3:
        found |= {("all_gather", UNITS["block"], work): rounds * forward_and_backward,
                  ("all_gather", UNITS["root"], work): rounds}
    return found


def traffic(sent: list[Sent]) -> Traffic:
    """Of units; the norm, the loss and flags are small."""
    large = [operation for operation in sent if operation.numel >= 128]
    return dict(Counter((kind, numel, str(dtype).removeprefix("torch.")) for kind, numel, dtype in large))


def step_traffic(rank: int, world: int, stage: int, accumulation: int, bf16: bool) -> Traffic:
    with accelerator_side():
        config = build_config({"zero_stage": stage, "lr": 1e-2, "batch_size": 4, "bf16": bf16,
                               "global_batch_size": 4 * world * accumulation, "stage3_param_persistence_threshold": 0,
                               "reduce_bucket_size": 100, "allgather_bucket_size": 100})
        engine = zero.initialize(model=Model(), config=config, mpu=groups.build(1))[0]
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16 if bf16 else torch.float32)
        for _ in range(2):
            with counted() as sent:
                for _ in range(accumulation):
                    engine.backward(engine(x))
                    engine.step()
        return traffic(sent)


@pytest.mark.parametrize("stage", range(4))
def test_the_collectives_of_a_step_are_those_of_the_formula(stage: int) -> None:
    for accumulation, bf16 in product((1, 3), (False, True)):
        for found in run_ranks(step_traffic, 2, stage, accumulation, bf16):
            assert found == formula(stage, accumulation, "bfloat16" if bf16 else "float32")


# ---- settings -------------------------------------------------------------------------------------------------------


SETTINGS: list[dict[str, Any]] = [
    {"contiguous_gradients": False}, {"overlap_comm": False}, {"reduce_scatter": False}, {"reduce_bucket_size": 100},
    {"allgather_bucket_size": 100}, {"allgather_partitions": False}, {"stage3_param_persistence_threshold": 100},
    {"stage3_max_reuse_distance": 10**9}, {"sub_group_size": 1}, {"stage3_prefetch_bucket_size": 0}]


def changes_bits(rank: int, world: int) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for stage in range(4):
        wanted = steps(engine_of(stage))
        found += [(stage, values) for values in SETTINGS if not equal(steps(engine_of(stage, **values)), wanted)]
    return found


def test_how_numbers_travel_changes_no_bits() -> None:
    assert run_ranks(changes_bits, 2) == [[], []]


def sizes_on_the_wire(rank: int, world: int, stage: int, values: dict[str, Any],
                      native: bool = False) -> dict[str, int]:
    """The most elements in one operation of each kind during training (3 steps)."""
    with accelerator_side(native):
        engine = engine_of(stage, **values)
        with counted() as sent:
            steps(engine)
    kinds = sorted({operation.kind for operation in sent})
    return {kind: max(operation.numel for operation in sent if operation.kind == kind) for kind in kinds}


def test_bucket_sizes_bound_what_travels_at_a_time_on_cpu() -> None:
    half_a_block = 384  # a matrix of 576 and a bias, each padded to multiples of 128: 768 elements on two ranks
    for found in run_ranks(sizes_on_the_wire, 2, 2, {}):
        assert (found["irecv"], found["broadcast"]) == (half_a_block, half_a_block)
    for found in run_ranks(sizes_on_the_wire, 2, 2, {"reduce_bucket_size": 200, "allgather_bucket_size": 50}):
        assert (found["irecv"], found["broadcast"]) == (100, 50)
    for found in run_ranks(sizes_on_the_wire, 2, 0, {"reduce_bucket_size": 200}):
        assert found["all_reduce"] == 200


def test_bucket_sizes_cut_nothing_on_an_accelerator() -> None:
    small = {"reduce_bucket_size": 200, "allgather_bucket_size": 50}
    for found in run_ranks(sizes_on_the_wire, 2, 2, small, True):
        assert (found["reduce_scatter"], found["all_gather"]) == (768, 768)
        assert {"irecv", "isend", "broadcast"}.isdisjoint(found)
    for found in run_ranks(sizes_on_the_wire, 2, 0, small, True):
        assert found["all_reduce"] == 768


@pytest.mark.parametrize("native, receives", [(False, "irecv"), (True, "reduce_scatter")])
def test_reduce_scatter_off_sums_by_all_reduce(native: bool, receives: str) -> None:
    for found in run_ranks(sizes_on_the_wire, 2, 2, {"reduce_scatter": False}, native):
        assert receives not in found and found["all_reduce"] == 768


def waits_at_once(rank: int, world: int, overlap: bool, native: bool) -> set[bool]:
    """Whether each reduction and gather was complete when the call that started it returned."""
    seen: set[bool] = set()
    with accelerator_side(native):
        engine = engine_of(3, overlap_comm=overlap)
        for bucket in engine.core.buckets:
            def reduce(bucket: FlatBucket = bucket, reduce: Any = bucket.grads.start_reduction) -> None:
                reduce()
                seen.add(bucket.grads._pending_reduction is None)

            def gather(bucket: FlatBucket = bucket, gather: Any = bucket._launch_gather) -> None:
                gather()
                seen.add(bucket._pending_gather is None)

            bucket.grads.start_reduction, bucket._launch_gather = reduce, gather  # type: ignore[method-assign]
        steps(engine, 1)
    return seen


@pytest.mark.parametrize("native", [False, True], ids=["cpu", "accelerator"])
def test_without_overlap_every_exchange_is_waited_for(native: bool) -> None:
    assert run_ranks(waits_at_once, 2, False, native) == [{True}] * 2
    assert run_ranks(waits_at_once, 2, True, native) == [{False}] * 2


def whole_at_rest(rank: int, world: int, threshold: int) -> list[str]:
    engine = engine_of(3, stage3_param_persistence_threshold=threshold)
    steps(engine, 1)
    return [name for name, p in engine.module.named_parameters() if not isinstance(p, Placeholder)]


def test_parameters_below_the_persistence_threshold_stay_whole() -> None:
    biases = [f"blocks.{block}.bias" for block in range(BLOCKS)]
    assert run_ranks(whole_at_rest, 2, 0)[0] == []
    assert run_ranks(whole_at_rest, 2, 24)[0] == ["head.bias"]
    assert run_ranks(whole_at_rest, 2, 25)[0] == [*biases, "head.weight", "head.bias"]
    assert len(run_ranks(whole_at_rest, 2, 577)[0]) == 2 * BLOCKS + 2


def masters_after_loading(rank: int, world: int, folder: str, from_fp32: bool) -> list[bool]:
    """Whether the masters are those that were saved; whether they are 16-bit numbers."""
    saved = engine_of(2, bf16=True)
    steps(saved)
    saved.save_checkpoint(folder)
    loaded = engine_of(2, bf16=True, load_from_fp32_weights=from_fp32)
    loaded.load_checkpoint(folder)
    pairs = list(zip(saved.core.buckets, loaded.core.buckets, strict=True))
    return [all(torch.equal(master(old), master(new)) for old, new in pairs),
            all(torch.equal(master(new), master(new).bfloat16().float()) for _, new in pairs),
            all(torch.equal(old.device_param_shard, new.device_param_shard) for old, new in pairs)]


def test_masters_are_loaded_or_made_from_the_weights(tmp_path: Any) -> None:
    assert run_ranks(masters_after_loading, 2, str(tmp_path / "a"), True)[0] == [True, False, True]
    assert run_ranks(masters_after_loading, 2, str(tmp_path / "b"), False)[0] == [False, True, True]


def test_a_setting_that_can_do_nothing_on_a_gpu_says_so_once() -> None:
    sizes = {"reduce_bucket_size": 5, "allgather_bucket_size": 5}
    assert ineffective_on_gpu_notes(ZeroConfig(zero_stage=2, **sizes)) == [
        " note: --reduce-bucket-size 5 has no effect on GPUs, where a bucket is sent at once",
        " note: --allgather-bucket-size 5 has no effect on GPUs, where a bucket is sent at once"]
    assert len(ineffective_on_gpu_notes(ZeroConfig(zero_stage=0, **sizes))) == 1, "the other needs a stage"
    assert ineffective_on_gpu_notes(ZeroConfig(zero_stage=2, overlap_comm=False)) == []
