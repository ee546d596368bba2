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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.config.tree import build_config
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import Placeholder
from mpu import groups
from tests.distributed import on_ranks
from tests.megatron.zero import small
from tests.megatron.zero.run import DTYPES, gradient_runs, master
from tests.megatron.zero.small import STAGES, Model
from tests.wires import Sent, accelerator_side, counted

WIDTH, BLOCKS = 24, 3
"""Blocks of a matrix of 576 elements and a bias of 24, and a head outside of them."""


def engine_of(stage: int, **values: Any) -> Engine:
    config = build_config({"zero_stage": stage, "lr": 1e-2, "lr_decay_style": "constant", "clip_grad": 0.5,
                           "stage3_param_persistence_threshold": 0, **values})
    return zero.initialize(model=Model(width=WIDTH), config=config, mpu=groups.build(1))[0]


def steps(engine: Engine, count: int = 3) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(engine.groups.dp.rank)
    dtype = engine.core.buckets[0].device_param_shard.dtype
    for _ in range(count):
        engine.backward(engine(torch.randn(4, WIDTH, generator=draw).to(dtype)))
        engine.step()
    return small.gathered(engine.module)


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


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_the_collectives_of_a_step_are_those_of_the_formula(rank: int, world: int, stage: int) -> None:
    for accumulation, bf16 in product((1, 3), (False, True)):
        with accelerator_side():
            engine = engine_of(stage, batch_size=4, bf16=bf16, global_batch_size=4 * world * accumulation,
                               reduce_bucket_size=100, allgather_bucket_size=100)
            x = torch.randn(4, WIDTH, dtype=torch.bfloat16 if bf16 else torch.float32)
            for _ in range(2):
                with counted() as sent:
                    for _ in range(accumulation):
                        engine.backward(engine(x))
                        engine.step()
        assert traffic(sent) == formula(stage, accumulation, "bfloat16" if bf16 else "float32")


