"""The time of a step: what it is made of, counted the slow way, on machines that are made up."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.plan import cli as plan
from megatron.plan.footprint import PlannedRun
from megatron.plan.machine_rates import RateCurve
from megatron.plan.step_time import step_time
from megatron.train import build
from megatron.train.batches import Batch
from megatron.train.evaluation import forward_loss
from megatron.train.flops import flops_per_token
from mpu.groups import Groups
from tests.megatron.plan.machines import BYTES, FLOPS, machine, proportional

FLAGS = ["--num-layers", "3", "--hidden-size", "64", "--num-attention-heads", "4", "--max-position-embeddings", "32",
         "--vocab-size", "512", "--batch-size", "2", "--attention-dropout", "0", "--hidden-dropout", "0",
         "--device", "cpu", "--stage3-param-persistence-threshold", "0"]


ON_GPUS = [flag for flag in FLAGS if flag not in ("--device", "cpu")]


def planned(*argv: str) -> PlannedRun:
    return plan.parse([*FLAGS, *argv])[1]


def on_gpus(*argv: str) -> PlannedRun:
    return plan.parse([*ON_GPUS, *argv])[1]


def matrices(run: PlannedRun) -> int:
    """Weights that take part in products, those of the logits included."""
    return sum(slot.numel for slot in run.block_parameters if len(slot.shape) == 2) * run.num_layers + 512 * 64


def test_products_are_six_flops_a_weight_and_token() -> None:
    run = planned()
    assert step_time(run, machine()).products == pytest.approx(6 * matrices(run) * 2 * 32 / FLOPS)
    model = run.config.model
    apart = model.parameters() - matrices(run)  # positions, biases and norms
    assert flops_per_token(model, 32) == 6 * matrices(run) + 6 * apart + 12 * 3 * 64 * 32


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_recomputation_is_another_forward_of_the_blocks_but_for_the_last_product_of_a_chunk(chunk: int) -> None:
    run, again = planned(), planned("--checkpoint-activations", "--checkpoint-num-layers", str(chunk))
    rates = machine(attention_forward=proportional(1e-6), block_forward=proportional(1e-9), replay=0.25)
    plain, more = step_time(run, rates), step_time(again, rates)
    left_out = 4 * 64 * 64 * ceil(3 / chunk)
    assert more.products - plain.products == pytest.approx(
        2 * (matrices(run) - 512 * 64 - left_out) * 2 * 32 / FLOPS)
    assert more.attention == pytest.approx(2 * plain.attention) and more.rest == pytest.approx(
        2 * plain.rest + 0.25 * run.num_layers)


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_products_are_those_that_torch_runs(chunk: int) -> None:
    run = planned(*(["--checkpoint-activations", "--checkpoint-num-layers", str(chunk)] if chunk else []))
    engine = build.engine(run.config, build.model(run.config, Groups()), Groups(), torch.device("cpu"))
    engine.train()
    rows = torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        engine.backward(forward_loss(engine, Batch(rows, rows)))
    found = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    addmm_ = 2 * 64 * 64 * 512  # of the weights of the logits, which torch's counter does not know
    assert step_time(run, machine()).products * FLOPS == pytest.approx(found + addmm_)


def test_every_micro_batch_takes_the_same_and_the_optimizer_comes_once() -> None:
    rates = machine(update=proportional(1e-9), a_pass=0.5, a_step=0.25)
    once, four = step_time(planned(), rates), step_time(planned("--global-batch-size", "8"), rates)
    assert (four.products, four.optimizer) == (pytest.approx(4 * once.products), once.optimizer)
    assert (once.rest, four.rest) == (0.75, 2.25)


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_travels_is_what_the_traffic_of_the_plan_says(dp: int, stage: int, accumulation: int) -> None:
    run = planned("--ranks", str(dp), "--zero-stage", str(stage), "--global-batch-size", str(2 * dp * accumulation))
    rates, sent = machine(2), run.traffic()
    # One rank sends and receives so much; the machine that is made up takes 1 s / BYTES of the whole between two.
    norm = rates.all_reduce(1)
    assert step_time(run, rates).exchange - norm == pytest.approx(2 * (sent.gradients + sent.parameters) / BYTES,
                                                                  rel=1e-6)


def test_no_more_hides_than_there_is_to_hide_behind_and_than_is_sent() -> None:
    run = planned("--ranks", "2")
    slow_wire, fast_wire = machine(2, all_reduce=proportional(1.0), hides=0.5), machine(2, hides=0.5)
    backward = 4 * (matrices(run) - 512 * 64) * 2 * 32 / FLOPS
    assert step_time(run, slow_wire).hidden == pytest.approx(backward * 2 / 3)  # of all blocks but the last
    block = 2 * run.block.numel * 4 / BYTES
    assert step_time(run, replace(fast_wire, forward=slow_wire.forward)).hidden <= 2 * 0.5 * block
    assert step_time(run, replace(slow_wire, hides=0.0)).hidden == 0
    assert step_time(planned("--ranks", "2", "--no-overlap-comm"), slow_wire).hidden == 0


def test_meetings_are_by_the_collective_and_the_stage() -> None:
    rates = machine(2, meetings=(1.0, 2.0, 3.0, 4.0, 5.0))
    for stage, expected in ((0, 4), (1, 16), (2, 36), (3, 80)):  # three blocks and the root, two micro-batches
        run = planned("--ranks", "2", "--zero-stage", str(stage), "--global-batch-size", "8")
        more = step_time(run, rates).exchange - step_time(run, machine(2)).exchange
        assert more == pytest.approx(expected)
    assert step_time(planned(), rates).exchange == 0


def test_what_stays_whole_under_stage_3_is_not_collected() -> None:
    rates = machine(2, split_unit=10.0, meetings=(1.0, 2.0, 3.0, 4.0, 5.0))
    everything, nothing, matrices_only = "0", str(10**9), "100"
    for threshold, units, met in ((everything, 4, 4.0 * 10), (nothing, 0, 5.0 * 2), (matrices_only, 4, 4.0 * 12)):
        run = planned("--ranks", "2", "--zero-stage", "3", "--stage3-param-persistence-threshold", threshold)
        step, plain = step_time(run, rates), step_time(run, machine(2))
        assert step.rest - plain.rest == pytest.approx(10 * units)
        assert step.exchange - plain.exchange == pytest.approx(met)


def test_tensor_parallel_ranks_share_the_products_and_sum_twice_a_block_and_direction() -> None:
    alone, pair = planned(), planned("--ranks", "2", "--model-parallel-size", "2")
    rates = machine(2)
    assert step_time(pair, rates).products == pytest.approx(step_time(alone, rates).products / 2)
    stream, losses, norm = 2 * 32 * 64 * 4, 3 * 2 * 32 * 4, 1
    assert step_time(pair, rates).exchange == pytest.approx(((4 * 3 + 2) * stream + losses + norm) * 2 / BYTES)


def test_state_on_the_host_is_updated_there_and_travels() -> None:
    rates = machine(update=proportional(1e-9), host_update=proportional(1e-8), link=1e9)
    here = on_gpus("--zero-stage", "2")
    away = on_gpus("--zero-stage", "2", "--offload-optimizer-device", "cpu")
    assert step_time(here, rates).optimizer == pytest.approx(here.shard_numel * 1e-9)
    assert step_time(away, rates).optimizer == pytest.approx(away.shard_numel * (1e-8 + 8e-9))


def test_state_that_the_device_updates_comes_to_it_and_goes_again() -> None:
    """Masters and two moments, in fp32."""
    rates = machine(update=proportional(1e-9), host_update=proportional(1.0), link=1e9)
    run = on_gpus("--zero-stage", "2", "--offload-optimizer-device", "cpu", "--offload-update", "device")
    assert step_time(run, rates).optimizer == pytest.approx(run.shard_numel * (1e-9 + 2 * 3 * 4 / 1e9))


@pytest.mark.parametrize("flags, bytes_each", [([], 4), (["--communication-data-type", "bf16"], 2),
                                               (["--communication-data-type", "fp32"], 4)])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_travel_as_wide_as_gpus_send_them(
        stage: int, accumulation: int, flags: list[str], bytes_each: int) -> None:
    run = on_gpus("--bf16", "--ranks", "2", "--zero-stage", str(stage), *flags,
                  "--global-batch-size", str(4 * accumulation))
    numel = run.root.numel + run.persistent.numel + run.num_layers * run.block.numel
    rounds = accumulation if stage >= 2 else 1
    ways = 2 if stage == 0 else 1  # by rings, half of it goes out once or twice between two ranks
    assert run.traffic().gradients == rounds * ways * bytes_each * numel // 2
    taken = step_time(run, machine(2, all_gather=RateCurve(()))).exchange
    sums = machine(2).all_reduce if stage == 0 else machine(2).reduce_scatter
    assert taken - machine(2).all_reduce(1) == pytest.approx(rounds * sums(numel * bytes_each), rel=1e-6)


def test_on_a_cpu_gradients_travel_as_backward_leaves_them() -> None:
    run = planned("--bf16", "--ranks", "2", "--zero-stage", "2")
    assert run.traffic().gradients == (run.root.numel + run.num_layers * run.block.numel) * 2 // 2


@pytest.mark.parametrize("bandwidth", [1e6, 3e7, 1e8, 1e9])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_backward_hides_no_more_than_itself_at_stage_3_on_gpus(bandwidth: float, accumulation: int) -> None:
    run = on_gpus("--bf16", "--ranks", "2", "--zero-stage", "3", "--global-batch-size", str(4 * accumulation))
    rates = machine(2, hides=1.0, reduce_scatter=proportional(1 / bandwidth), all_gather=proportional(1 / bandwidth))
    forward, backward = (directions * (matrices(run) - 512 * 64) * 2 * 32 / FLOPS / 3 for directions in (2, 4))
    gather, reduce = run.block.numel * 2 / bandwidth, run.block.numel * 4 / bandwidth
    expected = 0.0
    for _micro_batch in range(accumulation):
        for _block in range(2):  # the first has nothing before it, or the last nothing after it
            expected += min(gather, forward) + min(gather + reduce, backward)
    assert step_time(run, rates).hidden == pytest.approx(expected)


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e9])
@pytest.mark.parametrize("stage", [1, 2])
def test_new_weights_travel_beside_the_next_forward_on_gpus_once_a_step(bandwidth: float, stage: int) -> None:
    flags = ("--ranks", "2", "--zero-stage", str(stage), "--global-batch-size", "8")
    rates = machine(2, hides=0.5, reduce_scatter=RateCurve(()), all_gather=proportional(1 / bandwidth))
    run = on_gpus(*flags)
    forward = 2 * (matrices(run) - 512 * 64) * 2 * 32 / FLOPS / 3
    assert step_time(run, rates).hidden == pytest.approx(2 * min(0.5 * run.block.numel * 4 / bandwidth, forward))
    assert step_time(on_gpus(*flags, "--no-overlap-comm"), rates).hidden == 0
    assert step_time(planned(*flags), rates).hidden == 0
