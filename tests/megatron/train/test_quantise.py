"""Runs whose weights are rounded to fewer and fewer bits: on the grid of the logical tensor in every layout, stage and
home, with masters that are not rounded; resumed in the middle, and through an overflow. At which steps bits fall."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.bit_schedule import UNREACHABLE_COUNTER, BitSchedule, period_factor, relative_eigenvalues
from megatron.config.model_config import QuantizeConfig
from megatron.config.tree import build_config
from megatron.errors import ConfigError
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.api.engine import Engine
from megatron.zero.api.full_state_dict import gather_full_state_dict
from megatron.zero.offload.storage import WEIGHT
from mpu import groups as mpu_groups
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, TINY_SHAPE, lines, steps, total_digest, train, train_all

STEPS = 8
ROUNDED = ["--quantize-training", "--quantize-start-bits", 6, "--quantize-target-bits", 3, "--quantize-period", 2,
           "--quantize-offset", 0, "--quantize-groups", 4]
FLAGS = [*TINY, *NO_DROPOUT, "--mock-data", "--train-iters", STEPS, "--lr", 3e-3, "--global-batch-size", 4, *ROUNDED]


def cell(folder: Path, name: str, *flags: object) -> list[object]:
    return [*FLAGS, "--metrics-file", folder / name, "--save", folder / f"{name}.ckpt", *flags]


def test_every_stage_and_home_trains_the_same_bits(tmp_path: Path) -> None:
    """With noise in fp32, and in bf16: on the device, on the host, on a drive, and with parameters there too."""
    (tmp_path / "drive").mkdir()
    homes: dict[str, Sequence[object]] = {
        "0": ["--zero-stage", 0], "1": ["--zero-stage", 1], "2": ["--zero-stage", 2], "3": ["--zero-stage", 3],
        "3 split": ["--zero-stage", 3, "--stage3-param-persistence-threshold", 0],
        "host": ["--zero-stage", 2, "--offload-optimizer-device", "cpu"],
        "both": ["--zero-stage", 3, "--offload-optimizer-device", "cpu", "--offload-param-device", "cpu",
                 "--stage3-param-persistence-threshold", 0],
        "drive": ["--zero-stage", 3, "--offload-optimizer-device", "nvme", "--offload-param-device", "nvme",
                  "--stage3-param-persistence-threshold", 0, "--offload-optimizer-nvme-path", tmp_path / "drive",
                  "--offload-param-nvme-path", tmp_path / "drive"]}
    kinds = {"fp32": ["--quantize-rounding", "stochastic"], "bf16": ["--bf16", "--quantize-type", "asymmetric"]}
    pairs = [("fp32", home) for home in ("0", "1", "3 split", "host", "drive")]
    pairs += [("bf16", home) for home in ("0", "2", "3", "both", "drive")]
    run_ranks(train_all, 2, [cell(tmp_path, f"{kind}, {home}", *kinds[kind], *homes[home], "--batch-size", 2)
                             for kind, home in pairs], timeout=300)
    for kind, home in pairs:
        expected, digest = steps(tmp_path / f"{kind}, 0"), total_digest(tmp_path / f"{kind}, 0.ckpt")
        for mine, theirs in zip(steps(tmp_path / f"{kind}, {home}"), expected, strict=True):
            assert mine["lm_loss"] == theirs["lm_loss"], (home, mine["iteration"])
            # Of a sum in fp64 that the next line rounds to fp32 (docs/decisions/004): its order is the stage's.
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12)
        assert total_digest(tmp_path / f"{kind}, {home}.ckpt") == digest, home
    plain = [*FLAGS, "--no-quantize-training", "--batch-size", 4, "--metrics-file", tmp_path / "plain"]
    train(plain)
    assert steps(tmp_path / "plain") != steps(tmp_path / "fp32, 0")


def engine_for(tp: int = 1, dp: int = 1, frozen: Sequence[str] = (), **values: Any) -> Engine:
    config = build_config({
        **TINY_SHAPE, "model_parallel_size": tp, "batch_size": 2, "global_batch_size": 2 * dp,
        "quantize_training": True, "quantize_offset": 0, "quantize_groups": 4,
        "stage3_param_persistence_threshold": 0, **values})
    groups = mpu_groups.build(tp)
    model = build_model(config, groups)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return build_engine(config, model, groups, torch.device("cpu"))


GRIDS: list[dict[str, Any]] = [
    dict(quantize_start_bits=8), dict(quantize_start_bits=4, quantize_target_bits=4, quantize_type="asymmetric"),
    dict(quantize_start_bits=8, quantize_rounding="stochastic"),
    dict(quantize_start_bits=8, quantize_mixed=True, bf16=True),
    dict(quantize_start_bits=2, quantize_target_bits=2), dict(quantize_start_bits=1, quantize_target_bits=1, bf16=True),
]


def rounded(rank: int, world: int, tp: int, stage: int) -> list[dict[str, Tensor]]:
    """The weights that a run begins with, by the logical tensor."""
    found = []
    for grid in GRIDS:
        engine = engine_for(tp, world // tp, zero_stage=stage, **grid)
        engine.finish_step()
        found.append(gather_full_state_dict(engine.core))
        engine.destroy()
    return found


def test_weights_are_the_same_bits_for_every_tensor_parallel_size_and_stage() -> None:
    alone = rounded(0, 1, 1, 0)
    for world, tp, stage in ((2, 1, 2), (2, 1, 3), (2, 2, 0), (4, 2, 3)):
        found = run_ranks(rounded, world, tp, stage, timeout=300)[0]
        for grid, mine, theirs in zip(GRIDS, found, alone, strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                assert mine[name][: len(value)].equal(value[: len(mine[name])]), (grid, tp, stage, name)


def published(x: Tensor, groups: int, bits: int) -> Tensor:
    """The symmetric grid, written out for the rows of a whole tensor; the last group of a table may be smaller."""
    each = -(-len(x) // groups)
    parts = [x[first : first + each].double() for first in range(0, len(x), each)]
    scales = [(2 * part.float().abs().amax() / 2**bits).double() for part in parts]
    return torch.cat([(part / scale).round().clamp(-2 ** (bits - 1), 2 ** (bits - 1) - 1) * scale
                      for part, scale in zip(parts, scales)])


@pytest.mark.parametrize("bits", [3, 8])
def test_weights_are_on_the_published_grid_and_masters_are_not(bits: int) -> None:
    engine = engine_for(quantize_start_bits=bits, quantize_target_bits=bits)
    weights = gather_full_state_dict(engine.core)
    masters: dict[str, Tensor] = {}
    for bucket in engine.core.all_buckets:
        for slot in bucket.layout.slots:
            masters[slot.name] = bucket.master_state.view(WEIGHT)[slot.offset:slot.end].view(slot.shape)
    matrices = [name for name, master in masters.items() if master.dim() > 1]
    assert len(matrices) == 2 + 4 * 2 and len(masters) > len(matrices)
    for name, master in masters.items():
        rows = len(weights[name])  # without padding
        expected = published(master[:rows], 4, bits) if name in matrices else master
        assert torch.allclose(weights[name].double(), expected.double(), rtol=1e-5, atol=1e-9), name
        assert weights[name].equal(master[:rows]) == (name not in matrices), name


def test_an_overflow_does_not_count(tmp_path: Path) -> None:
    """The first loss scales are too high for fp16: steps are skipped, and the bits wait."""
    said = train(cell(tmp_path, "fp16", "--fp16", "--initial-loss-scale", 2.0**20, "--hysteresis", 1,
                      "--batch-size", 4, "--quantize-verbose"))
    skipped = [row["iteration"] for row in steps(tmp_path / "fp16") if row["skipped"]]
    assert skipped and skipped[0] == 1
    bits = [int(found) for found in re.findall(r"current bit-precision = (\d+)", said)]
    applied = STEPS - len(skipped)
    drops = sum(applied >= drop for drop in BitSchedule(6, 3, 2).drop_counters())
    assert bits == list(range(5, 6 - drops - 1, -1)) and bits[-1] > 3


def test_nothing_is_rounded_before_the_offset(tmp_path: Path) -> None:
    for name, flags in (("plain", ["--no-quantize-training"]), ("late", ["--quantize-offset", 5])):
        train(cell(tmp_path, name, *flags, "--batch-size", 4))
    plain, late = lines(tmp_path / "plain"), lines(tmp_path / "late")
    assert plain[:5] == late[:5] and plain[5] != late[5]


def test_what_cannot_be_rounded_is_said_in_keys_where_it_was_asked_in_keys(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"quantize_training": {
        "enabled": True, "eigenvalue": {"enabled": True, "layer_name": "bert.encoder.layer"}}}))
    with pytest.raises(ConfigError, match="^quantize_training.eigenvalue.layer_name bert.encoder.layer: the model"):
        train([*FLAGS[:-len(ROUNDED)], "--quantize-offset", 0, "--batch-size", 4, "--deepspeed_config", file])


def test_eigenvalues_schedule_the_same_bits_in_two_layouts(tmp_path: Path) -> None:
    layouts = {"dp": ["--zero-stage", 3, "--stage3-param-persistence-threshold", 0, "--batch-size", 2],
               "tp": ["--model-parallel-size", 2, "--batch-size", 4]}
    more = ["--quantize-verbose", "--quantize-eigenvalue", "--eigenvalue-max-iter", 16, "--eigenvalue-verbose",
            "--quantize-groups", 1, "--train-iters", 5]
    said = run_ranks(train_all, 2, [cell(tmp_path, name, *more, *flags) for name, flags in layouts.items()])[0]
    first, other = (re.findall(r"(blocks\.\d) (-?[\d.e+-]+) \(x", text.split("eigenvalues before step 2")[1])[:2]
                    for text in said)
    assert [name for name, _ in first] == [name for name, _ in other] == ["blocks.0", "blocks.1"]
    for (_, mine), (_, theirs) in zip(first, other):
        assert float(mine) == pytest.approx(float(theirs), rel=0.01), "printed to 4 digits"
    falls, same = (re.findall("current bit-precision.*", text) for text in said)
    assert falls == same and len(falls) >= 2


# ---- the schedule --------------------------------------------------------------------------------------------------

def walked(schedule: BitSchedule, steps: int, factor: int) -> list[int]:
    """The bits after each step, the first entry before any."""
    now = schedule.initial_state()
    found = [now.bits]
    for counter in range(1, steps + 1):
        now = schedule.next_state(now, counter, factor)
        found.append(now.bits)
    return found


def test_bits_of_each_step_are_the_closed_form_for_50_random_settings() -> None:
    """n bits have fallen from counter P (2 f)^(n - 1) on."""
    draw = random.Random(7)
    for _ in range(50):
        period, start, factor = draw.randint(1, 40), draw.randint(1, 16), draw.randint(1, 5)
        target = draw.randint(1, start)
        steps = 3000
        expected = []
        for counter in range(steps + 1):
            fallen = 0 if counter < period else int(math.floor(math.log(counter / period, 2 * factor) + 1e-9)) + 1
            expected.append(max(target, start - fallen))
        schedule = BitSchedule(start, target, period)
        assert walked(schedule, steps, factor) == expected, (period, start, target, factor)
        drops = schedule.drop_counters(factor)
        assert [start - sum(counter >= drop for drop in drops) for counter in range(steps + 1)] == expected


def test_the_blend_falls_by_the_ratio_and_begins_anew_at_each_fall() -> None:
    schedule = BitSchedule(8, 6, 4, change_ratio=0.25)
    now, found = schedule.initial_state(), [schedule.blend(schedule.initial_state(), 0)]
    for counter in range(1, 13):
        now = schedule.next_state(now, counter)
        found.append(schedule.blend(now, counter))
    assert found == [1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 0]
    assert BitSchedule(8, 6, 4).blend(now, 3) == 0


def test_a_steep_block_keeps_its_bits_longer() -> None:
    """Factors are 1 to 5; what was not found counts as the steepest."""
    assert [period_factor(share) for share in (1e-9, 0.24, 0.25, 0.5, 0.99, 1.0)] == [1, 1, 2, 3, 4, 5]
    assert relative_eigenvalues([2.0, -4.0, 1.0, math.nan, 0.0, math.inf]) == [0.5, 1.0, 0.25, 1.0, 1.0, 1.0]
    assert relative_eigenvalues([math.nan, 0.0]) == [1.0, 1.0] and relative_eigenvalues([]) == []


def test_periods_stay_numbers_that_a_checkpoint_can_hold() -> None:
    schedule = BitSchedule(16, 1, 10**9)
    now = schedule.initial_state()
    for _ in range(15):
        now = schedule.next_state(now, UNREACHABLE_COUNTER, 5)
    assert now.period == UNREACHABLE_COUNTER and now.bits == 1


def test_the_start_says_when_bits_will_fall() -> None:
    config = QuantizeConfig(quantize_training=True, quantize_period=400, quantize_offset=0)
    assert config.notes()[0].endswith(
        "rounded to 16 bits, and to 15, 14, 13, 12, 11, 10, 9, 8 bits at applied steps "
        "400, 800, 1600, 3200, 6400, 12800, 25600, 51200")
    assert config.notes(1000)[1] == (" note: --train-iters 1000 ends the run at 14 bits: a period P takes 2^7 P "
                                     "applied steps from 16 to 8 bits")
    later = QuantizeConfig(quantize_training=True, quantize_start_bits=8, quantize_offset=5)
    assert later.notes(9) == [" note: weights are rounded to 8 bits from applied step 5 on"]
    assert QuantizeConfig().notes() == []
