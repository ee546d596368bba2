"""Every ZeRO setting does what its name says, and changes no bits where it only changes how numbers travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron import zero
from megatron.config.tree import ZeroConfig, build_config
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.gradients import FlatGradients
from megatron.zero.partitioned_param import Placeholder
from megatron.zero.stages import ineffective_setting_notes
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.kept import master
from tests.wires import accelerator_side, counted

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


def changes_no_bits(rank: int, world: int, values: dict[str, Any]) -> list[bool]:
    return [equal(steps(engine_of(stage)), steps(engine_of(stage, **values))) for stage in range(4)]


@pytest.mark.few(4)
@pytest.mark.parametrize("values", [
    {"contiguous_gradients": False}, {"overlap_comm": False}, {"reduce_scatter": False}, {"reduce_bucket_size": 100},
    {"allgather_bucket_size": 100}, {"allgather_partitions": False}, {"stage3_param_persistence_threshold": 100},
    {"stage3_max_reuse_distance": 10**9}, {"sub_group_size": 1}, {"stage3_prefetch_bucket_size": 0},
], ids=lambda values: next(iter(values)))
def test_how_numbers_travel_changes_no_bits(values: dict[str, Any]) -> None:
    assert run_ranks(changes_no_bits, 2, values) == [[True] * 4] * 2


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
    with accelerator_side(native):
        return _waits_at_once(engine_of(3, overlap_comm=overlap))


def _waits_at_once(engine: Engine) -> set[bool]:
    seen: set[bool] = set()
    for bucket in engine.core.buckets:
        def reduce(grads: FlatGradients = bucket.grads, reduce: Any = bucket.grads.start_reduction) -> None:
            reduce()
            assert grads._pending_reduction is not None
            seen.add(not grads._pending_reduction._works)

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


def test_a_setting_that_can_do_nothing_says_so_once() -> None:
    def said(on_cuda: bool = False, precision: str = "fp32", **values: Any) -> list[str]:
        return ineffective_setting_notes(ZeroConfig(**values), precision=precision, on_cuda=on_cuda)

    assert said(zero_stage=3, stage3_max_live_parameters=5, reduce_bucket_size=5, overlap_comm=False) == []
    assert said(zero_stage=2, stage3_max_live_parameters=5) == [
        " note: --stage3-max-live-parameters 5 has no effect at stage 2, where parameters are not sharded"]
    assert said(zero_stage=0, reduce_scatter=False) == [
        " note: --reduce-scatter False has no effect at stage 0, where nothing is sharded"]
    assert len(said(zero_stage=2, allgather_partitions=False)) == 1
    assert said(zero_stage=2, reduce_bucket_size=5, allgather_bucket_size=5, on_cuda=True) == [
        " note: --reduce-bucket-size 5 has no effect on GPUs, where a bucket is sent at once",
        " note: --allgather-bucket-size 5 has no effect on GPUs, where a bucket is sent at once"]
    assert len(said(zero_stage=0, reduce_bucket_size=5, allgather_bucket_size=5, on_cuda=True)) == 2
    assert len(said(load_from_fp32_weights=False)) == 1
    assert said(load_from_fp32_weights=False, precision="bf16") == []
    assert len(said(round_robin_gradients=True)) == 1