@on_ranks(4)
def test_replicas_of_shards_reduce_the_shards_between_groups_and_gather_within_one(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        with accelerator_side(), counted() as sent:
            engine = engine_of(stage, batch_size=4, zero_shard_group_size=2)
            before = len(sent)
            engine.backward(engine(torch.randn(4, WIDTH)))
            engine.step()
        between = {("all_reduce", UNITS["block"] // 2, "float32"): BLOCKS,
                   ("all_reduce", UNITS["root"] // 2, "float32"): 1}
        assert traffic(sent[before:]) == formula(stage, 1, "float32") | between


# ---- settings -------------------------------------------------------------------------------------------------------


SETTINGS: list[dict[str, Any]] = [
    {"contiguous_gradients": False}, {"overlap_comm": False}, {"reduce_scatter": False}, {"reduce_bucket_size": 100},
    {"allgather_bucket_size": 100}, {"allgather_partitions": False}, {"stage3_param_persistence_threshold": 100},
    {"stage3_max_reuse_distance": 10**9}, {"sub_group_size": 1}, {"stage3_prefetch_bucket_size": 0}]


@on_ranks(2)
def test_how_numbers_travel_changes_no_bits(rank: int, world: int) -> None:
    for stage in range(4):
        wanted = steps(engine_of(stage))
        for values in SETTINGS:
            assert all(map(torch.equal, steps(engine_of(stage, **values)), wanted)), (stage, values)


SMALL = {"reduce_bucket_size": 200, "allgather_bucket_size": 50}
BY_PARTS = {"irecv": 0, "isend": 0, "broadcast": 0}
SIZES: list[tuple[int, dict[str, Any], bool, dict[str, int]]] = [
    (2, {}, False, {"irecv": 384, "broadcast": 384}), (2, SMALL, False, {"irecv": 100, "broadcast": 50}),
    (0, SMALL, False, {"all_reduce": 200}), (0, SMALL, True, {"all_reduce": 768}),
    (2, SMALL, True, {"reduce_scatter": 768, "all_gather": 768, **BY_PARTS}),
    (2, {"reduce_scatter": False}, False, {"irecv": 0, "all_reduce": 768}),
    (2, {"reduce_scatter": False}, True, {"reduce_scatter": 0, "all_reduce": 768})]
"""Stage, settings, the accelerator's side, and the most elements in one operation of a kind in three steps. A block is
768 elements on two ranks. Bucket sizes bound what travels at a time on a CPU, and cut nothing on an accelerator."""


@on_ranks(2)
def test_bucket_sizes_and_reduce_scatter_decide_how_much_travels_at_a_time(rank: int, world: int) -> None:
    for stage, values, native, expected in SIZES:
        with accelerator_side(native):
            engine = engine_of(stage, **values)
            with counted() as sent:
                steps(engine)
        most = Counter({kind: 0 for kind in expected})
        for operation in sent:
            most[operation.kind] = max(most[operation.kind], operation.numel)
        assert {kind: most[kind] for kind in expected} == expected, (stage, values, native)


@pytest.mark.parametrize("native", [False, True], ids=["cpu", "accelerator"])
@on_ranks(2)
def test_without_overlap_every_exchange_is_waited_for(rank: int, world: int, native: bool) -> None:
    """When the call that starts a reduction or a gather returns, it is over; and with overlap it is not."""
    for overlap in (False, True):
        with accelerator_side(native):
            engine, is_over = engine_of(3, overlap_comm=overlap), set[bool]()
            for bucket in engine.core.buckets:
                def reduce(bucket: FlatBucket = bucket, reduce: Any = bucket.grads.start_reduction) -> None:
                    reduce()
                    is_over.add(bucket.grads._pending_reduction is None)

                def gather(bucket: FlatBucket = bucket, gather: Any = bucket._launch_gather) -> None:
                    gather()
                    is_over.add(bucket._pending_gather is None)

                bucket.grads.start_reduction, bucket._launch_gather = reduce, gather  # type: ignore[method-assign]
            steps(engine, 1)
        assert is_over == {not overlap}


@on_ranks(2)
def test_parameters_below_the_persistence_threshold_stay_whole(rank: int, world: int) -> None:
    small = ["head.weight", "head.bias", *(f"blocks.{block}.bias" for block in range(BLOCKS))]
    every = [name for name, _ in Model(width=WIDTH).named_parameters()]
    for threshold, expected in ((0, []), (24, ["head.bias"]), (25, small), (577, every)):
        engine = engine_of(3, stage3_param_persistence_threshold=threshold)
        steps(engine, 1)
        whole = [name for name, p in engine.module.named_parameters() if not isinstance(p, Placeholder)]
        assert sorted(whole) == sorted(expected)


@on_ranks(2)
def test_masters_are_loaded_or_made_from_the_weights(rank: int, world: int, tmp_path: Path) -> None:
    saved = engine_of(2, bf16=True)
    steps(saved)
    saved.save_checkpoint(tmp_path)
    for from_fp32 in (True, False):
        loaded = engine_of(2, bf16=True, load_from_fp32_weights=from_fp32)
        loaded.load_checkpoint(tmp_path)
        for old, new in zip(saved.core.buckets, loaded.core.buckets, strict=True):
            assert torch.equal(old.device_param_shard, new.device_param_shard)
            assert torch.equal(master(old), master(new)) == from_fp32
            assert torch.equal(master(new), master(new).bfloat16().float()) != from_fp32


# ---- what gradients are sent in, and what they are divided by before: an oracle casts, sums and compares -------------


N = 200


class Dot(nn.Module):
    """Its gradient is its input, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(N))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def dot_engine(stage: int, work: str = "fp32", accumulation: int = 1, **keys: Any) -> Engine:
    precision: dict[str, Any] = {} if work == "fp32" else {work: {"enabled": True}}
    if work == "fp16":
        precision["fp16"] |= {"initial_scale_power": 0, "loss_scale_window": 1000}
    return small.engine_of(stage, Dot(), accumulation, lr=1.0, keys={**precision, **keys})


def inputs(rank: int, number: int, work: str) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(10 * rank + number)).to(DTYPES[work])


def summed(engine: Engine) -> dict[int, Tensor]:
    """Start in the parameter -> run of the gradient, summed over the ranks and micro-batches, that this rank has."""
    return {segment.slot_offset: run.clone() for segment, run in gradient_runs(engine.core)}


def oracle(stage: int, work: str, sent: str | None, accumulation: int, world: int, native: bool) -> Tensor:
    """The sum over ranks and micro-batches as the guide describes it, for two ranks."""
    micro = [[inputs(rank, number, work) / accumulation for number in range(accumulation)] for rank in range(world)]
    if stage < 2:  # micro-batches are added up on each rank, in fp32 if there are several, and then sent
        wide = torch.float32 if accumulation > 1 or sent not in (None, work) else DTYPES[work]
        leaving = [[torch.stack([x.to(wide) for x in of_rank]).sum(0)] for of_rank in micro]
    else:
        leaving = micro
    total = torch.zeros(N)
    for number in range(len(leaving[0])):
        cast = [of_rank[number].to(DTYPES[sent] if sent else of_rank[number].dtype) for of_rank in leaving]
        over_ranks = torch.stack([x.float() for x in cast]).sum(0)
        is_backends = stage == 0 if not native else sent is not None
        if is_backends or accumulation == 1 and sent in (None, work):  # the backend's sum, or 16-bit sums
            over_ranks = over_ranks.to(cast[0].dtype).float()
        total += over_ranks
    return total


@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow, id="cpu"),
                                    pytest.param(True, id="accelerator")])
@on_ranks(2)
def test_gradients_are_sent_in_the_precision_that_is_asked_for(rank: int, world: int, native: bool) -> None:
    with accelerator_side(native):
        for stage, work, sent, accumulation in product(STAGES, DTYPES, (None, *DTYPES), (1, 2)):
            case = f"stage {stage}, {work} sent as {sent}, {accumulation} micro-batches"
            engine = dot_engine(stage, work, accumulation, communication_data_type=sent)
            with counted() as operations:
                for number in range(accumulation):
                    engine.backward(engine(inputs(rank, number, work)))
                    if number < accumulation - 1:
                        engine.step()
            wanted = oracle(stage, work, sent, accumulation, world, native)
            for start, run in summed(engine).items():
                assert torch.equal(run.float(), wanted[start:start + len(run)]), f"{case}: other sums"
            seen = {dtype for kind, _, dtype in operations if kind in ("isend", "all_reduce", "reduce_scatter")}
            as_accumulated = torch.float32 if native or stage < 2 and accumulation > 1 else DTYPES[work]
            assert seen == {DTYPES[sent] if sent else as_accumulated}, f"{case}: sent as {seen}"
            assert all(master(bucket).dtype == torch.float32 for bucket in engine.core.buckets), f"{case}: masters"


def trained(rank: int, engine: Engine, work: str = "fp32") -> Tensor:
    for number in range(4):
        engine.backward(engine(inputs(rank, number, work)))
        engine.step()
    return small.whole(engine)


@on_ranks(2)
def test_dividing_before_the_sum_gives_the_same_weights_up_to_rounding(rank: int, world: int) -> None:
    thirds = []
    for stage, work, accumulation in product(STAGES, ("fp32", "bf16"), (1, 2)):
        plain = trained(rank, dot_engine(stage, work, accumulation), work).float()
        for keys in ({"prescale_gradients": True}, *({"gradient_predivide_factor": by} for by in (4.0, 3.0))):
            weights = trained(rank, dot_engine(stage, work, accumulation, **keys), work).float()
            off, case = float((weights - plain).norm() / plain.norm()), f"{keys}, {stage}, {work}, {accumulation}"
            if keys.get("gradient_predivide_factor") != 3.0:
                assert off == 0, f"{case}: powers of two round nothing"
            else:
                assert off < (1e-6 if work == "fp32" else 1e-2), case
                thirds.append(off)
    assert any(thirds), "a third does round: it was divided before the sum"


WAYS: list[dict[str, Any]] = [
    {}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2}, {"communication_data_type": "fp32"},
    {"communication_data_type": "bf16"}]


@on_ranks(2)
def test_an_fp16_sum_that_overflows_fits_when_divided_before_or_sent_wider(rank: int, world: int) -> None:
    """Gradients of 40,000 on two ranks: their sum is above the largest fp16 number, their mean is not."""
    for stage, keys in product(STAGES, WAYS):
        engine = dot_engine(stage, "fp16", **keys)
        engine.backward(engine(torch.full((N,), 40_000.0).half()))
        report = engine.step()
        assert report is not None and report.applied == bool(keys)
        wanted = pytest.approx(40_000, rel=2e-3) if keys else float("inf")
        assert report.grad_norm / N**0.5 == wanted
